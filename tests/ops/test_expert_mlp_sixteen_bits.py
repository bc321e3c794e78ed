"""Rows of 16 bits that meet integer weights as integers, pairs of 8 bits or 16: how close, and when not."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import moestro
from moestro import Activation, ExpertWeights, Routing, reference
from moestro.formats import FORMATS
from moestro.ops import native
from moestro.tolerances import relative_error
from moestro.types import GPT_OSS_SWIGLU
from tolerances import bit_equal

from . import problems
from .engines import run, stored_weights, takes_integers
from .stored import PACKED, widths

INTEGER = [isa for isa in native.ISAS if isa.runs_here and (isa.multiplies_int8_residual or isa.multiplies_int16)]
WHOLE = [name for name in PACKED if FORMATS[name].element in ("int8", "e2m1", "int4", "uint4")]

every_integer_isa = pytest.mark.parametrize("isa", INTEGER, ids=lambda isa: isa.name)


@pytest.fixture(autouse=True)
def default_mode(poisoned_memory):
    torch.use_deterministic_algorithms(False)


def layer(name, activation=GPT_OSS_SWIGLU, groups=(11, 7)):
    """Rows, a routing with one or two rows an expert, and experts; widths off every block."""
    group = max(FORMATS[name].scaling.columns, 32)
    sizes = problems.Sizes(8, groups[0] * group, groups[1] * group, 12, 2)
    ids = torch.stack([torch.arange(8) % 6, 6 + torch.arange(8) % 6], dim=1)
    return torch.randn(8, sizes.hidden_size), Routing(ids, torch.rand(8, 2)), stored_weights(name, sizes, activation)


def error(y, x, routing, weights):
    """Relative L2 error, over the one that rounding the definition's own result to this dtype has."""
    expected = reference.expert_mlp(x.double(), routing, weights)
    found, least = ((t.double() - expected).norm() for t in (y, expected.to(y.dtype)))
    return float(found / least)


@every_integer_isa
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1.01), (torch.float16, 1.15)], ids=str)
def test_far_closer_than_the_dtype(isa, name, dtype, most):
    if isa.multiplies_bfloat16 and dtype != torch.bfloat16:
        pytest.skip("it multiplies bfloat16")
    x, routing, weights = layer(name)
    x = x.to(dtype)
    assert takes_integers(isa, x, weights)
    assert error(run(isa, x, routing, weights), x, routing, weights) < most


@every_integer_isa
@pytest.mark.parametrize("name", WHOLE)
def test_sizes_around_vectors_and_blocks(isa, name):
    sizes_of = widths(name, isa.lanes)
    for i, hidden in enumerate(sizes_of):
        sizes = problems.Sizes((1, 2)[i % 2], hidden, sizes_of[-1 - i], 3, 2)
        weights = stored_weights(name, sizes, problems.ACTIVATIONS[i % 2], bool(i % 2))
        x, routing = torch.randn(sizes.num_tokens, hidden).bfloat16(), problems.routing(sizes, kind="full")
        assert error(run(isa, x, routing, weights), x, routing, weights) < 1.02


@every_integer_isa
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("num_tokens", [4, 5, 7, 11])
def test_tokens_among_which_steps_do_not_divide_evenly(isa, name, num_tokens):
    sizes = problems.Sizes(num_tokens, 256, 512, 2, 1)
    weights, x = stored_weights(name, sizes, GPT_OSS_SWIGLU), torch.randn(num_tokens, 256).bfloat16()
    routing = Routing(torch.ones(num_tokens, 1, dtype=torch.long), torch.rand(num_tokens, 1))
    assert error(run(isa, x, routing, weights), x, routing, weights) < 1.02


