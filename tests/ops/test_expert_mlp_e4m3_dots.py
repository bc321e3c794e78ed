"""Weights of e4m3 whose codes become floats by a shift, on processors that multiply subnormal numbers at no cost."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
import torch

import moestro
from moestro import Activation, Routing, reference
from moestro.ops import native
from moestro.ops.projection import projection
from moestro.ops.projection import reference as plain
from moestro.types import GPT_OSS_SWIGLU
from tolerances import assert_close, bit_equal

from . import problems
from .engines import output, run, stored_weights
from .stored import apart, poison

SHIFTING = [isa for isa in native.ISAS if isa.runs_here and isa.shifts_e4m3]
FORMATS = ("fp8-e4m3-tensor", "fp8-e4m3-channel", "fp8-e4m3-b128")
FEW, MANY = 8, 40  # rows of an expert: in registers up to, outer products from
SIZES = problems.Sizes(12, 300, 203, 4, 2)

every_isa = pytest.mark.parametrize("isa", SHIFTING, ids=lambda isa: isa.name)
every_format = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(autouse=True)
def default_mode(poisoned_memory):
    torch.use_deterministic_algorithms(False)


def kernels(isa, x, routing, weights):
    with moestro.use(implementation=f"cpu-{isa.name}"):
        return {use.kernel for use in moestro.explain(moestro.expert_mlp, x, routing, weights).kernels}


def kernel_of(rows):
    return "e4m3 dots" if rows <= FEW else "decoded e4m3 dots" if rows < MANY else "outer products"


def to_expert(e, num_tokens):
    return Routing(torch.full((num_tokens, 1), e), torch.rand(num_tokens, 1))


def ran(isa, x, routing, weights, projections=("gate_up", "down")):
    """What is computed, and the kernels that ran for these projections."""
    native.module.count_kernels(True)
    y = run(isa, x, routing, weights)
    counted = {kernel for of, kernel in native.module.kernel_counts() if of in projections}
    native.module.count_kernels(False)
    return y, counted


def check(isa, x, routing, weights):
    y, counted = ran(isa, x, routing, weights)
    assert counted
    assert counted == {kernel_of(rows) for rows in routing.expert_ids.flatten().bincount().tolist() if rows}
    assert counted == kernels(isa, x, routing, weights)
    assert_close(y, reference.expert_mlp(x.double(), routing, weights), x.dtype)
    return y


@every_isa
@every_format
def test_sizes_around_steps(isa, name):
    widths = (1, 31, 32, 63, 64, 65, 127, 128, 129, 193, 300, 577)
    for i, (hidden, inner) in enumerate(itertools.product(widths, widths)):
        sizes = problems.Sizes(1 + i % 13, hidden, inner, 3, 2)
        weights = stored_weights(name, sizes, problems.ACTIVATIONS[i % 3])
        routing = problems.routing(sizes, kind="full")
        x = torch.randn(sizes.num_tokens, hidden).to((torch.float32, torch.bfloat16, torch.float16)[i % 3])
        y = check(isa, x, routing, weights)
        if not weights.activation.interleaved:
            assert bit_equal(run(isa, x, routing, apart(weights)), y)


@every_isa
@every_format
@pytest.mark.parametrize("columns", [320, 1300])
def test_every_number_of_rows(isa, name, columns):
    """A row has the same bits among all numbers of rows that one kernel takes, of one block of tokens or of two."""
    weights = stored_weights(name, problems.Sizes(1, columns, 130, 2, 1), GPT_OSS_SWIGLU)
    x, routing = torch.randn(200, columns).bfloat16(), to_expert(1, 200)
    first = {}
    for count in (*range(1, 15), 39, 40, 41, 97, 192, 193, 200):
        y = check(isa, x[:count], first_rows(routing, count), weights)
        before = first.setdefault(kernel_of(count), y)
        assert bit_equal(y[: len(before)], before)
        first[kernel_of(count)] = y
    assert len(first) == 3


def first_rows(routing, count):
    return Routing(routing.expert_ids[:count], routing.routing_weights[:count])


@every_isa
@every_format
def test_any_routing_strategy_and_number_of_threads(isa, name):
    weights = stored_weights(name, SIZES, GPT_OSS_SWIGLU)
    x = torch.randn(SIZES.num_tokens, SIZES.hidden_size).bfloat16()
    for kind, weight_on in itertools.product(problems.KINDS, ("output", "input")):
        routing = problems.routing(SIZES, kind=kind, weight_on=weight_on)
        y = run(isa, x, routing, weights)
        assert_close(y, reference.expert_mlp(x, routing, weights), torch.bfloat16)
        for num_threads, strategy in itertools.product((1, 3), ("grouped", "blockwise-5")):
            torch.set_num_threads(num_threads)
            assert bit_equal(run(isa, x, routing, weights, strategy), y)


@every_isa
@every_format
@pytest.mark.parametrize("count", [2, 6, 30, 40])
def test_every_code(isa, name, count):
    """A row of down has one code in all of its columns, and h is one of them: an output is the code's value."""
    weights = stored_weights(name, problems.Sizes(1, 256, 256, 1, 1), Activation("identity", gated=False), bias=False)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    up, down = torch.eye(256).to(torch.float8_e4m3fn), codes.expand(256, 256).t().contiguous()
    ones = {name: torch.ones_like(getattr(weights, name).scales) for name in ("gate_up", "down")}
    weights = replace(
        weights,
        gate_up=replace(weights.gate_up, data=up[None], scales=ones["gate_up"]),
        down=replace(weights.down, data=down[None], scales=ones["down"]),
    )
    x = torch.zeros(count, 256)
    x[torch.arange(count), torch.arange(count) * 6] = 1.0
    routing = Routing(torch.zeros(count, 1).long(), torch.ones(count, 1))
    y, counted = ran(isa, x, routing, weights)
    assert counted == {kernel_of(count)}
    assert torch.equal(y.isnan(), codes.float().isnan().expand(count, 256))
    finite = ~codes.float().isnan()
    assert torch.equal(y[:, finite], codes.float()[finite].expand(count, -1))


