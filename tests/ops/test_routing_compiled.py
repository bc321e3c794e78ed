"""Kernels of top-k, grouping and routing, compiled for Hopper: no spills, and their assertions are kept."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from .engines import PACKAGE, TESTS

pytest.importorskip("triton")
LINE = re.compile(r"(\w+) (\w+) \((.*)\) shared (\d+) of \d+ registers (\d+) spills (\d+) asserts (\d+) vectors (\d+)")


def test_what_a_gpu_would_run() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{PACKAGE}{os.pathsep}{TESTS}"}
    command = [sys.executable, "-m", "ops.compiled_routing", "sm_90"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    found = [LINE.fullmatch(line).groups() for line in said.splitlines()]
    assert {name for _, name, *_ in found} == {
        "rows_kernel",
        "count_kernel",
        "place_kernel",
        "order_kernel",
        "schedule_kernel",
        "topk_kernel",
        "route_kernel",
        "check_kernel",
    }
    for _, name, called, shared, registers, spills, asserts, vectors in found:
        assert int(spills) == 0, called
        assert int(shared) <= 48 << 10, called
        assert int(registers) <= 192, called
        assert (int(asserts) > 0) == (name in ("topk_kernel", "route_kernel", "check_kernel")), called
        assert int(vectors) > 0 or name not in ("topk_kernel", "route_kernel") or "E=257" in called, called