@every_integer_isa
@pytest.mark.parametrize("name", [name for name in WHOLE if name != "int8"])
@pytest.mark.parametrize("byte", [0x77, 0x88, 0xFF])
def test_sums_of_the_largest_codes_and_numbers(isa, name, byte):
    """Every code the same, 6, -6, 7, -8 or 15 say, and rows whose lower bytes are 127, -127 and -128."""
    _, _, weights = layer(name, Activation("relu", gated=False))
    full = {
        p: replace(w, data=torch.full_like(w.data, byte)) for p, w in vars(weights).items() if p in ("gate_up", "down")
    }
    weights = replace(weights, **full)
    x = torch.full((4, weights.hidden_size), 1.0)
    x[1] = -1
    x[2:] *= 127 / 128
    x[2:, 3::32] = 1
    x[3] *= -1
    routing = Routing(torch.arange(4)[:, None], torch.ones(4, 1))
    x = x.bfloat16()
    assert takes_integers(isa, x, weights)
    y = run(isa, x, routing, weights)
    for t in range(4):
        alone = Routing(routing.expert_ids[t : t + 1], routing.routing_weights[t : t + 1])
        assert error(y[t : t + 1], x[t : t + 1], alone, weights) < 1.02


@every_integer_isa
@pytest.mark.parametrize("name", ["int8", "mxfp4", "nvfp4"])
def test_one_column_far_above_the_others(isa, name):
    x, routing, weights = layer(name, Activation("silu"))
    x[:, 5] *= 1000
    assert error(run(isa, x.bfloat16(), routing, weights), x.bfloat16(), routing, weights) < 1.05


def floats(x, routing, weights):
    """By a set that multiplies floats only."""
    plain = [other for other in native.ISAS if other.runs_here and other.multiplies_floats and other not in INTEGER]
    return run(plain[0], x, routing, weights)


@every_integer_isa
@pytest.mark.parametrize("name", ["int8", "mxfp4", "int4-g32-zp"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e-39, 1e-37])
def test_a_row_that_stays_floats(isa, name, value):
    """Its output is that of a row of floats, and the others have the bits that they have without it."""
    x, routing, weights = layer(name)
    x, routing = x[:6].bfloat16(), Routing(routing.expert_ids[:6], routing.routing_weights[:6])  # one row an expert
    x[3] = 0
    others = [0, 1, 2, 4, 5]
    without = run(isa, x, routing, weights)[others]
    x[3, 7] = value
    y = run(isa, x, routing, weights)
    expected = floats(x, routing, weights)[3]
    assert torch.equal(y[3].isnan(), expected.isnan())
    assert torch.equal(y[3].isinf(), expected.isinf())
    assert not bool(expected.isfinite().any()) or relative_error(y[3], expected) < 0.004
    assert bit_equal(y[others], without)
    unused = Routing(routing.expert_ids.masked_fill(torch.arange(6)[:, None] == 3, -1), routing.routing_weights)
    assert bit_equal(run(isa, x, unused, weights)[others], without)


