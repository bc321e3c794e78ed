"""Rows rounded to fp8-e4m3 by launches before each product, one scale for a block of columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moestro import Activation, ExpertWeights, Routing, reference
from moestro.bench.layers import LAYERS
from moestro.formats import FORMATS
from moestro.ops import gpu
from moestro.ops.expert_mlp import triton_tuning
from moestro.ops.expert_mlp.triton_launch import work
from moestro.ops.expert_mlp.triton_tuning import Plan, Problem, Tile
from moestro.tolerances import LOW_PRECISION_INPUT, too_far
from moestro.types import GPT_OSS_SWIGLU
from tolerances import bit_equal

from . import problems
from .stored import apart
from .triton_calls import launch

FORMAT = "fp8-e4m3-b128"
TILE = Tile(columns=64, depth=128, stages=2)
SMALL = Plan("grouped", "small tiles", ordered=True, block=16, rows=16, gate_up=TILE, down=TILE)
PLANS = {
    "ordered": SMALL,
    "swapped": replace(SMALL, gate_up=replace(TILE, swap=True), down=replace(TILE, swap=True)),
    "pairs": replace(SMALL, ordered=False, block=1),
    "split": replace(SMALL, splits=2, block=3),
    "tails": replace(SMALL, rows=32, block=32, tails=1),
    "blocks-of-5": replace(SMALL, block=5, wide=False),
}
ACTIVATIONS = (GPT_OSS_SWIGLU, Activation(), Activation("relu2", gated=False))
H200 = gpu.Device((9, 0), 132, gpu.shared_memory((9, 0)))


@pytest.fixture(autouse=True)
def _forced(triton_device: torch.device) -> None:
    torch.set_default_device(triton_device)
    yield
    torch.set_default_device(None)


def case(activation: Activation, inner: int = 168, num_tokens: int = 7) -> tuple[torch.Tensor, Routing, ExpertWeights]:
    """H and I off every block, an expert of many rows, one of few, one of none and empty slots."""
    sizes = problems.Sizes(num_tokens, 144, inner, 4, 2)
    weights = problems.weights(sizes, activation, torch.float32, bias=True)
    weights = weights.quantize(FORMAT, input_format="fp8-e4m3")
    ids = torch.zeros(num_tokens, 2, dtype=torch.long)
    ids[:, 1] = -1
    ids[:2, 1] = torch.tensor([2, 3])
    ids[3] = -1
    routing = Routing(ids, torch.rand(num_tokens, 2).masked_fill(ids < 0, torch.nan))
    return torch.randn(num_tokens, 144), routing, weights


def kernels(x: torch.Tensor, routing: Routing, weights: ExpertWeights, how: Plan) -> list[str]:
    return [use.kernel for use in work(x, routing, weights, how, torch.float8_e4m3fn).uses()]


def check(y: torch.Tensor, x: torch.Tensor, routing: Routing, weights: ExpertWeights) -> None:
    found = too_far(y.float(), reference.expert_mlp(x, routing, weights), LOW_PRECISION_INPUT / 4)
    assert found is None, found


@pytest.mark.parametrize("name", PLANS)
def test_meets_the_reference(name):
    how, turn = PLANS[name], list(PLANS).index(name)
    x, routing, weights = case(ACTIVATIONS[turn % 3], num_tokens=21 if how.tails else 7)
    routing = replace(routing, weight_on="input" if turn % 2 else "output")
    for stored in (weights, apart(weights)) if turn == 0 else (weights,):
        assert kernels(x, routing, stored, how).count("round_rows_kernel") == 2
        y = launch(x, routing, stored, how)
        assert bit_equal(y, launch(x, routing, stored, how))
        check(y, x, routing, stored)
        assert (y[3] == 0).all()


@pytest.mark.parametrize("inner", [1, 127, 129])
def test_blocks_that_are_not_whole(inner):
    x, routing, weights = case(GPT_OSS_SWIGLU, inner)
    check(launch(x, routing, weights, SMALL), x, routing, weights)


def test_what_is_not_finite_stays_in_its_row():
    for value in (-torch.inf, torch.nan):
        x, routing, weights = case(GPT_OSS_SWIGLU)
        x[5, 3] = value
        y = launch(x, routing, weights, SMALL)
        assert y[5].isnan().all()
        assert torch.isfinite(y[[0, 1, 2, 3, 4, 6]]).all()


def problem(layer: str, num_tokens: int, form: str = FORMAT) -> Problem:
    spec, bits, columns = LAYERS[layer], FORMATS[form].bits, FORMATS[form].scaling.columns
    sizes = num_tokens, spec.top_k, spec.num_experts, spec.hidden_size, spec.intermediate_size
    return Problem(*sizes, 2, 1, (bits, bits), columns)


@pytest.mark.parametrize(("num_tokens", "rows", "is_mapped"), [(16, 16, False), (4096, 64, True)])
def test_the_plans_of_an_h200(num_tokens, rows, is_mapped):
    """Tile by tile as they are, on three experts; also through tensor maps."""
    how = triton_tuning.choose(problem("qwen3-30b-a3b", num_tokens), H200, ("auto", None), False)
    assert (how.rows, how.gate_up.tensor_map) == (rows, is_mapped)
    sizes = problems.Sizes(how.block + 9, 256, 160 if is_mapped else 256, 3, 2)
    weights = problems.weights(sizes, Activation(), torch.float32).quantize(FORMAT, input_format="fp8-e4m3")
    routing, x = problems.routing(sizes, kind="random"), torch.randn(sizes.num_tokens, 256).bfloat16()
    y = launch(x, routing, weights, how)
    check(y, x, routing, weights)
    pointers = replace(how, gate_up=replace(how.gate_up, tensor_map=False), down=replace(how.down, tensor_map=False))
    assert bit_equal(y, launch(x, routing, weights, pointers))
