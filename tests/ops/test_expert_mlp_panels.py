"""Packed weights on instruction sets that multiply tiles of bfloat16: decoded exactly, the same bits in any batch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from moestro import Activation, ExpertWeights, Routing
from moestro.errors import UnsupportedError
from moestro.formats import FORMATS, PackedTensor, dequantize
from moestro.types import GPT_OSS_SWIGLU
from tolerances import bit_equal

from . import problems
from .engines import STRATEGIES, check_tiles, every_tiled_isa, run, stored_weights
from .stored import PACKED, apart
from .test_expert_mlp_cpu import at_odd_address, first_column, packed_widths

PANELS = [name for name in PACKED if name not in ("float16", "float32")]


@every_tiled_isa
@pytest.mark.parametrize("name", PANELS)
def test_sizes_around_groups_and_panels(isa, name):
    widths = sorted(
        {*packed_widths(name, isa.lanes), *(w for w in (64, 192) if FORMATS[name].scaling.columns in (32, 64))}
    )
    for i, hidden in enumerate(widths):
        sizes = problems.Sizes((1, 3, 37, 150)[i % 4], hidden, widths[-1 - i], 3, 2)
        weights = stored_weights(name, sizes, problems.ACTIVATIONS[i % 3])
        x, routing = torch.randn(sizes.num_tokens, hidden).bfloat16(), problems.routing(sizes, kind="full")
        y = check_tiles(isa, x, routing, weights)
        assert bit_equal(run(isa, x, routing, apart(weights)), y)


@every_tiled_isa
@pytest.mark.parametrize(
    "names", [("mxfp4", "bfloat16"), ("bfloat16", "int4-g32-zp"), ("int8", "mxfp4"), ("nvfp4", "int8")]
)
def test_projections_of_two_formats_with_every_activation(isa, names):
    sizes = problems.Sizes(21, 96, 160, 4, 2)
    x, routing = torch.randn(21, 96).bfloat16(), problems.routing(sizes, kind="duplicates", weight_on="input")
    for activation in problems.ACTIVATIONS:
        first, last = (stored_weights(name, sizes, activation) for name in names)
        check_tiles(isa, x, routing, replace(first, down=last.down))


@every_tiled_isa
@pytest.mark.parametrize("name", PANELS)
def test_the_same_bits_alone_in_any_batch_and_on_any_number_of_threads(isa, name):
    group = max(FORMATS[name].scaling.columns, 32)
    sizes = problems.Sizes(150, 3 * group, 2 * group, 5, 3)
    weights, x = stored_weights(name, sizes, GPT_OSS_SWIGLU), torch.randn(150, 3 * group).bfloat16()
    routing = problems.routing(sizes, kind="duplicates")
    whole = run(isa, x, routing, weights)

    def alike(rows, strategy="auto"):
        few = Routing(routing.expert_ids[rows], routing.routing_weights[rows])
        assert bit_equal(run(isa, x[rows], few, weights, strategy), whole[rows])

    for count in (1, 2, 3, 5, 9, 17, 40):
        alike(slice(149 - count, 149))
    for num_threads, strategy in itertools.product((1, 3), STRATEGIES):
        torch.set_num_threads(num_threads)
        alike(torch.randint(0, 150, (37,)), strategy)


@every_tiled_isa
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_every_code_of_weights_and_scales(isa, num_tokens):
    """A code times a scale, rounded once; what is below the least normal number counts as zero in a tile."""
    byte = torch.arange(256, dtype=torch.uint8)
    codes = byte.view(1, 256, 1)
    cases = [("fp8-e4m3-tensor", codes.view(torch.float8_e4m3fn), torch.tensor([[[0.75]]]), None)]
    cases.append(("int8", codes.view(torch.int8), torch.full((1, 256, 1), 3.0), None))
    nibbles = torch.zeros(16, 256, 16, dtype=torch.uint8)
    nibbles[:, :, 0] = torch.arange(16, dtype=torch.uint8)[:, None]
    every_scale = byte.view(1, 256, 1).expand(16, -1, -1)
    halves = torch.arange(256 * 16, dtype=torch.int16).view(16, 256, 1) * 15
    cases += [
        ("mxfp4", nibbles, every_scale, None),
        ("mxfp4", nibbles, every_scale.clamp(2, 252), None),
        ("nvfp4", nibbles[..., :8], every_scale.view(torch.float8_e4m3fn), None),
        ("fp4-g32", nibbles, halves.view(torch.bfloat16), None),
        ("int4-g32", nibbles, halves.view(torch.float16), None),
    ]
    for largest in (15, 16, 255):
        zeros = torch.arange(16 * 256).remainder(largest + 1).to(torch.uint8).view(16, 256, 1)
        cases.append(("int4-g32-zp", nibbles, halves.view(torch.float16), zeros))
    for name, data, scales, zero_points in cases:
        x, routing, weights = first_column(data, name, scales, zero_points)
        wide = dequantize(weights.down)[:, :, 0]
        expected = wide.masked_fill(wide.abs() < 2.0**-126, 0).bfloat16()
        gate_up = PackedTensor(weights.gate_up.data.bfloat16(), FORMATS["bfloat16"])
        x, ids = (t.repeat_interleave(num_tokens, 0) for t in (x.bfloat16(), routing.expert_ids))
        y = run(isa, x, Routing(ids, torch.ones(ids.shape)), replace(weights, gate_up=gate_up))
        for each in y.view(-1, num_tokens, y.shape[1]).transpose(0, 1):
            found = each.masked_fill(each.abs() < 2.0**-126, 0)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=name)


@every_tiled_isa
@pytest.mark.parametrize("name", PANELS)
def test_misaligned_weights_and_poison(isa, name):
    group = max(FORMATS[name].scaling.columns, 32)
    sizes = problems.Sizes(9, group, 2 * group, 4, 2)
    weights, x = stored_weights(name, sizes, GPT_OSS_SWIGLU), torch.randn(9, group).bfloat16()
    routing = problems.routing(sizes)
    moved = weights
    for field in ("gate_up", "down"):
        stored = getattr(weights, field)
        data, *others = (at_odd_address(t) for t in (stored.data, stored.scales, stored.zeros, stored.global_scales))
        moved = replace(moved, **{field: PackedTensor(data, stored.format, *others)})
    expected = run(isa, x, routing, weights)
    assert bit_equal(run(isa, x, routing, moved), expected)
    x[3], x[5, 0] = torch.nan, torch.inf
    y = run(isa, x, routing, weights)
    others = [0, 1, 2, 4, 6, 7, 8]
    assert bit_equal(y[others], expected[others])
    assert y[3].isnan().all() or (routing.expert_ids[3] < 0).all()


@every_tiled_isa
def test_weights_wider_than_bfloat16_are_refused(isa):
    sizes = problems.Sizes(3, 64, 64, 2, 1)
    x, routing = torch.randn(3, 64).bfloat16(), problems.routing(sizes)
    dense = stored_weights("float16", sizes, Activation())
    with pytest.raises(UnsupportedError, match="it multiplies bfloat16, and gate_up is stored as float16"):
        run(isa, x, routing, dense)
    mixed: ExpertWeights = replace(stored_weights("mxfp4", sizes, Activation()), down=dense.down)
    with pytest.raises(UnsupportedError, match="it multiplies bfloat16, and down is stored as float16"):
        run(isa, x, routing, mixed)
