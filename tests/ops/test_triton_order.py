"""Rows in the order in which Hopper's instruction meets decoded weights: where columns stand, and products of them.

The interpreter computes as a Hopper's kernels would where it is told that it is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moestro import ExpertWeights, reference
from moestro.formats import FORMATS, dequantize, quantize
from moestro.ops import gpu
from moestro.ops.expert_mlp.triton_launch import work
from moestro.ops.expert_mlp.triton_tuning import Plan, Tile
from tolerances import assert_close, bit_equal

from . import problems
from .stored import PACKED, dequantized
from .test_expert_mlp_triton_weights import every_code
from .triton_calls import launch
from .triton_products import arranged, times_arranged

HOPPER = gpu.Device((9, 0), 132, gpu.shared_memory((9, 0)))
TILE = Tile(128, 64, 4, 3, swap=True, arranged=True)
PLAN = Plan("grouped", "in order", True, 64, 64, TILE, TILE)
PLANS = {
    "64 rows": PLAN,
    "halved": replace(PLAN, block=128, rows=128, tails=1),
    "steps of 128": replace(PLAN, gate_up=replace(TILE, depth=128), down=replace(TILE, depth=128)),
    "outputs of a quarter": replace(PLAN, gate_up=replace(TILE, columns=64), down=replace(TILE, depth=128)),
    "outputs of two units": replace(PLAN, gate_up=replace(TILE, columns=256, warps=8)),
    "the inner one alone": replace(PLAN, gate_up=replace(TILE, arranged=False)),
    "x alone": replace(PLAN, down=replace(TILE, arranged=False)),
    "few rows": replace(PLAN, block=16, rows=16),
    "a sum in pieces": replace(PLAN, splits=2),
}


@pytest.fixture(autouse=True)
def _on_hopper(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if gpu.interpreted():
        monkeypatch.setattr(gpu, "device_of", lambda tensor: HOPPER)
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the order is that of Hopper's instruction")
    torch.set_default_device(triton_device)
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize(("name", "depth", "unit"), [("mxfp4", 64, 64), ("mxfp4", 128, 128), ("int8", 128, 64)])
def test_a_thread_finds_its_columns_in_a_row(name, depth, unit):
    """Of 16 places, two and two 8 further on are one thread's, and what it reads of weights is a quarter of a unit."""
    k = 160
    stored = quantize(torch.randn(2, 64, k), FORMATS[name])
    x = torch.arange(1, 4 * k + 1, dtype=torch.float32).reshape(4, k)[:3]  # float32 holds each; rows are not whole
    found = arranged(x, stored, depth)
    assert found.shape == (3, -(-k // depth) * depth)
    for row, of in zip(found.tolist(), x.tolist(), strict=True):
        assert sorted(filter(None, row)) == of
        for place, value in enumerate(row):
            if value:
                column = of.index(value)
                assert place // unit == column // unit
                assert place % 16 % 8 // 2 == column % unit // (unit // 4)
    pairs = [value for value in found[0, ::2].tolist() if value]
    apart = 4 if FORMATS[name].per_item == 2 else 1  # nibbles of two words are decoded together, bytes of one
    assert all(found[0].tolist().index(value + apart) == found[0].tolist().index(value) + 1 for value in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_every_code_is_what_dequantize_says(name, dtype):
    """As in `test_expert_mlp_triton_weights`, of rows in order."""
    stored = every_code(name, 64)
    expected = dequantize(stored)[1]
    for depth in (64, 128):
        found = times_arranged(torch.eye(128, dtype=dtype), stored, 1, depth).T
        if name == "mxfp4" and dtype == torch.float16:
            assert_close(found, expected, torch.float16)
        else:
            assert torch.equal(found, expected)


CASES = [(name, plan) for name in ("mxfp4", "int8") for plan in PLANS]
CASES += [(name, "halved") for name in ("int4-g32-zp", "nvfp4", "fp8-e4m3-b128")]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_every_plan_meets_the_reference(name, plan):
    """H and I end within a step and within a tile; a NaN stays in its row."""
    how = PLANS[plan]
    sizes = problems.Sizes(how.block + 9, 224, 352, 3, 2)
    dense = problems.weights(sizes, problems.ACTIVATIONS[0], torch.bfloat16, bias=True)
    weights = dense.quantize(name)
    routing = problems.routing(sizes, kind="random")
    ids = torch.zeros_like(routing.expert_ids)
    ids[:, 1] = -1
    ids[: how.block // 3, 1] = 2  # blocks of all rows, of 9 and of a third; an expert without rows
    routing = replace(routing, expert_ids=ids)
    x = torch.randn(sizes.num_tokens, sizes.hidden_size).bfloat16()
    y = launch(x, routing, weights, how)
    wanted = reference.expert_mlp(x, routing, dequantized(weights, torch.bfloat16))
    assert_close(y, wanted.to(x.dtype), x.dtype)
    plain = replace(how, gate_up=replace(how.gate_up, arranged=False), down=replace(how.down, arranged=False))
    assert_close(y, launch(x, routing, weights, plain), x.dtype)
    x[0] = torch.nan
    again = launch(x, routing, weights, how)
    assert again[0].isnan().all()
    assert bit_equal(again[1:], y[1:])


def test_rows_are_whole_steps_and_nothing_else_is_stored():
    sizes = problems.Sizes(20, 224, 96, 3, 2)
    weights = problems.weights(sizes, problems.ACTIVATIONS[0], torch.bfloat16).quantize("mxfp4")
    x = torch.randn(20, 224).bfloat16()
    launches = work(x, problems.routing(sizes), weights, PLANS["steps of 128"], torch.bfloat16)
    assert launches.spaces[0] == (40 * 128, torch.bfloat16)
    assert launches.spaces[-1] == (20 * 256, torch.bfloat16)
    assert [(use.stage, use.rows) for use in launches.uses() if use.kernel == "arrange_rows_kernel"] == [
        ("order columns", 20)
    ]


def test_dense_rows_are_never_arranged():
    sizes = problems.Sizes(3, 64, 64, 2, 1)
    weights: ExpertWeights = problems.weights(sizes, problems.ACTIVATIONS[0], torch.bfloat16)
    x, routing = torch.randn(3, 64).bfloat16(), problems.routing(sizes)
    wrong = replace(PLAN, gate_up=replace(TILE, arranged=False), down=replace(TILE, arranged=False))
    assert work(x, routing, weights, wrong, torch.bfloat16).arranging is None