@every_isa
@every_format
@pytest.mark.parametrize("tokens", [6, 40, 80])
def test_nan_stays_where_it_is(isa, name, tokens):
    sizes = replace(SIZES, num_tokens=tokens)
    weights = stored_weights(name, sizes, Activation())
    x = torch.randn(tokens, sizes.hidden_size).bfloat16()
    routing = Routing(torch.tensor([[0, 1], [1, 3]]).repeat(tokens // 2, 1), torch.rand(tokens, 2))
    clean = run(isa, x, routing, weights)
    weights = replace(weights, gate_up=copied(weights.gate_up), down=copied(weights.down))
    weights.down.data.view(torch.uint8)[3, 5, 299 % weights.down.data.shape[-1]] = 0xFF
    poison(weights.gate_up, 2)
    poison(weights.down, 2)
    for stored in (weights, apart(weights)):
        y = run(isa, x, routing, stored)
        assert y[1::2, 5].isnan().all()
        others = torch.arange(sizes.hidden_size) != 5
        assert bit_equal(y[:, others], clean[:, others])
        assert bit_equal(y[::2], clean[::2])
    x[1, 3], x[3] = torch.nan, torch.inf
    y = run(isa, x, routing, weights)
    assert y[[1, 3]].isnan().all()
    others = list(range(0, tokens, 2))
    assert bit_equal(y[others], clean[others])


def copied(stored):
    return replace(stored, data=stored.data.clone(), scales=stored.scales.clone())


@every_isa
@every_format
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e-10, 1e10, 1e18, 1e30])
def test_rows_of_any_size(isa, name, size):
    """Those beyond what a shifted row holds stay floats."""
    weights = stored_weights(name, SIZES, Activation("identity", gated=False), bias=False)
    x, routing = size * torch.randn(SIZES.num_tokens, SIZES.hidden_size), problems.routing(SIZES, kind="full")
    x[1] /= 1e6
    found, expected = run(isa, x, routing, weights), reference.expert_mlp(x.double(), routing, weights)
    unit = size or 1.0
    assert_close(found.double() / unit, expected / unit, torch.float32)


@every_isa
@every_format
@pytest.mark.parametrize(
    ("largest", "stays"),
    [(2.0**-60, False), (2.0**-61, True), (2.0**60, False), (1.01 * 2.0**60, True), (0.0, False), (2.0**-90, True)],
)
@pytest.mark.parametrize("tokens", [2, 12, 50])
def test_which_rows_stay_floats(isa, name, largest, stays, tokens):
    """And what those at the bounds give, with a scale that a power of two of the row must not meet before its sum."""
    sizes = problems.Sizes(tokens, 192, 130, 1, 1)
    weights = stored_weights(name, sizes, Activation("identity", gated=False), bias=False)
    weights = replace(weights, gate_up=replace(weights.gate_up, scales=torch.full_like(weights.gate_up.scales, 512.0)))
    x = torch.randn(tokens, 192)
    x, routing = x / x.abs().amax(1, keepdim=True) * largest, to_expert(0, tokens)
    y, counted = ran(isa, x, routing, weights, ("gate_up",))
    shifted = {kernel_of(tokens)}
    assert counted == shifted if not stays or tokens >= MANY else not counted <= shifted
    unit = largest or 1.0
    expected = reference.expert_mlp(x.double(), routing, weights)
    assert_close(y.double() / unit, expected / unit, torch.float32)


