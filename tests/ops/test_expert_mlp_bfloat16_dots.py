"""Experts of few rows where tokens are bfloat16, weights bfloat16 or e4m3, and vectors multiply pairs of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import moestro
from moestro import Activation, Routing, reference
from moestro.ops import native
from moestro.types import GPT_OSS_SWIGLU
from tolerances import assert_close, bit_equal

from . import problems
from .engines import run, stored_weights
from .stored import apart, poison

WIDTHS = (1, 2, 15, 16, 31, 32, 33, 63, 65, 130)
E4M3 = ("fp8-e4m3-tensor", "fp8-e4m3-channel", "fp8-e4m3-b128")
FORMATS = ("bfloat16", *E4M3)
SIZES = problems.Sizes(12, 98, 75, 4, 2)
ISAS = [isa for isa in native.ISAS if isa.runs_here and isa.multiplies_bfloat16 and not isa.has_tile_unit]

every_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
every_format = pytest.mark.parametrize("name", FORMATS)
pytestmark = pytest.mark.unpoisoned  # in the deterministic mode every expert takes tiles


def problem(sizes=SIZES, activation=GPT_OSS_SWIGLU, name="bfloat16"):
    x = torch.randn(sizes.num_tokens, sizes.hidden_size).bfloat16()
    return x, stored_weights(name, sizes, activation)


def close(isa, x, routing, weights):
    y = run(isa, x, routing, weights)
    with moestro.use(implementation=f"cpu-{isa.name}"):
        kernels = {use.kernel for use in moestro.explain(moestro.expert_mlp, x, routing, weights).kernels}
    assert kernels == {"bfloat16 dots"}
    assert_close(y, reference.expert_mlp(x, routing, weights), torch.bfloat16)
    return y


@every_isa
@every_format
def test_sizes_around_vectors(isa, name):
    widths = WIDTHS if name == "bfloat16" else (1, 16, 63, 65, 127, 128, 129, 191, 193, 300)
    for i, (hidden, inner) in enumerate(itertools.product(widths, widths)):
        sizes = problems.Sizes(1 + i % 15, hidden, inner, 3, 2)
        x, weights = problem(sizes, problems.ACTIVATIONS[i % 3], name)
        routing = problems.routing(sizes, kind="full")
        y = close(isa, x, routing, weights)
        if not weights.activation.interleaved:
            assert bit_equal(run(isa, x, routing, apart(weights)), y)


@every_isa
@every_format
def test_any_routing_and_weights_on_the_input(isa, name):
    x, weights = problem(name=name)
    for kind, weight_on in itertools.product(problems.KINDS, ("output", "input")):
        routing = problems.routing(SIZES, kind=kind, weight_on=weight_on)
        assert_close(run(isa, x, routing, weights), reference.expert_mlp(x, routing, weights), torch.bfloat16)


@every_isa
@every_format
def test_the_same_bits_alone_and_among_few_on_any_number_of_threads(isa, name):
    sizes = problems.Sizes(15, 320, 203, 3, 1)
    x, weights = problem(sizes, name=name)
    routing = problems.routing(sizes, kind="full")
    whole = close(isa, x, routing, weights)
    for num_threads, row in itertools.product((1, 2, 5), range(15)):
        torch.set_num_threads(num_threads)
        one = Routing(routing.expert_ids[row : row + 1], routing.routing_weights[row : row + 1])
        assert bit_equal(close(isa, x[row : row + 1], one, weights), whole[row : row + 1])


@every_isa
@every_format
def test_poison_and_infinity_stay_where_they_are(isa, name):
    x, weights = problem(name=name, activation=Activation())
    routing = Routing(torch.tensor([[0, 1], [1, 3]]).repeat(6, 1), torch.rand(12, 2))
    clean = run(isa, x, routing, weights)
    poison(weights.gate_up, 2)
    poison(weights.down, 2)
    x[7], x[9, 3] = torch.nan, torch.inf
    for stored in (weights, apart(weights)):
        y = run(isa, x, routing, stored)
        others = [row for row in range(12) if row not in (7, 9)]
        assert bit_equal(y[others], clean[others])
        assert y[7].isnan().all()


@every_isa
@pytest.mark.parametrize(("first", "second"), [("bfloat16", "fp8-e4m3-b128"), ("fp8-e4m3-channel", "fp8-e4m3-tensor")])
def test_projections_of_two_formats(isa, first, second):
    x, weights = problem(name=first)
    weights = replace(weights, down=stored_weights(second, SIZES, GPT_OSS_SWIGLU).down)
    close(isa, x, problems.routing(SIZES, kind="full"), weights)


@every_isa
@pytest.mark.parametrize("name", E4M3)
def test_every_code_of_e4m3(isa, name):
    """A row of down has one code in all of its 256 columns, and h is 2^-8 in each: an output is the code's value."""
    sizes = problems.Sizes(1, 256, 256, 1, 1)
    weights = stored_weights(name, sizes, Activation("identity", gated=False), bias=False)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    up, down = torch.zeros(256, 256).to(torch.float8_e4m3fn), codes.expand(256, 256).clone()
    up[:, 0] = 1.0
    ones = {"gate_up": torch.ones_like(weights.gate_up.scales), "down": torch.ones_like(weights.down.scales)}
    weights = replace(
        weights,
        gate_up=replace(weights.gate_up, data=up[None], scales=ones["gate_up"]),
        down=replace(weights.down, data=down.t().contiguous()[None], scales=ones["down"]),
    )
    x, routing = torch.zeros(1, 256).bfloat16(), Routing(torch.zeros(1, 1).long(), torch.ones(1, 1))
    x[0, 0] = 2.0**-8
    y = run(isa, x, routing, weights)[0]
    assert torch.equal(y.isnan(), codes.float().isnan())
    finite = ~y.isnan()
    assert torch.equal(y[finite].float(), codes.float()[finite])  # each of them is a bfloat16


