"""Rows in the order in which Hopper's instruction meets decoded weights: where columns stand, and products of them.

The interpreter computes as a Hopper's kernels would where it is told that it is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moestro import Activation, ExpertWeights, reference
from moestro.errors import InvalidInputError
from moestro.formats import FORMATS, dequantize, quantize
from moestro.ops import gpu
from moestro.ops.expert_mlp.triton_launch import work
from moestro.ops.expert_mlp.triton_tuning import Plan, Problem, Tile, choose
from tolerances import assert_close

from . import problems
from .stored import PACKED, apart, dequantized
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


CASES = [("mxfp4", plan) for plan in PLANS]
CASES += [("int8", plan) for plan in ("halved", "steps of 128", "outputs of two units", "few rows")]
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
    x[0] = torch.nan
    y = launch(x, routing, weights, how)
    wanted = reference.expert_mlp(x, routing, dequantized(weights, torch.bfloat16))
    assert y[0].isnan().all()
    assert_close(y[1:], wanted[1:].to(x.dtype), x.dtype)


def test_rows_are_whole_steps():
    sizes = problems.Sizes(20, 224, 96, 3, 2)
    weights = problems.weights(sizes, problems.ACTIVATIONS[0], torch.bfloat16).quantize("mxfp4")
    x = torch.randn(20, 224).bfloat16()
    launches = work(x, problems.routing(sizes), weights, PLANS["steps of 128"], torch.bfloat16)
    assert launches.spaces[0] == (40 * 128, torch.bfloat16)
    assert launches.spaces[-1] == (20 * 256, torch.bfloat16)
    assert [(use.stage, use.rows) for use in launches.uses() if use.kernel == "arrange_rows_kernel"] == [
        ("order columns", 20)
    ]


@pytest.mark.parametrize(("name", "depth"), [("bfloat16", 64), ("int8", 32), ("int8/int8", 64)])
def test_what_has_no_order_is_refused(name, depth):
    stored, _, rows = name.partition("/")
    dense = problems.weights(problems.Sizes(3, 64, 64, 2, 1), problems.ACTIVATIONS[0], torch.bfloat16)
    weights = dense if stored == "bfloat16" else dense.quantize(stored, input_format=rows or "float")
    how = replace(PLAN, gate_up=replace(TILE, depth=depth), down=replace(TILE, depth=depth))
    with pytest.raises(InvalidInputError, match="needs packed weights, float inputs"):
        launch(torch.randn(3, 64).bfloat16(), problems.routing(problems.Sizes(3, 64, 64, 2, 1)), weights, how)


@pytest.mark.parametrize("device", [HOPPER, gpu.Device((8, 0), 108, 163 << 10), gpu.Device((12, 0), 170, 99 << 10)])
def test_only_hopper_has_rows_in_order_and_only_of_packed_weights(device):
    for form, itemsize in itertools.product(FORMATS.values(), (1, 2, 4)):
        columns = 0 if form.scaling is None else form.scaling.columns
        for num_tokens in (1, 16, 64, 512, 4096):
            problem = Problem(num_tokens, 8, 64, 2048, 1024, 2, itemsize, (form.bits, form.bits), columns)
            how = choose(problem, device, ("auto", None), False)
            expected = device == HOPPER and itemsize == 2 and form.bits < 16 and how.rows >= 64
            assert (how.gate_up.arranged, how.down.arranged) == (expected, expected)


def mixed(gate_up: str, down: str, activation: Activation) -> ExpertWeights:
    sizes = problems.Sizes(40, 224, 160, 3, 2)
    made = problems.weights(sizes, activation, torch.bfloat16)
    stored = (m if form == "bfloat16" else quantize(dequantize(m), FORMATS[form])
              for m, form in ((made.gate_up, gate_up), (made.down, down)))  # fmt: skip
    first, second = stored
    return replace(made, gate_up=first, down=second)


ORDERED, AS_IT_COMES = TILE, replace(TILE, arranged=False)
OTHERS = {
    "4 and 8 bits": (mixed, ("mxfp4", "int8", problems.ACTIVATIONS[0]), ORDERED, ORDERED),
    "8 and 4 bits, not gated": (mixed, ("int8", "int4-g32", Activation("silu", gated=False)), ORDERED, ORDERED),
    "8 bits and dense": (mixed, ("int8", "bfloat16", problems.ACTIVATIONS[0]), ORDERED, AS_IT_COMES),
    "dense and 4 bits": (mixed, ("bfloat16", "nvfp4", problems.ACTIVATIONS[0]), AS_IT_COMES, ORDERED),
}


@pytest.mark.parametrize("name", OTHERS)
def test_formats_that_differ_and_what_routings_may_be(name):
    """Weights on the input, x of other strides, slots that are all empty, blocks of fewer rows than a tile; apart."""
    make, arguments, gate_up, down = OTHERS[name]
    weights = make(*arguments)
    sizes = problems.Sizes(40, 224, 160, 3, 2)
    how = replace(PLAN, block=40, gate_up=gate_up, down=down)
    x = torch.randn(224, 40).bfloat16().T
    routing = problems.routing(sizes, kind="random", weight_on="input")
    wanted = reference.expert_mlp(x, routing, dequantized(weights, torch.bfloat16)).to(x.dtype)
    assert_close(launch(x, routing, weights, how), wanted, x.dtype)
    assert_close(launch(x, routing, apart(weights), how), wanted, x.dtype)
    empty = replace(routing, expert_ids=torch.full_like(routing.expert_ids, -1))
    assert not launch(x, empty, weights, how).any()
