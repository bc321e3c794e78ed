"""Unstacked experts in Triton's kernels: found by a table of where they lie, with the bits of a stack."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moestro import Activation, ExpertWeights, Routing, reference
from moestro.formats import SplitTensor, dense, quantize
from moestro.ops import expert_mlp, gpu
from moestro.ops.expert_mlp.triton_tuning import Tile
from moestro.tolerances import LOW_PRECISION_INPUT, too_far
from moestro.types import GPT_OSS_SWIGLU
from tolerances import assert_close, bit_equal

from . import problems
from .stored import PACKED, apart, poison, sizes_for
from .test_expert_mlp_triton import PLANS, SMALL
from .triton_calls import launch, why_unsupported
from .watched import watching


@pytest.fixture(autouse=True)
def _forced(triton_device: torch.device) -> None:
    torch.set_default_device(triton_device)
    yield
    torch.set_default_device(None)


def case(name: str = "float32", activation: Activation = GPT_OSS_SWIGLU) -> tuple[torch.Tensor, Routing, ExpertWeights]:
    sizes = sizes_for(name, num_tokens=3)
    weights = problems.weights(sizes, activation, torch.float32, bias=True).quantize(name)
    return torch.randn(3, sizes.hidden_size), problems.routing(sizes), weights


NAMES = ["float32", "bfloat16", *PACKED]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_has_the_bits_of_a_stack(name):
    """Each with one of three tiles."""
    cases = ((GPT_OSS_SWIGLU, 128), (Activation(), 32), (Activation("relu2", gated=False), 64))
    activation, depth = cases[NAMES.index(name) % 3]
    x, routing, stack = case(name, activation)
    tile = Tile(64, depth, swap=depth < 64)
    how = replace(SMALL, gate_up=tile, down=tile)
    split = apart(stack)
    assert isinstance(split.gate_up, SplitTensor)
    assert why_unsupported(x, routing, split) is None
    y = launch(x, routing, split, how)
    assert bit_equal(y, launch(x, routing, stack, how))
    assert_close(y, reference.expert_mlp(x, routing, split), torch.float32)


@pytest.mark.parametrize("how", PLANS.values(), ids=PLANS)
def test_every_plan(how):
    x, routing, stack = case()
    assert bit_equal(launch(x, routing, apart(stack), how), launch(x, routing, stack, how))


def halves(name: str) -> tuple[torch.Tensor, Routing, ExpertWeights]:
    """Gate and up stored each on its own, up three times as large: its scales and factors are others."""
    sizes = sizes_for(name, num_tokens=3)
    loose = problems.weights(sizes, Activation(), torch.float32)
    gate, up = loose.gate_up.data.chunk(2, 1)
    pairs = zip(gate.unbind(), (3 * up).unbind(), strict=True)
    gate_up = SplitTensor(tuple(tuple(quantize(matrix, name) for matrix in pair) for pair in pairs))
    down = apart(loose.quantize(name)).down
    return torch.randn(3, sizes.hidden_size), problems.routing(sizes), replace(loose, gate_up=gate_up, down=down)


@pytest.mark.parametrize("name", ["fp8-e4m3-tensor", "nvfp4", "fp8-e4m3-b128", "int8", "mxfp4"])
def test_halves_with_scales_and_factors_of_their_own(name):
    x, routing, weights = halves(name)
    for how in (PLANS["pairs"], PLANS["swapped"]):
        y = launch(x, routing, weights, how)
        assert_close(y, reference.expert_mlp(x, routing, weights), torch.float32)


@pytest.mark.parametrize("name", ["fp8-e4m3-tensor", "fp8-e4m3-b128"])
def test_rows_of_eight_bits(name):
    x, routing, weights = halves(name)
    weights = replace(weights, input_format="fp8-e4m3")
    y, expected = expert_mlp.run(x, routing, weights), reference.expert_mlp(x, routing, weights)
    if gpu.interpreted():
        assert_close(y, expected, torch.float32)
    else:  # an activation whose last bit differs can round to another code
        assert too_far(y, expected, LOW_PRECISION_INPUT / 4) is None


def test_matrices_of_any_one_set_of_strides():
    x, routing, _ = case()
    whole = torch.randn(4, 21, 2, 40)
    down = SplitTensor(tuple((dense_matrix(torch.randn(21, 37).T),) for _ in range(4)))
    gate_up = SplitTensor(tuple((dense_matrix(w[:, 0, :37]), dense_matrix(w[:, 1, 3:])) for w in whole))
    weights = ExpertWeights(gate_up, down)
    assert why_unsupported(x, routing, weights) is None
    assert_close(expert_mlp.run(x, routing, weights), reference.expert_mlp(x, routing, weights), torch.float32)


def dense_matrix(matrix: torch.Tensor):
    return replace(dense(matrix[None]), data=matrix)


def test_what_a_table_cannot_say_is_refused():
    x, routing, stack = case()
    down = apart(stack).down
    first, *rest = (parts[0] for parts in down.matrices)
    other = replace(first, data=first.data.T.contiguous().T)
    refused = {
        "one set of strides": SplitTensor(((other,), *((m,) for m in rest))),
        "two of one height": SplitTensor(
            tuple((m.rows(0, 1), m.rows(1, m.shape[0])) for m in (first, *rest)),
        ),
    }
    for words, stored in refused.items():
        assert words in (why_unsupported(x, routing, replace(stack, down=stored)) or ""), words
    first.data.data = first.data.half()
    assert "another dtype" in (why_unsupported(x, routing, replace(stack, down=down)) or "")


def test_experts_nobody_asks_for_are_not_read():
    x, _, stack = case("mxfp4")
    split = apart(stack)
    poison(split.gate_up, 3)
    poison(split.down, 3)
    routing = Routing(torch.tensor([[0, 1], [-1, 4], [2, 0]]), torch.rand(3, 2))
    assert expert_mlp.run(x, routing, split).isfinite().all()


@pytest.mark.skipif(not gpu.interpreted(), reason="loads are watched in the interpreter")
def test_every_address_lies_in_the_matrix_of_its_expert(monkeypatch):
    for name, how in (("float32", PLANS["split"]), ("mxfp4", PLANS["swapped"]), ("fp8-e4m3-b128", PLANS["pairs"])):
        x, routing, stack = case(name, Activation())
        split = apart(stack)
        with watching(monkeypatch) as seen:
            for t in split.tensors:  # kernels are given the first of each alone
                seen.ranges[t.data_ptr(), t.data_ptr() + t.nbytes] = True
            y = launch(x, routing, split, how)
        assert_close(y, reference.expert_mlp(x, routing, split), torch.float32)