@every_integer_isa
@pytest.mark.parametrize("name", ["int8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("size", [100.0, 160.0, 1e3, 1e5])
def test_columns_far_above_the_others_that_weights_leave_out(isa, name, size):
    """All of the output is of values that a scale for the largest would leave few bits: such rows stay floats."""
    weight = torch.randn(2, 256, 512) / 20
    weight[:, :, [5, 77]] = 0
    weights = ExpertWeights.from_dense(weight, torch.randn(2, 512, 128) / 10, activation=Activation("silu")).quantize(
        name
    )
    x = torch.randn(4, 512)
    x[:, 5], x[:, 77] = size, -0.3 * size
    routing = Routing(torch.tensor([[0], [1], [-1], [0]]), torch.ones(4, 1))
    x = x.bfloat16()
    assert error(run(isa, x, routing, weights), x, routing, weights) < 1.7


@every_integer_isa
@pytest.mark.parametrize("size", [1e5, torch.inf])
def test_between_the_projections_too(isa, size):
    """A column of h far above the others, whose weights in down are zero but for one output."""
    up, down = torch.randn(1, 128, 64) / 8, torch.randn(1, 64, 128) / 8
    up[0, 9] = 1e19 if size == torch.inf else size
    down[0, :, 9] = 0
    down[0, 3, 9] = 1
    relu2 = Activation("relu2" if size == torch.inf else "relu", gated=False)
    weights = ExpertWeights.from_dense(up, down, activation=relu2).quantize("int8")
    x = (torch.rand(2, 64) + 0.1).bfloat16() * (1e10 if size == torch.inf else 1)
    routing = Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    y, expected = run(isa, x, routing, weights), floats(x, routing, weights)
    assert torch.equal(y.isfinite(), expected.isfinite())
    assert torch.equal(y.isnan(), expected.isnan())
    kept = expected.isfinite()
    kept[:, 3] = False
    assert relative_error(y[kept], expected[kept]) < 0.004 if bool(kept.any()) else size == torch.inf


@every_integer_isa
@pytest.mark.parametrize("name", WHOLE)
def test_rows_of_zeros(isa, name):
    _, routing, weights = layer(name)
    x = torch.zeros(8, weights.hidden_size, dtype=torch.bfloat16)
    assert error(run(isa, x, routing, weights), x, routing, weights) < 1.01


@every_integer_isa
def test_not_where_bits_are_to_be_the_same(isa):
    x, routing, weights = layer("mxfp4")
    x = x.bfloat16()
    default = run(isa, x, routing, weights)
    torch.use_deterministic_algorithms(True)
    exact = run(isa, x, routing, weights)
    assert not takes_integers(isa, x, weights)
    with moestro.use(implementation=f"cpu-{isa.name}"):
        kernel = "int8 residual dots" if isa.multiplies_int8_residual else "int16 dots"
        assert kernel not in str(moestro.explain(moestro.expert_mlp, x, routing, weights))
        torch.use_deterministic_algorithms(False)
        assert kernel in str(moestro.explain(moestro.expert_mlp, x, routing, weights))
    assert error(exact, x, routing, weights) < (2 if isa.multiplies_bfloat16 else 1.00001)
    assert not bit_equal(default, exact)


@every_integer_isa
@pytest.mark.parametrize("name", ["int8", "mxfp4", "int4-g32", "int4-g128", "int4-g32-zp", "fp4-g32", "nvfp4"])
@pytest.mark.parametrize("groups", [(11, 7), (17, 16)], ids=["two shared blocks", "one, and none"])
def test_any_number_of_rows(isa, name, groups):
    """One row to more than are multiplied at once, on one expert: without tiles its bits do not depend on how many."""
    x, _, weights = layer(name, groups=groups)
    row = x[:1].bfloat16()
    alone = run(isa, row, Routing(torch.tensor([[4]]), torch.ones(1, 1)), weights).float()
    for n in (2, 3, 4, 5, 8, 9, 97, 200):
        many = Routing(torch.full((n, 1), 4), torch.ones(n, 1))
        y = run(isa, row.expand(n, -1), many, weights).float()
        if isa.multiplies_bfloat16:
            assert bool(((y - alone).norm(dim=1) < 0.01 * alone.norm()).all())
        else:
            assert bit_equal(y, alone.expand(n, -1))


@every_integer_isa
@pytest.mark.parametrize(("name", "nan"), [("mxfp4", 255), ("int4-g32", torch.nan)])
@pytest.mark.parametrize("columns", [32, 96, 160, 224, 288, 480])
def test_scales_behind_the_last_row_are_not_read(isa, columns, name, nan):
    """Those of the next expert are NaN there, which no product with zero would hide."""
    sizes = problems.Sizes(1, columns, columns, 2, 1)
    weights = copy.deepcopy(stored_weights(name, sizes, Activation()))
    for stored in (weights.gate_up, weights.down):
        stored.scales[1] = nan
    x, routing = torch.randn(1, columns).bfloat16(), Routing(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))
    for input_format in ("float", "int8") if isa.multiplies_int8 else ("float",):
        y = run(isa, x, routing, replace(weights, input_format=input_format))
        assert y.isfinite().all(), input_format
