"""Up to how many rows the engine outruns PyTorch's matmul: timed once on a machine, and kept in the user's cache."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro import machine, settings

STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of rows that are tried."""

SIZE = 2048
"""Rows and columns of the matrix that is multiplied."""

REPEATS = 3
FILE = "rows.json"

Multiply = Callable[[Tensor, Tensor], object]

_ONE_AT_A_TIME = threading.Lock()


@functools.cache
def most_rows(isa: str, dtype: torch.dtype, num_threads: int, engine: Multiply) -> int:
    """The most of `STEPS` for which the engine was as fast as PyTorch's matmul; 0 if it never was.

    Args:
        isa: the instruction set's name.
        dtype: of rows and matrix.
        num_threads: of both.
        engine: multiplies rows [T, K] by a matrix [N, K] with this instruction set.
    """
    name = f"{isa} {str(dtype).removeprefix('torch.')} {num_threads} threads"
    with _ONE_AT_A_TIME:  # threads that measure at once would measure each other
        kept = read()
        if name not in kept:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                kept[name] = _search(dtype, engine)
            _keep(kept)
        return kept[name]


def read() -> dict[str, int]:
    """What was found on this machine before, by instruction set, dtype and threads."""
    found = _read_all().get(_machine(), {})
    return {name: rows for name, rows in found.items() if rows in (0, *STEPS)} if isinstance(found, dict) else {}


def path() -> Path:
    """Where it is kept; a RuntimeError for a user without a home."""
    return settings.cache_folder() / FILE


@functools.cache
def _machine() -> str:
    # Not all that `machine.describe` says, which starts CUDA where there is a GPU.
    parts = machine.processor_name(), " ".join(machine.features()), f"{machine.cores()} cores"
    return "; ".join((*parts, f"torch {torch.__version__}", f"moestro {metadata.version('moestro')}"))


def _search(dtype: torch.dtype, engine: Multiply) -> int:
    matrix = torch.full((SIZE, SIZE), 0.01, dtype=dtype, device="cpu")
    low, high = -1, len(STEPS)  # the engine is ahead at low, and behind at high
    while high - low > 1:
        at = (low + high) // 2
        rows = torch.full((STEPS[at], SIZE), 0.01, dtype=dtype, device="cpu")
        ahead = _is_ahead(functools.partial(engine, rows, matrix), functools.partial(F.linear, rows, matrix))
        low, high = (at, high) if ahead else (low, at)
    return STEPS[low] if low >= 0 else 0


def _is_ahead(one: Callable[[], object], other: Callable[[], object]) -> bool:
    times: dict[Callable[[], object], list[float]] = {one: [], other: []}
    for call in (one, other) * REPEATS:
        start = time.perf_counter()
        call()
        times[call].append(time.perf_counter() - start)
    return min(times[one]) <= min(times[other])


def _read_all() -> dict[str, Any]:
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(found: dict[str, int]) -> None:
    """Write it whole or not at all; where nothing can be written, the next process measures again."""
    every = _read_all()
    before = every.get(_machine())
    every[_machine()] = (before if isinstance(before, dict) else {}) | found
    try:
        place = path()
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, ignore_cleanup_errors=True) as scratch:
            written = Path(scratch) / FILE
            written.write_text(json.dumps(every, indent=1), encoding="utf-8")
            os.replace(written, place)
    except (OSError, RuntimeError):
        return
