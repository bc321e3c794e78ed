"""Reads of experts under ThreadSanitizer: the driver compiled with it, and run.

    python tools/reads.py [operations]

Eight threads ask four that read, with delays, interrupted calls, short reads and failures put in between. Needs g++ and
its ThreadSanitizer; without them it says so and ends with 0.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPILER = "g++"
FLAGS = ("-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-fsanitize=thread")


def main(operations: str = "100000") -> int:
    """Compile and run; 0 where all agrees."""
    if shutil.which(COMPILER) is None:
        print(f"reads: not run, this machine has no {COMPILER}")
        return 0
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        driver = Path(scratch, "driver").resolve()
        command = [COMPILER, *FLAGS, str(ROOT / "tests/native/reads.cpp"), "-o", str(driver), "-lpthread"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode and "tsan" in made.stderr:
            print(f"reads: not run, {COMPILER} has no ThreadSanitizer")
            return 0
        print(made.stderr, end="", file=sys.stderr)
        if made.returncode:
            return 1
        return subprocess.run([driver, Path(scratch, "file").resolve(), operations], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
