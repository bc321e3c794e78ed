"""How much memory a process holds, and has held at most, as its system counts it."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

_STATUS, _PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


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
