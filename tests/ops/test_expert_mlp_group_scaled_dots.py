"""What the engine does in the default mode only: scales multiply sums, and an expert takes tiles where they pay."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import moestro
from moestro import Activation, Routing, reference
from moestro.formats import FORMATS, dequantize
from moestro.types import GPT_OSS_SWIGLU
from tolerances import assert_close, bit_equal

from . import problems
from .engines import RUNNING, TILED, check, every_isa, every_tiled_isa, run, stored_weights
from .stored import PACKED, apart
from .test_expert_mlp_cpu import packed_widths

SCALED = [name for name in PACKED if name not in ("float16", "float32", "bfloat16")]


@pytest.fixture(autouse=True)
def default_mode(poisoned_memory):
    torch.use_deterministic_algorithms(False)


def to_one_expert(num_rows, num_experts=3):
    """Expert 1 has this many rows, 0 has one, and the others none."""
    ids = torch.full((num_rows, 2), -1)
    ids[:, 1] = 1
    ids[-1, 0] = 0
    return Routing(ids, torch.rand(num_rows, 2))


@every_isa
@pytest.mark.parametrize("name", SCALED)
def test_every_number_of_rows(isa, name):
    widths = packed_widths(name, isa.lanes)
    for i, hidden in enumerate(widths):
        # Four tokens of width 1: one number alone is as far off as the terms of its sum cancel.
        sizes = problems.Sizes((i + 3) % 6 + 1, hidden, widths[-1 - i], 3, 2)
        weights = stored_weights(name, sizes, problems.ACTIVATIONS[i % 3])
        x, routing = torch.randn(sizes.num_tokens, hidden), to_one_expert(sizes.num_tokens)
        y = check(isa, x, routing, weights)
        assert bit_equal(run(isa, x, routing, apart(weights)), y)


@every_isa
@pytest.mark.parametrize("name", SCALED)
def test_one_to_six_rows_of_several_groups(isa, name):
    group = max(FORMATS[name].scaling.columns, 32)
    for num_tokens in (1, 2, 3, 4, 5, 6):
        sizes = problems.Sizes(num_tokens, 5 * group, 3 * group, 3, 2)
        weights = stored_weights(name, sizes, GPT_OSS_SWIGLU)
        x = torch.randn(num_tokens, sizes.hidden_size)
        routing = to_one_expert(num_tokens)
        y = check(isa, x, routing, weights)
        for num_threads in (2, 5):
            torch.set_num_threads(num_threads)
            assert bit_equal(run(isa, x, routing, weights), y)


@pytest.mark.parametrize("isa", RUNNING + TILED, ids=lambda isa: isa.name)
@pytest.mark.parametrize("column", [0, 63, 64, 200])
def test_one_weight_that_is_not_a_number(isa, column):
    sizes = problems.Sizes(3, 256, 256, 2, 1)
    weights = stored_weights("fp8-e4m3-b128", sizes, Activation("identity", gated=False), bias=False)
    down = replace(weights.down, data=weights.down.data.clone())
    down.data.view(torch.uint8)[1, 5, column] = 0xFF
    weights = replace(weights, down=down)
    x, routing = torch.randn(3, 256).bfloat16(), Routing(torch.tensor([[1], [0], [1]]), torch.ones(3, 1))
    y = run(isa, x, routing, weights)
    wrong = torch.zeros(3, 256, dtype=torch.bool)
    wrong[[0, 2], 5] = True
    assert torch.equal(y.isnan(), wrong)
    assert_close(y[~wrong], reference.expert_mlp(x, routing, weights)[~wrong], torch.bfloat16)


def spread_rows(counts):
    """One row for each count: expert e is in as many slots as its count says."""
    num_tokens = max(counts)
    ids = torch.full((num_tokens, len(counts)), -1)
    for e, count in enumerate(counts):
        ids[torch.randperm(num_tokens)[:count], e] = e
    return ids


@every_tiled_isa
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_experts_of_many_rows_in_tiles_and_of_few_without(isa, name, weight_on):
    group = max(FORMATS[name].scaling.columns, 32)
    ids = spread_rows((1, 40, 2, 3, 0, 4, 5, 17, 1, 6))
    sizes = problems.Sizes(40, 3 * group, 2 * group, 10, 10)
    weights = stored_weights(name, sizes, GPT_OSS_SWIGLU)
    x, routing = torch.randn(40, 3 * group).bfloat16(), Routing(ids, torch.rand(40, 10), weight_on)
    y = run(isa, x, routing, weights)
    assert_close(y, reference.expert_mlp(x, routing, weights), torch.bfloat16)
    for num_threads, strategy in itertools.product((1, 3), ("grouped", "blockwise-5")):
        torch.set_num_threads(num_threads)
        assert bit_equal(run(isa, x, routing, weights, strategy), y)
    everything = run(isa, x, routing, weights, "all_experts")
    assert_close(everything, reference.expert_mlp(x, routing, weights), torch.bfloat16)


@every_tiled_isa
def test_two_formats_and_long_inputs(isa):
    """More rows than the workspace holds at once, of which some experts have few."""
    tokens = 66_000
    sizes = problems.Sizes(tokens, 64, 64, 5, 2)
    first, last = (stored_weights(name, sizes, Activation()) for name in ("int8", "mxfp4"))
    weights = replace(first, down=last.down)
    ids = torch.full((tokens, 2), 1)
    ids[::2, 1], ids[[7, 3_000, tokens - 1], 0], ids[5, 1] = -1, 3, 4
    routing = Routing(ids, torch.rand(tokens, 2))
    x = torch.randn(tokens, 64).bfloat16()
    assert_close(run(isa, x, routing, weights), reference.expert_mlp(x, routing, weights), torch.bfloat16)


@every_isa
def test_zero_points_larger_than_a_nibble(isa):
    sizes = problems.Sizes(2, 128, 64, 2, 1)
    weights = stored_weights("int4-g32-zp", sizes, Activation(), bias=False)
    assert weights.gate_up.zeros is not None
    gate_up = replace(weights.gate_up, zeros=weights.gate_up.zeros + 200)
    weights = replace(weights, gate_up=gate_up)
    assert dequantize(gate_up).abs().max() > dequantize(weights.down).abs().max()
    check(isa, torch.randn(2, 128), Routing(torch.tensor([[0], [1]]), torch.ones(2, 1)), weights)


@every_isa
@pytest.mark.parametrize("name", SCALED)
def test_rows_of_one_expert_are_alike_wherever_they_stand(isa, name):
    """More rows than a block of tokens: those of the last one are no few."""
    group = max(FORMATS[name].scaling.columns, 32)
    sizes = problems.Sizes(97, 2 * group, group, 2, 1)
    weights = stored_weights(name, sizes, Activation())
    x, routing = (
        torch.randn(1, 2 * group).expand(97, -1).contiguous(),
        Routing(torch.ones(97, 1).long(), torch.ones(97, 1)),
    )
    y = run(isa, x, routing, weights)
    assert bit_equal(y, y[:1].expand(97, -1))
    for strategy in ("blockwise-1", "blockwise-3"):
        assert bit_equal(run(isa, x, routing, weights, strategy), y)


@every_isa
@pytest.mark.parametrize("name", ["int8", "int4-g32", "int4-g32-zp", "mxfp4", "fp8-e4m3-b128"])
def test_sums_of_large_numbers_that_scales_make_small(isa, name):
    sizes = problems.Sizes(1, 128, 128, 2, 1)
    weights = stored_weights(name, sizes, Activation("identity", gated=False), bias=False)
    x = torch.zeros(1, 128)
    x[0, 7] = 1e38
    routing = Routing(torch.tensor([[1]]), torch.full((1, 1), 1e-6))
    expected = reference.expert_mlp(x.double(), routing, weights)
    assert expected.isfinite().all()
    found = run(isa, x, routing, weights)
    assert_close(found / 1e30, expected / 1e30, torch.float32)


@every_isa
def test_scales_far_apart(isa):
    sizes = problems.Sizes(2, 64, 64, 2, 1)
    weights = stored_weights("int8", sizes, Activation(), bias=False)
    scales = weights.gate_up.scales
    wide = torch.empty(*scales.shape[:-1], 5_000)
    wide[..., :1] = scales
    moved = replace(weights, gate_up=replace(weights.gate_up, scales=wide[..., :1]))
    x, routing = torch.randn(2, 64), Routing(torch.tensor([[0], [1]]), torch.ones(2, 1))
    assert bit_equal(run(isa, x, routing, moved), run(isa, x, routing, weights))


@pytest.mark.parametrize("isa", RUNNING + TILED, ids=lambda isa: isa.name)
@pytest.mark.parametrize("name", ["int8", "fp8-e4m3-b128", "mxfp4", "int4-g32"])
def test_one_row_is_computed_another_way_than_with_the_same_bits_for_all(isa, name):
    """Otherwise nothing in this file tests what it says; bfloat16 dots have the same bits for all."""
    sizes = problems.Sizes(1, 256, 256, 2, 1)
    x, routing = torch.randn(1, 256).bfloat16().float(), Routing(torch.tensor([[1]]), torch.ones(1, 1))
    x = x.bfloat16() if isa.multiplies_bfloat16 else x
    for form in (name, "bfloat16"):
        weights = stored_weights(form, sizes, Activation())
        fastest, by = run(isa, x, routing, weights), kernels(isa, x, routing, weights)
        torch.use_deterministic_algorithms(True)
        one_way = form == "bfloat16" or by == {"bfloat16 dots"}
        assert (kernels(isa, x, routing, weights) == by) == one_way, form
        if one_way:
            assert bit_equal(run(isa, x, routing, weights), fastest)
        torch.use_deterministic_algorithms(False)


def kernels(isa, x, routing, weights):
    with moestro.use(implementation=f"cpu-{isa.name}"):
        return {use.kernel for use in moestro.explain(moestro.expert_mlp, x, routing, weights).kernels}