@every_isa
@every_format
@pytest.mark.parametrize("factor", [2.0**-60, 2.0**40])
@pytest.mark.parametrize("tokens", [2, 12, 50])
def test_scales_of_any_size(isa, name, factor, tokens):
    sizes = problems.Sizes(tokens, 256, 130, 1, 1)
    weights = stored_weights(name, sizes, Activation("identity", gated=False), bias=False)
    scaled = replace(weights.down, scales=weights.down.scales * factor)
    x, routing = torch.randn(tokens, 256), to_expert(0, tokens)
    found = check(isa, x, routing, weights)
    assert_close(run(isa, x, routing, replace(weights, down=scaled)) / factor, found, torch.float32)


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("tokens", [3, 30, 100])
def test_scales_of_groups_of_any_dtype_at_any_address(isa, dtype, tokens):
    sizes = replace(SIZES, num_tokens=tokens)
    weights, x = stored_weights("fp8-e4m3-b128", sizes, Activation()), torch.randn(tokens, 300)

    def stored(each):
        scales = torch.exp2(each.scales.log2().round()).to(dtype)  # which every dtype holds
        odd = bytearray(1) + bytearray(scales.view(torch.uint8).numpy().tobytes())
        return replace(each, scales=torch.frombuffer(odd, dtype=dtype, offset=1).view(scales.shape))

    weights = replace(weights, gate_up=stored(weights.gate_up), down=stored(weights.down))
    check(isa, x, problems.routing(sizes, kind="full"), weights)


@every_isa
@every_format
def test_subnormal_numbers_count_where_the_thread_flushes_them(isa, name):
    weights = stored_weights(name, SIZES, Activation())
    codes = torch.randint(1, 8, weights.down.data.shape, dtype=torch.uint8)  # subnormal ones
    weights = replace(weights, down=replace(weights.down, data=codes.view(torch.float8_e4m3fn)))
    x, routing = torch.randn(SIZES.num_tokens, SIZES.hidden_size), problems.routing(SIZES, kind="full")
    expected = check(isa, x, routing, weights)
    torch.set_num_threads(1)
    assert torch.set_flush_denormal(True)
    try:
        assert bit_equal(run(isa, x, routing, weights), expected)
        tiny = torch.full((1,), 1e-40)
        assert (tiny * 1.0).item() == 0.0  # the thread still flushes them
    finally:
        torch.set_flush_denormal(False)


@every_isa
@every_format
@pytest.mark.parametrize("tokens", [6, 40, 80])
def test_scales_that_are_nan_stay_with_their_expert(isa, name, tokens):
    weights = stored_weights(name, SIZES, Activation())
    x = torch.randn(tokens, SIZES.hidden_size)
    routing = Routing(torch.tensor([[0], [3]]).repeat(tokens // 2, 1), torch.rand(tokens, 1))
    clean = run(isa, x, routing, weights)
    weights = replace(weights, down=copied(weights.down))
    weights.down.scales[3] = torch.nan
    y = run(isa, x, routing, weights)
    assert y[1::2].isnan().all()
    assert bit_equal(y[::2], clean[::2])


@every_isa
@every_format
@pytest.mark.parametrize("tokens", [1, 8, 9, 39, 40, 100])
def test_a_matrix_by_itself(isa, name, tokens):
    stored = stored_weights(name, problems.Sizes(1, 300, 203, 1, 1), Activation(), bias=False).gate_up
    weight, bias = replace(stored, data=stored.data[0], scales=stored.scales[0]), torch.randn(406)
    shifted = {kernel_of(tokens)}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(tokens, 300).to(dtype)
        with moestro.use(implementation=f"cpu-{isa.name}"):
            y = projection(x, weight, bias.to(dtype))
            assert {use.kernel for use in moestro.explain(projection, x, weight).kernels} == shifted
            x[-1] *= 1e25  # which stays floats
            mixed = projection(x, weight, bias.to(dtype))
        expected = plain.projection(x.double(), weight, bias.to(dtype).double())
        assert_close(y[:-1], expected[:-1], dtype)
        assert bit_equal(mixed[:-1], y[:-1])
        assert_close(mixed[-1:].double() / 1e25, expected[-1:] / 1e25, dtype)


MASKED = """
from moestro.ops import native
print(*(isa.name for isa in native.ISAS if isa.shifts_e4m3))
"""


@pytest.mark.skipif(not SHIFTING, reason="what is masked has to be there")
def test_what_the_processor_cannot_is_not_taken(monkeypatch):
    without = os.environ.get("MOESTRO_WITHOUT_FEATURES", "")
    assert output("-c", MASKED).split() == [isa.name for isa in native.ISAS if isa.shifts_e4m3]
    monkeypatch.setenv("MOESTRO_WITHOUT_FEATURES", f"{without} subnormals")
    assert output("-c", MASKED).split() == []


@every_isa
def test_deterministic_mode_takes_other_kernels(isa):
    weights = stored_weights("fp8-e4m3-b128", SIZES, Activation())
    x, routing = torch.randn(12, 300), problems.routing(SIZES, kind="full")
    torch.use_deterministic_algorithms(True)
    assert not kernels(isa, x, routing, weights) & {"e4m3 dots", "decoded e4m3 dots"}