@every_isa
@pytest.mark.parametrize("name", E4M3)
def test_sums_of_e4m3_that_leave_a_float_before_scales_bring_them_back(isa, name):
    sizes = problems.Sizes(2, 256, 384, 2, 1)
    weights = stored_weights(name, sizes, Activation("identity", gated=False), bias=False)
    x = torch.zeros(2, 256).bfloat16()
    x[0, 7], x[1] = 1e38, 3e36
    routing = Routing(torch.tensor([[1], [0]]), torch.full((2, 1), 1e-6))
    expected = reference.expert_mlp(x.double(), routing, weights)
    assert expected.isfinite().all()
    assert_close(run(isa, x, routing, weights).double() / 1e30, expected / 1e30, torch.bfloat16)


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_groups_of_any_dtype_at_any_address(isa, dtype):
    sizes = problems.Sizes(9, 300, 200, 3, 2)
    x, weights = problem(sizes, name="fp8-e4m3-b128")

    def stored(each):
        scales = torch.exp2(each.scales.log2().round()).to(dtype)  # which every dtype holds
        odd = bytearray(1) + bytearray(scales.view(torch.uint8).numpy().tobytes())
        return replace(each, scales=torch.frombuffer(odd, dtype=dtype, offset=1).view(scales.shape))

    weights = replace(weights, gate_up=stored(weights.gate_up), down=stored(weights.down))
    close(isa, x, problems.routing(sizes, kind="full"), weights)


@every_isa
@every_format
def test_values_at_the_ends_of_bfloat16(isa, name):
    """Large values stay finite, and those too small for a normal number are zero."""
    x, weights = problem(replace(SIZES, num_tokens=3), Activation(), name)
    routing = problems.routing(replace(SIZES, num_tokens=3), kind="full")
    assert run(isa, 1e18 * x, routing, weights).isfinite().all()
    tiny = torch.full_like(x, 1e-39)
    assert_close(
        run(isa, tiny, routing, weights), reference.expert_mlp(torch.zeros_like(x), routing, weights), torch.bfloat16
    )
