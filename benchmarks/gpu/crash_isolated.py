"""A sweep in processes of its own, which may end before it does.

A kernel that reads where nothing is costs its process the device, one that never returns costs it everything. What was
found up to then is in a file, and another process goes on behind that point.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from gpu.sweep import LOST, Found, end_point
from moestro.bench.measure import Say
from moestro.bench.records import Plan

DONE = (0, 2)
"""Exit codes of a process that measured its plan, and of one that could not begin."""
MOST_STARTS = 20
FIRST_SECONDS, POINT_SECONDS = 240.0, 90.0
"""After which a process is taken to hang: before it has begun with the points, and at one of them."""
_POLL_SECONDS = 0.2


def supervise(command: Sequence[str], plan: Plan, path: Path, end: float, say: Say) -> int:
    """Run a command that keeps what it finds in a file, and again where it lost the device, hung or broke off.

    Args:
        command: measures the plan; it ends with `LOST` where it knows itself what not to do again.
        plan: what it measures.
        path: the file, a `Found`.
        end: `time.time()` after which it is ended for good.
        say: told of each new start.

    Returns:
        one of `DONE`; 1 where the time was over, or it began too often.
    """
    for _ in range(MOST_STARTS):
        code = _watched(command, path, end)
        if code in DONE:
            return code
        if time.time() >= end:
            break
        found = Found.load(path)
        if code != LOST:
            how = "did not end" if code is None else f"ended with code {code}"
            end_point(plan, found, f"its process {how} at this point")
            found.save(path)
        say("a process ended before the run did; another goes on")
    return 1


def _watched(command: Sequence[str], path: Path, end: float) -> int | None:
    """The exit code of the command; None where it was ended because it hung, or the time was over."""
    process = subprocess.Popen(command)
    begun, limit = time.time(), FIRST_SECONDS
    try:
        while (code := process.poll()) is None:
            stored = path.stat().st_mtime if path.is_file() else begun
            if limit == FIRST_SECONDS and stored > begun and Found.load(path).head is not None:
                limit = POINT_SECONDS
            if time.time() >= end or time.time() - max(stored, begun) > limit:
                return None
            time.sleep(_POLL_SECONDS)
        return code
    finally:
        process.kill()
        process.wait()
