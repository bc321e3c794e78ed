"""Peers from outside PyTorch and Transformers: `benchmarks/peers` of a checkout, or of the folder that is named.

`install_peers.py` leaves a link to `benchmarks` in the folder that it fills, and MOESTRO_BENCH_PEERS names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import moestro
from moestro import settings
from moestro.bench.peers.variant import Variant

CHECKOUT = Path(moestro.__file__).parents[2]  # if the package is run from one
PACKAGE = "peers"
"""A Python package with `PEERS`, a sequence of `Variant`s, and a function `versions`."""


def missing() -> str | None:
    """None, or the sentence why there are no peers from outside."""
    if _folder() is not None:
        return None
    return (
        f"peers from outside (vLLM, llama.cpp, ...) are in a checkout of moestro: run the benchmark there, or set "
        f"{settings.BENCH_PEERS_VARIABLE} to the folder that its benchmarks/install_peers.py filled"
    )


def peers() -> Sequence[Variant]:
    """Those of the folder; none where there is no folder."""
    return getattr(_package(), "PEERS", ())


def versions() -> dict[str, str]:
    """Of the peers that are installed; nothing where there is no folder."""
    return getattr(_package(), "versions", dict)()


def _package() -> ModuleType | None:
    folder = _folder()
    if folder is None:
        return None
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(PACKAGE)


def _folder() -> Path | None:
    named = settings.bench_peers()
    folders = [root / "benchmarks" for root in (CHECKOUT, *([Path(named)] if named else []))]
    return next((folder for folder in folders if (folder / PACKAGE / "__init__.py").is_file()), None)
