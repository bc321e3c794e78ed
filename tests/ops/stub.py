"""The stub of CUDA's driver, compiled and loaded in place of the one that is missing."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

COMPILER = shutil.which("gcc") or shutil.which("cc")


def make_stub(folder: Path) -> Path:
    """The library in a folder, under the names that it is linked and loaded by."""
    made = folder / "libcuda.so.1"
    source = Path(__file__).with_name("cuda_stub.c")
    command = [str(COMPILER), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "libcuda.so").symlink_to(made.name)
    return made


def stub_driver(folder: Path) -> ctypes.CDLL:
    """The stub on its own, as loaded: nobody else finds it."""
    return ctypes.CDLL(str(make_stub(folder)))
