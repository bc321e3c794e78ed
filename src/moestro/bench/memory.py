"""How much memory a process holds, and has held at most, as its system counts it; and how much a call takes."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS, _PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SHARES = Path("/proc/self/smaps_rollup")
_RESET_PEAK = "5"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's names for them."""
_SMALLEST_MAPPED, _LARGEST_KEPT = 64 << 10, 32 << 20


@dataclass(frozen=True)
class Resident:
    """Bytes of this process that are in memory.

    Attributes:
        now, most: now, and at most since the last `restart`.
        anonymous: those of now that are of no file. Pages of mapped files are given back when memory runs short.
    """

    now: int
    most: int
    anonymous: int


def resident() -> Resident:
    """What the system counts. Where there is no /proc, all three are the most since the process began."""
    try:
        lines = (line.split(":") for line in _STATUS.read_text().splitlines())
        found = {name: int(value.split()[0]) * 1024 for name, value in lines if name in ("VmRSS", "VmHWM", "RssAnon")}
        return Resident(found["VmRSS"], found["VmHWM"], found["RssAnon"])
    except (OSError, KeyError):
        import resource  # not on every system

        unit = 1 if sys.platform == "darwin" else 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return Resident(most, most, most)


def restart() -> Resident:
    """Count the most from now on, where the system lets a process do so; returns what it holds now."""
    with contextlib.suppress(OSError):
        _PEAK.write_text(_RESET_PEAK)
    return resident()


def file_share() -> int | None:
    """Bytes of files' pages that this process holds, of those that n processes hold the nth part; None where unknown.

    Summed over all processes that hold them, each page counts once.
    """
    try:
        lines = (line.split() for line in _SHARES.read_text().splitlines())
        return next(int(words[1]) * 1024 for words in lines if words[0] == "Pss_File:")
    except (OSError, StopIteration):
        return None


def peak_of(call: Callable[[], object], device: torch.device) -> int | None:
    """The most bytes that a call holds at once beside what is held before it, its result included; None where unknown.

    On a CPU these are resident bytes of the process, while the call runs in a thread of its own, so that nothing that
    threads keep for their next call is there already; with glibc they are true to half a megabyte. The call is made
    four times. On a CUDA device they are bytes that PyTorch's allocator has handed out there.
    """
    if device.type == "cuda":
        return _peak_on_gpu(call, device)
    if not (_STATUS.exists() and _PEAK.exists()):
        return None
    found = []
    for _ in range(4):
        with ThreadPoolExecutor(1) as thread:
            found.append(thread.submit(contextvars.copy_context().run, _peak_here, call).result())
    return max(found[1:])  # what the first loads, as code, is held from then on


def _peak_here(call: Callable[[], object]) -> int:
    with _giving_back(), torch.inference_mode():
        before = restart()
        kept = call()
        most = resident().most
        del kept
    return max(most - before.now, 0)


def _peak_on_gpu(call: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


@contextlib.contextmanager
def _giving_back() -> Iterator[None]:
    """Inside, what is freed goes back to the system where the C library is glibc, and nothing freed is left before.

    Else a call would find the memory of the last one in the process. Afterwards glibc's limits are fixed where they
    come to be by themselves in a process that has freed large tensors.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        yield
        return
    library.mallopt(_M_MMAP_THRESHOLD, _SMALLEST_MAPPED)
    library.malloc_trim(0)
    try:
        yield
    finally:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_KEPT)
