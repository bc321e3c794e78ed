"""What a process may set: the only reader of os.environ in the package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

IMPLEMENTATION_VARIABLE = "MOESTRO_IMPLEMENTATION"
STRATEGY_VARIABLE = "MOESTRO_STRATEGY"
BENCH_PEERS_VARIABLE = "MOESTRO_BENCH_PEERS"


@dataclass(frozen=True)
class Settings:
    """What is forced by name. None leaves the choice to the priority list (or to the shape)."""

    implementation: str | None = None
    strategy: str | None = None


class _Holder:
    """The settings in force, in a place torch.compile can read and guard."""

    # A variable that is set but empty names nothing.
    settings = Settings(os.environ.get(IMPLEMENTATION_VARIABLE) or None, os.environ.get(STRATEGY_VARIABLE) or None)


def current() -> Settings:
    """The settings in force."""
    return _Holder.settings


def bench_peers() -> str | None:
    """The folder of peers that the benchmark may run beside those of PyTorch and Transformers; read when asked."""
    return os.environ.get(BENCH_PEERS_VARIABLE) or None


def cache_folder() -> Path:
    """Where files may be kept that can be made again: moestro's folder in the user's cache directory; read when asked.

    The directory is $XDG_CACHE_HOME where that is set, else ~/.cache.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moestro"


@contextmanager
def use(implementation: str | None = None, strategy: str | None = None) -> Iterator[None]:
    """Force an implementation or a strategy by name in the whole process while the block is open.

    ``with moestro.use(implementation="reference"): ...``. An implementation that does not exist, or
    cannot run the arguments it meets, raises `UnsupportedError` at the call, and an unknown strategy
    `InvalidInputError`: there is no silent fallback. The environment variables MOESTRO_IMPLEMENTATION and
    MOESTRO_STRATEGY set the same two values for a whole process.

    Args:
        implementation: a name from `moestro.explain`, or None to leave it.
        strategy: "grouped", "blockwise", "selective" or "all_experts", or None to leave it.
    """
    before = _Holder.settings
    _Holder.settings = Settings(implementation or before.implementation, strategy or before.strategy)
    try:
        yield
    finally:
        _Holder.settings = before
