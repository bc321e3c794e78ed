"""Kernels of top-k, grouping and routing, compiled for Hopper: no spills, and their assertions are kept."""

from __future__ import annotations

import re

import pytest

from .test_expert_mlp_triton_tuning import said

pytest.importorskip("triton")
LINE = re.compile(r"(\w+) (\w+) \((.*)\) shared (\d+) of \d+ registers (\d+) spills (\d+) asserts (\d+) vectors (\d+)")


def test_what_a_gpu_would_run() -> None:
    found = [LINE.fullmatch(line).groups() for line in said("sm_90", module="ops.compiled_routing")]
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
