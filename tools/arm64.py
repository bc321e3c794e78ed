"""The engine on an emulated ARM64 processor: compiled for it, and its driver run by qemu.

    python tools/arm64.py [rounds] [multiplications]

Needs a compiler for ARM64 and qemu's user mode: Debian's `g++-aarch64-linux-gnu` and `qemu-user`. Without them it says
so and ends with 0. With each of the sets the driver computes random layers and projections and compares them with the
portable set, whose bits must be those that this machine's own compiler gives.

In sixteen rounds every element (csrc/elements.h) is that of a layer's first projection, and the integers are that again
with int8 tokens; those that have scales are packed projections twice. Layers of more than two tokens have at most so
many multiplications in their down projection.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-w", f"-I{ROOT / 'csrc'}")
PARTS = (
    *("attention", "attention_step", "choose", "counting_sort", "grouping", "linear", "norm", "plan", "processor"),
    *("rotary", "routing_step", "rows", "schedule", "topk", "walk", "walk_dots", "walk_tiles"),
)
SETS = {
    "portable": (),
    "neon": (),
    "neon_dotprod": ("-march=armv8.2-a+dotprod",),
    "neon_i8mm": ("-march=armv8.2-a+dotprod+i8mm+bf16",),
}
"""The sets of ARM64, each with its own flags."""

HERE = """#include "engine.h"
namespace moestro {
extern const Isa kPortable;
const Isa* const kIsas[] = {&kPortable};
const int kNumIsas = 1;
}
"""
"""The list of sets for this machine: the portable one alone."""


def compile_driver(compiler: str, sources: Mapping[Path, tuple[str, ...]], folder: Path) -> Path:
    """The driver with these sources, each with flags of its own; raises where one does not compile."""

    def compile_one(number: int, source: Path, flags: tuple[str, ...]) -> str:
        to = folder / f"{number}.o"
        subprocess.run([compiler, *FLAGS, *flags, "-c", str(source), "-o", str(to)], check=True)
        return str(to)

    folder.mkdir()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compile_one, range(len(sources)), sources, sources.values()))
    driver = folder / "driver"
    subprocess.run([compiler, *made, "-static", "-lpthread", "-o", str(driver)], check=True)
    return driver


def run(command: list[str]) -> tuple[int, str]:
    """The exit code, and what was printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="", end="", flush=True)
    return done.returncode, done.stdout


def digest(printed: str) -> str:
    """The line with the portable set's bits."""
    return next(line for line in printed.splitlines() if line.startswith("digest"))


def main(rounds: str = "16", multiplications: str = "3000000") -> int:
    """Compile and run; 0 where all agrees."""
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing:
        print(f"neon-i8mm, neon-dotprod, neon: not run, this machine has no {' and no '.join(missing)}")
        return 0
    start = time.monotonic()
    common = {ROOT / "csrc" / f"{part}.cpp": () for part in PARTS} | {ROOT / "tests/native/driver.cpp": ()}
    sets = {ROOT / "csrc/isa" / f"{name}.cpp": flags for name, flags in SETS.items()}
    with tempfile.TemporaryDirectory() as scratch:
        list_here = Path(scratch) / "isas.cpp"
        list_here.write_text(HERE)
        portable = ROOT / "csrc/isa/portable.cpp"
        here = compile_driver("g++", common | {portable: (), list_here: ()}, Path(scratch) / "here")
        there = compile_driver(COMPILER, common | sets | {ROOT / "csrc/isas.cpp": ()}, Path(scratch) / "arm64")
        wanted = run([str(here), rounds, multiplications])
        found = run([EMULATOR, "-cpu", "max", str(there), rounds, multiplications])
    if wanted[0] or found[0]:
        return 1
    lacking = [name for name in SETS if f"{name.replace('_', '-')}: " not in found[1]]
    if lacking:
        print(f"the emulator ran no {', no '.join(lacking)}")
        return 1
    if digest(wanted[1]) != digest(found[1]):
        print("the portable set has other bits on ARM64 than here")
        return 1
    print(f"ARM64: as here, after {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
