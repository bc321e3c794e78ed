"""Triton's kernels against the reference: every branch, at sizes that a CPU can interpret."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import moestro
from moestro import Activation, ExpertWeights, Routing, reference
from moestro.ops.expert_mlp.triton_tuning import Plan, Tile
from moestro.types import GPT_OSS_SWIGLU
from tolerances import assert_close, bit_equal

from . import problems
from .stored import PACKED, poison, sizes_for
from .triton_calls import launch, why_unsupported

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = Tile(columns=32, depth=32, stages=2)
SMALL = Plan("grouped", "small tiles", ordered=True, block=16, rows=16, gate_up=TILE, down=TILE)
PLANS = {
    "ordered": SMALL,
    "swapped": replace(SMALL, gate_up=replace(TILE, swap=True, group=2), down=replace(TILE, swap=True)),
    "pairs": replace(SMALL, ordered=False, block=1),
    "split": replace(SMALL, splits=2, block=3, down=Tile(16, 32)),
    "tails": replace(SMALL, rows=32, block=32, tails=1),
    "blocks-of-5": replace(SMALL, block=5, wide=False, gate_up=replace(TILE, group=4)),
}


def check(x: torch.Tensor, routing: Routing, weights: ExpertWeights, how: Plan) -> torch.Tensor:
    assert why_unsupported(x, routing, weights) is None
    y = launch(x, routing, weights, how)
    assert y.dtype == x.dtype
    assert_close(y, reference.expert_mlp(x, routing, weights).to(x.dtype), x.dtype)
    return y


@pytest.fixture(autouse=True)
def _forced(triton_device: torch.device) -> None:
    torch.set_default_device(triton_device)
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("how", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_plan_meets_the_reference(how, dtype):
    for i, kind in enumerate(problems.KINDS):
        if dtype != torch.float32 and kind in ("skewed", "full"):
            continue
        sizes = problems.Sizes(4, 41, 37, 4, 2)
        activation = problems.ACTIVATIONS[-1] if i % 2 else problems.ACTIVATIONS[2]
        weights = problems.weights(sizes, activation, dtype, bias=i % 2 == 0)
        routing = problems.routing(sizes, kind=kind, weight_on="input" if i == 3 else "output")
        check(torch.randn(4, 41).to(dtype), routing, weights, how)


@pytest.mark.parametrize("activation", problems.ACTIVATIONS, ids=lambda a: a.code)
def test_every_activation(activation):
    sizes = problems.Sizes(3, 17, 9, 2, 2)
    for bias, transposed in ((False, False), (True, True)):
        weights = problems.weights(sizes, activation, torch.float32, bias=bias, transposed=transposed)
        check(torch.randn(3, 17) * 3, problems.routing(sizes, kind="full"), weights, SMALL)


def test_a_limit_keeps_nan_and_small_numbers_keep_their_digits():
    ids, w = torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
    for kind in ("tanh", "relu", "relu2", "silu"):
        activation = Activation(kind, gated=False, limit=2.0)
        weights = ExpertWeights.from_dense(torch.eye(4)[None], torch.eye(4)[None], activation=activation)
        x = torch.tensor([[1e-20, -1e-8, 0.24, 0.26], [-0.24, -0.26, 90.0, -90.0], [0.0, 0.5, 3.0, 1e-3]])
        y = launch(x, Routing(ids, w), weights, SMALL)
        torch.testing.assert_close(y, reference.expert_mlp(x, Routing(ids, w), weights), rtol=1e-6, atol=1e-30)
        x[1] = torch.nan
        found = launch(x, Routing(ids, w), weights, SMALL)
        assert torch.isnan(found[1]).all()
        assert torch.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize("name", PACKED)
def test_every_format(name):
    """Steps as deep as the largest groups and as shallow as the smallest, weights on either side."""
    sizes = sizes_for(name, num_tokens=3)
    weights = problems.weights(sizes, GPT_OSS_SWIGLU, torch.float32, bias=True).quantize(name)
    for depth, dtype in ((128, torch.bfloat16), (32, torch.float16), (64, torch.float32)):
        tile = Tile(128, depth, swap=depth < 64)
        x = torch.randn(3, sizes.hidden_size).to(dtype)
        check(x, problems.routing(sizes), weights, replace(SMALL, gate_up=tile, down=tile))


SHAPES = [
    (1, 8, 4, 1, 1),
    (2, 7, 5, 257, 6),
    (1, 16, 8, 1025, 10),
    (1, 9, 3, 40, 32),
    (33, 8, 8, 2, 1),
    (2, 160, 80, 3, 3),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes_off_every_tile(shape):
    sizes = problems.Sizes(*shape)
    weights = problems.weights(sizes, Activation(), torch.float32)
    x, routing = torch.randn(sizes.num_tokens, sizes.hidden_size), problems.routing(sizes, kind="duplicates")
    check(x, routing, weights, replace(SMALL, gate_up=Tile(128, 64), down=Tile(128, 64)))


def test_experts_nobody_asks_for_are_not_read():
    sizes = problems.Sizes(6, 40, 33, 5, 2)
    for how in PLANS.values():
        weights = problems.weights(sizes, Activation(), torch.float32)
        poison(weights.gate_up, 3)
        poison(weights.down, 3)
        ids = torch.tensor([[0, 1], [-1, -1], [2, 0], [1, -1], [0, 2], [4, 4]])
        x = torch.randn(6, 40)
        x[1] = torch.nan
        y = launch(x, Routing(ids, torch.rand(6, 2)), weights, how)
        assert torch.isfinite(y).all()
        assert (y[1] == 0).all()


@pytest.mark.parametrize("how", PLANS.values(), ids=PLANS)
def test_ids_beyond_the_experts_are_empty_slots(how):
    """Also those that are -1 or an expert to who looks at their lower 32 bits; nothing of them is read."""
    sizes = problems.Sizes(4, 40, 24, 3, 3)
    weights = problems.weights(sizes, Activation(), torch.float32, bias=True)
    x = torch.randn(4, 40)
    x[2] = torch.nan
    ids = torch.tensor([[0, 3, 2], [1 << 32, 1, (1 << 40) + 2], [5, (1 << 31) - 1, 3], [-2, 2, -1 - (1 << 33)]])
    by = torch.rand(4, 3)
    inside = torch.where((ids >= 0) & (ids < 3), ids, -1)
    expected = launch(x, Routing(inside, by), weights, how)
    assert_close(expected, reference.expert_mlp(x, Routing(inside, by), weights), torch.float32)
    assert bit_equal(launch(x, Routing(ids, by.masked_fill(inside < 0, torch.nan)), weights, how), expected)
    narrow = ids.clamp(-(1 << 31), (1 << 31) - 1).int()
    assert bit_equal(launch(x, Routing(narrow, by), weights, how), expected)
    assert (expected[2] == 0).all()


@pytest.mark.parametrize("sizes", [(0, 8, 4, 3, 2), (3, 8, 4, 3, 0), (3, 8, 0, 3, 2), (3, 0, 4, 3, 2)], ids=str)
def test_nothing_to_compute(sizes):
    t, h, i, e, k = sizes
    weights = ExpertWeights.from_dense(torch.randn(e, 2 * i, h), torch.randn(e, h, i), None, torch.randn(e, h))
    routing = Routing(torch.zeros(t, k, dtype=torch.long), torch.rand(t, k))
    for how in (SMALL, PLANS["pairs"]):
        y = launch(torch.randn(t, h), routing, weights, how)
        assert_close(y, reference.expert_mlp(torch.randn(t, h), routing, weights), torch.float32)


def test_tensors_that_are_not_contiguous():
    sizes = problems.Sizes(5, 20, 12, 3, 2)
    full = problems.weights(sizes, Activation(), torch.float32, bias=True)
    wide = torch.randn(3, 40, 24)
    weights = replace(full, gate_up=moestro.formats.dense(wide[:, 8:32, 2:22]))
    routing = problems.routing(sizes)
    apart = Routing(routing.expert_ids.T.contiguous().T, routing.routing_weights.T.contiguous().T)
    for x in (torch.randn(5, 40)[:, :20], torch.randn(20, 5).T, torch.randn(10, 20)[::2]):
        assert bit_equal(check(x, routing, weights, SMALL), check(x.contiguous(), apart, weights, SMALL))


def test_wider_weights_than_rows():
    sizes = problems.Sizes(5, 20, 12, 3, 2)
    for x, w in itertools.permutations(DTYPES, 2):
        weights = problems.weights(sizes, Activation(), w)
        check(torch.randn(5, 20).to(x), problems.routing(sizes), weights, SMALL)


@pytest.mark.parametrize("strategy", ["auto", "grouped", "blockwise", "blockwise-5", "blockwise-200", "selective"])
def test_strategies_by_the_public_function(strategy):
    sizes = problems.Sizes(4, 20, 12, 3, 2)
    weights, routing = problems.weights(sizes, Activation(), torch.float32), problems.routing(sizes)
    x = torch.randn(4, 20)
    y = moestro.expert_mlp(x, routing, weights, strategy)
    assert_close(y, reference.expert_mlp(x, routing, weights))
    assert bit_equal(y, moestro.expert_mlp(x, routing, weights, strategy))


@pytest.mark.usefixtures("products_in_order")
def test_a_tokens_bits_do_not_depend_on_its_batch():
    """With torch.use_deterministic_algorithms(True), under which tests run."""
    sizes = problems.Sizes(70, 40, 24, 4, 2)
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        weights = problems.weights(sizes, GPT_OSS_SWIGLU, dtype, bias=True).quantize(name)
        x, routing = torch.randn(70, 40).to(dtype), problems.routing(sizes)
        whole = moestro.expert_mlp(x, routing, weights)
        for rows in (slice(0, 1), slice(69, 70), slice(3, 40)):
            part = Routing(routing.expert_ids[rows], routing.routing_weights[rows])
            assert bit_equal(moestro.expert_mlp(x[rows], part, weights), whole[rows])


@pytest.mark.parametrize("activation", [problems.ACTIVATIONS[0], problems.ACTIVATIONS[-1], problems.ACTIVATIONS[2]])
def test_weights_through_tensor_maps(activation):
    """Both orders of gate and up, experts in the middle of another tensor, and sizes that leave boxes half full."""
    from moestro.ops.expert_mlp.triton_launch import tensor_map

    mapped = replace(TILE, tensor_map=True)
    how = replace(SMALL, gate_up=mapped, down=replace(mapped, columns=16, swap=True))
    for dtype in DTYPES:
        sizes = problems.Sizes(5, 64, 32, 3, 2)
        weights = problems.weights(sizes, activation, dtype, bias=True)
        wide = torch.full((3, 80, 96), torch.nan, dtype=dtype)
        wide[:, : weights.gate_up.shape[1], 16:80] = weights.gate_up.data
        inside = replace(weights, gate_up=moestro.formats.dense(wide[:, : weights.gate_up.shape[1], 16:80]))
        x, routing = torch.randn(5, 64).to(dtype), problems.routing(sizes)
        for layer in (weights, inside):
            assert tensor_map(layer.gate_up, mapped, dtype, activation) is not None
            assert bit_equal(check(x, routing, layer, how), check(x, routing, layer, replace(SMALL, down=how.down)))


MAPPED = {
    "silu": ("mxfp4", problems.ACTIVATIONS[0], SMALL),
    "interleaved": ("nvfp4", problems.ACTIVATIONS[1], SMALL),
    "plain": ("int4-g32-zp", problems.ACTIVATIONS[2], SMALL),
    "split": ("mxfp4", problems.ACTIVATIONS[0], replace(SMALL, splits=2)),
    "tails": ("fp4-g64", problems.ACTIVATIONS[0], replace(SMALL, rows=32, block=32, tails=1)),
}


@pytest.mark.parametrize("what", MAPPED)
def test_nibbles_through_tensor_maps(what):
    """H and I that end within a step, and rows of down that end within a tile; the same bits as by pointers."""
    from moestro.ops.expert_mlp.triton_launch import tensor_map

    name, activation, plan = MAPPED[what]
    tile = replace(TILE, columns=64, depth=128, swap=what in ("silu", "plain", "tails"))
    mapped = replace(tile, tensor_map=True)
    sizes = problems.Sizes(5, 192, 64, 3, 2) if name == "fp4-g64" else problems.Sizes(5, 160, 160, 3, 2)
    weights = problems.weights(sizes, activation, torch.float32, bias=True).quantize(name)
    x, routing = torch.randn(5, sizes.hidden_size).bfloat16(), problems.routing(sizes)
    for stored, of in ((weights.gate_up, activation), (weights.down, None)):
        assert tensor_map(stored, mapped, torch.bfloat16, of) is not None
    ways = [replace(plan, gate_up=way, down=way) for way in (mapped, tile)]
    assert bit_equal(check(x, routing, weights, ways[0]), check(x, routing, weights, ways[1]))


@pytest.mark.parametrize(("columns", "is_there"), [(208, False), (224, True)])
def test_nibbles_whose_rows_are_no_multiple_of_16_bytes_go_by_pointers(columns, is_there):
    from moestro.ops.expert_mlp.triton_launch import tensor_map

    weights = problems.weights(problems.Sizes(1, columns, 32, 2, 1), Activation(), torch.float32).quantize("nvfp4")
    found = tensor_map(weights.gate_up, replace(TILE, tensor_map=True), torch.bfloat16, Activation())
    assert (found is not None) is is_there


def test_weights_that_tensor_maps_cannot_describe_go_by_pointers():
    from moestro.ops.expert_mlp.triton_launch import tensor_map

    mapped = replace(TILE, tensor_map=True)
    for shape, dtype in (((2, 8, 40), torch.float32), ((2, 8, 64), torch.bfloat16), ((0, 8, 64), torch.float32)):
        stored = moestro.formats.dense(torch.randn(shape).to(dtype))
        whole = shape[0] > 0 and shape[2] % 32 == 0 and dtype == torch.float32
        assert (tensor_map(stored, mapped, torch.float32, None) is None) is not whole
    for data in (
        torch.randn(2, 64, 8).transpose(1, 2),
        torch.randn(2, 8, 66)[:, :, 1:65],
        torch.randn(1, 8, 64)[[0] * 2],
    ):
        found = tensor_map(moestro.formats.dense(data), mapped, torch.float32, None)
        assert (found is None) is (data.stride(2) != 1 or data.data_ptr() % 16 != 0 or data.stride(1) % 4 != 0)
    assert tensor_map(moestro.formats.dense(torch.randn(2, 8, 64)), TILE, torch.float32, None) is None
