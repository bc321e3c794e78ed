"""Many rows of floats and sixteen rows of weights at once, where a set has outer products."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import moestro
from moestro import Activation, Routing, reference
from moestro.formats import quantize
from moestro.ops import native
from moestro.ops.projection import projection
from moestro.ops.projection import reference as plain
from moestro.types import GPT_OSS_SWIGLU
from tolerances import assert_close, bit_equal

from . import problems
from .engines import run, stored_weights
from .stored import PACKED, apart, poison

OUTER = [isa for isa in native.ISAS if isa.runs_here and isa.has_outer_products]
FEWEST = 40  # rows of an expert
ONE = {"outer products"}

every_isa = pytest.mark.parametrize("isa", OUTER, ids=lambda isa: isa.name)


@pytest.fixture(autouse=True)
def default_mode(poisoned_memory):
    torch.use_deterministic_algorithms(False)


def to_expert(e, num_tokens):
    return Routing(torch.full((num_tokens, 1), e), torch.rand(num_tokens, 1))


def ran(isa, x, routing, weights):
    """What is computed, and the kernels that ran, which are those that were planned."""
    native.module.count_kernels(True)
    y = run(isa, x, routing, weights)
    counted = {kernel for _, kernel in native.module.kernel_counts()}
    native.module.count_kernels(False)
    with moestro.use(implementation=f"cpu-{isa.name}"):
        planned = moestro.explain(moestro.expert_mlp, x, routing, weights).kernels
    assert counted == {use.kernel for use in planned}
    return y, counted


def check(isa, x, routing, weights):
    y, counted = ran(isa, x, routing, weights)
    rows = routing.expert_ids.flatten().add(1).bincount()[1:]
    assert ("outer products" in counted) == any(n >= FEWEST for n in rows)
    assert counted == ONE or any(0 < n < FEWEST for n in rows)
    assert_close(y, reference.expert_mlp(x.double(), routing, weights), x.dtype)
    return y


@every_isa
@pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8-e4m3-channel", "fp8-e4m3-b128"])
def test_sizes_around_vectors_pieces_and_tiles(isa, name):
    """Columns off 8 and off 512, rows of weights off 16, tokens off six and beyond a block; stacked and not."""
    widths, tokens = (1, 7, 8, 9, 15, 17, 511, 512, 513, 1027), (40, 41, 43, 96, 97, 193)
    for i, (hidden, inner) in enumerate(itertools.product(widths, widths)):
        num_tokens = tokens[i % len(tokens)]
        sizes = problems.Sizes(num_tokens, hidden, inner, 2, 1)
        weights = stored_weights(name, sizes, problems.ACTIVATIONS[i % len(problems.ACTIVATIONS)])
        x, routing = torch.randn(num_tokens, hidden), to_expert(1, num_tokens)
        y = check(isa, x, routing, weights)
        if not weights.activation.interleaved:
            assert bit_equal(run(isa, x, routing, apart(weights)), y)


@every_isa
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("columns", [256, 640, 1152])
def test_every_packed_format(isa, name, columns):
    """In float32, which no set makes integers of."""
    sizes = problems.Sizes(90, columns, 384, 3, 2)
    weights = stored_weights(name, sizes, GPT_OSS_SWIGLU)
    ids = torch.stack([torch.zeros(90), torch.arange(90) % 2 + 1], 1).long()
    check(isa, torch.randn(90, columns), Routing(ids, torch.rand(90, 2)), weights)


@every_isa
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_any_routing_strategy_and_number_of_threads(isa, name):
    sizes = problems.Sizes(80, 300, 203, 4, 2)
    weights = stored_weights(name, sizes, GPT_OSS_SWIGLU)
    for kind, weight_on in itertools.product(problems.KINDS, ("output", "input")):
        routing = problems.routing(sizes, kind=kind, weight_on=weight_on)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(80, 300).to(dtype)
            y = run(isa, x, routing, weights)
            assert_close(y, reference.expert_mlp(x, routing, weights), dtype)
            for num_threads, strategy in itertools.product((1, 3), ("grouped", "blockwise-5")):
                torch.set_num_threads(num_threads)
                assert bit_equal(run(isa, x, routing, weights, strategy), y)


@every_isa
def test_not_where_bits_may_not_depend_on_the_rows(isa):
    weights = stored_weights("float32", problems.Sizes(50, 300, 100, 1, 1), Activation())
    x, routing = torch.randn(50, 300), to_expert(0, 50)
    torch.use_deterministic_algorithms(True)
    y, counted = ran(isa, x, routing, weights)
    assert counted == {"direct dots"}
    for count in (1, FEWEST - 1, FEWEST):
        first = Routing(routing.expert_ids[:count], routing.routing_weights[:count])
        assert bit_equal(run(isa, x[:count], first, weights), y[:count])


@every_isa
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_nan_stays_where_it_is(isa, name):
    sizes = problems.Sizes(80, 300, 203, 4, 2)
    weights = stored_weights(name, sizes, Activation())
    x = torch.randn(80, 300)
    routing = Routing(torch.tensor([[0, 1], [1, 3]]).repeat(40, 1), torch.rand(80, 2))
    clean, counted = ran(isa, x, routing, weights)
    assert counted == ONE
    weights = replace(
        weights,
        gate_up=replace(weights.gate_up, data=weights.gate_up.data.clone()),
        down=replace(weights.down, data=weights.down.data.clone()),
    )
    weights.down.data[3, 5, 202] = torch.nan
    poison(weights.gate_up, 2)
    poison(weights.down, 2)
    y = run(isa, x, routing, weights)
    assert y[1::2, 5].isnan().all()
    others = torch.arange(300) != 5
    assert bit_equal(y[:, others], clean[:, others])
    assert bit_equal(y[::2], clean[::2])
    x[1, 299], x[3] = torch.nan, torch.inf
    y = run(isa, x, routing, weights)
    assert y[[1, 3]].isnan().all()
    assert bit_equal(y[::2], clean[::2])


@every_isa
def test_sums_err_less_than_one_of_all_columns(isa):
    """A piece of columns is summed up by itself: 8,192 products of one sign lose few bits."""
    sizes = problems.Sizes(40, 8192, 8, 1, 1)
    weights = stored_weights("float32", sizes, Activation("identity", gated=False), bias=False)
    weights = replace(weights, gate_up=replace(weights.gate_up, data=torch.rand(1, 8, 8192)))
    x, routing = torch.rand(40, 8192), to_expert(0, 40)
    y, expected = run(isa, x, routing, weights), reference.expert_mlp(x.double(), routing, weights)
    assert ((y.double() - expected).norm() / expected.norm()) < 1e-6


@every_isa
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int4-g32"])
@pytest.mark.parametrize("tokens", [FEWEST - 1, FEWEST, 41, 192, 200])
def test_a_matrix_by_itself(isa, name, tokens):
    """Rows of weights off 16 and off a chunk of 64, columns off 8 and beyond 512; threads change no bit."""
    for rows, columns in ((1, 512), (15, 64), (17, 576), (63, 1088), (65, 32), (165, 2112)):
        off = 0 if name == "int4-g32" else rows % 7
        weight = torch.randn(rows, columns - off).div(columns**0.5)
        weight = quantize(weight, name) if name == "int4-g32" else weight.to(getattr(torch, name))
        x = torch.randn(tokens, columns - off).to(torch.float32 if name == "int4-g32" else weight.dtype)
        native.module.count_kernels(True)
        with moestro.use(implementation=f"cpu-{isa.name}"):
            y = projection(x, weight)
            counted = {kernel for of, kernel in native.module.kernel_counts() if of == "linear"}
            native.module.count_kernels(False)
            assert counted == {use.kernel for use in moestro.explain(projection, x, weight).kernels}
            torch.set_num_threads(3)
            assert bit_equal(projection(x, weight), y)
            torch.set_num_threads(1)
        assert (counted == ONE) == (tokens >= FEWEST)
        assert_close(y, plain.projection(x.double(), weight, None), x.dtype)


@every_isa
@pytest.mark.parametrize(
    ("rows", "strategy", "blocks"),
    [
        (192, "auto", 1),
        (193, "auto", 2),
        (400, "auto", 3),
        (300, "blockwise-100", 3),
        (300, "blockwise-500", 2),
    ],
)
def test_blocks_of_an_expert(isa, rows, strategy, blocks):
    weights = stored_weights("float32", problems.Sizes(1, 64, 16, 1, 1), Activation())
    x, routing = torch.randn(rows, 64), to_expert(0, rows)
    native.module.count_kernels(True)
    y = run(isa, x, routing, weights, strategy)
    counted = dict(native.module.kernel_counts())
    native.module.count_kernels(False)
    assert counted == {("gate_up", "outer products"): blocks, ("down", "outer products"): blocks}
    with moestro.use(implementation=f"cpu-{isa.name}"):
        uses = moestro.explain(moestro.expert_mlp, x, routing, weights, strategy).kernels
    assert {(use.stage, use.kernel): use.units for use in uses} == counted
    assert_close(y, reference.expert_mlp(x.double(), routing, weights), torch.float32)


@every_isa
@pytest.mark.parametrize("tokens", [192, 200])
def test_rows_that_stay_floats_among_shifted_ones(isa, tokens):
    """One row is too large for the order of shifted codes; where a set has none, all rows are floats."""
    weights = stored_weights("fp8-e4m3-b128", problems.Sizes(1, 300, 70, 1, 1), Activation("identity", gated=False))
    x, routing = torch.randn(tokens, 300), to_expert(0, tokens)
    clean, counted = ran(isa, x, routing, weights)
    assert counted == ONE
    x[7] *= 1e25
    y, counted = ran(isa, x, routing, weights)
    assert counted == ONE
    others = torch.arange(tokens) != 7
    assert bit_equal(y[others], clean[others])
    expected = reference.expert_mlp(x.double(), routing, weights)
    assert_close(y[7:8].double() / 1e25, expected[7:8] / 1e25, torch.float32)
