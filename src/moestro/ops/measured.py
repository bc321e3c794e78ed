"""What was timed on this machine: once, when it is first needed, and kept in the user's cache."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

import torch

from moestro import machine, settings
from moestro.ops import native

T = TypeVar("T")

FILE = "measured.json"
LEAST_ROUNDS = 3

CALM = 0.05
"""Of a round's seconds, what a thread of this process may wait for a core if it is to count."""

PATIENCE = 0.03
"""Seconds beyond those asked for that calls are timed where too few rounds count."""

_TASKS = Path("/proc/self/task")

_ONE_AT_A_TIME = threading.RLock()
"""For threads; what is measured may itself need what is measured."""

_gave_up = 0
"""How often `fastest` found too few rounds that count, since threads waited for cores."""


def measures() -> bool:
    """Whether this process decides by what it measures; not with MOESTRO_MEASURE=0, and ranks are to choose alike."""
    job = torch.distributed.is_available() and torch.distributed.is_initialized()
    return settings.MEASURES and not job


def kept(
    name: str, measure: Callable[[], list[float]], is_sound: Callable[[list[float]], bool]
) -> tuple[list[float], bool]:
    """The numbers of that name: those that were found on this machine before, if they are sound, or measured now; and
    whether threads had their cores meanwhile. What was measured where they waited is not kept, and may be far off."""
    with _ONE_AT_A_TIME:  # threads that measure at once would measure each other
        found, before = read(), _gave_up
        if name not in found or not is_sound(found[name]):
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                found[name] = measure()
            if _gave_up == before:
                _keep(found)
        return found[name], _gave_up == before


def times_given_up() -> int:
    """How often `fastest` gave up in this process. If it rose while something was measured, that is not kept."""
    return _gave_up


def read() -> dict[str, list[float]]:
    """What was found on this machine before, by name."""
    found = _read_all().get(_machine(), {})
    return {name: list(n) for name, n in found.items() if _is_numbers(n)} if isinstance(found, dict) else {}


def forget() -> None:
    """Measure on this machine again when something is needed, from the next process on."""
    every = _read_all()
    if every.pop(_machine(), None) is not None:
        _write(every)


def path() -> Path:
    """Where it is kept; a RuntimeError for a user without a home."""
    return settings.cache_folder() / FILE


def fastest(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """The least seconds of each call, the calls in turns for so long, and at least three times.

    A round in which a thread of this process waited for a core does not count: beside a compiler a call of 0.03 ms
    takes 7 ms three times in a row. After `PATIENCE`, and twice as many rounds, what was found is returned, and `kept`
    is told.
    """
    global _gave_up
    best = [float("inf")] * len(calls)
    start = time.perf_counter()
    rounds = calm = 0
    with _Waits() as waits:
        waits.longest()
        while calm < LEAST_ROUNDS or time.perf_counter() - start < seconds:
            if rounds >= 2 * LEAST_ROUNDS and calm < LEAST_ROUNDS and time.perf_counter() - start > seconds + PATIENCE:
                _gave_up += 1
                break
            began = time.perf_counter()
            for index, call in enumerate(calls):
                begin = time.perf_counter()
                call()
                best[index] = min(best[index], time.perf_counter() - begin)
            length = time.perf_counter() - began
            rounds += 1
            calm += waits.longest() <= CALM * length
    return best


class _Waits:
    """How long threads of this process were ready to run and had no core, as Linux counts it; 0 elsewhere.

    It is the second number of a thread's `schedstat`, in nanoseconds (https://docs.kernel.org/scheduler/sched-stats.html).
    """

    def __init__(self) -> None:
        self._files: dict[str, BinaryIO] = {}  # kept open: opening takes longer than the shortest calls
        self._waited: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def longest(self) -> float:
        """Seconds that one thread has waited at most since this was asked last, or since it was first seen."""
        with contextlib.suppress(OSError):
            for thread in set(os.listdir(_TASKS)) - set(self._files):  # the first call may start PyTorch's
                with contextlib.suppress(OSError):
                    self._files[thread] = (_TASKS / thread / "schedstat").open("rb", buffering=0)
        most = 0
        for thread, file in self._files.items():
            with contextlib.suppress(OSError, IndexError, ValueError):  # one that ended has waited no longer
                waited = int(os.pread(file.fileno(), 64, 0).split()[1])
                most = max(most, waited - self._waited.get(thread, waited))
                self._waited[thread] = waited
        return most * 1e-9


def taken_by_others(call: Callable[[], T]) -> tuple[T, float]:
    """What a call returns, and the share of the cores for its threads that others took meanwhile; 0 if not told."""
    began, before, own = time.perf_counter(), machine.busy_seconds(), _own_seconds()
    result = call()
    seconds, after = time.perf_counter() - began, machine.busy_seconds()
    if before is None or after is None:
        return result, 0.0
    others = after - before - (_own_seconds() - own)
    wanted, free = min(machine.cores(), torch.get_num_threads()), (os.cpu_count() or 1) - others / seconds
    return result, min(max(wanted - free, 0.0) / wanted, 1.0)


def _own_seconds() -> float:
    return sum(os.times()[:4])  # of this process, and of those that it started and that ended


def _is_numbers(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(n, (int, float)) and math.isfinite(n) for n in found)


@functools.cache
def _machine() -> str:
    # Not all that `machine.describe` says, which starts CUDA where there is a GPU.
    parts = machine.processor_name(), " ".join(machine.features()), f"{machine.cores()} cores"
    masked = f"without {' '.join(settings.MASKED)}" if settings.MASKED else "whole"
    versions = f"torch {torch.__version__}", f"moestro {metadata.version('moestro')}", f"engine {native.digest()}"
    return "; ".join((*parts, masked, *versions))


def _read_all() -> dict[str, Any]:
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(found: dict[str, list[float]]) -> None:
    every = _read_all()
    before = every.get(_machine())
    every[_machine()] = (before if isinstance(before, dict) else {}) | found
    _write(every)


def _write(every: dict[str, Any]) -> None:
    """Whole or not at all; where nothing can be written, the next process measures again."""
    try:
        place = path()
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, ignore_cleanup_errors=True) as scratch:
            written = Path(scratch) / FILE
            written.write_text(json.dumps(every, indent=1), encoding="utf-8")
            os.replace(written, place)
    except (OSError, RuntimeError):
        return
