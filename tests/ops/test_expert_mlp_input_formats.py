"""Int8 inputs: what the definition says, plain torch against it, and what has no such rows."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import moestro
from moestro import Activation, Experts, ExpertWeights, Routing, reference
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.formats import dequantize, integers
from moestro.types import GPT_OSS_SWIGLU
from tolerances import bit_equal

from . import problems
from .engines import STRATEGIES, stored_weights
from .rounding import INTEGER_FORMATS, assert_rounds, rounded
from .stored import apart, sizes_for

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = ("grouped", "selective", "blockwise-5", "all_experts")


def layer(name, activation=GPT_OSS_SWIGLU, **sizes):
    sizes = sizes_for(name, **sizes)
    return torch.randn(sizes.num_tokens, sizes.hidden_size), sizes, rounded(stored_weights(name, sizes, activation))


def plain(x, routing, weights, strategy="auto"):
    with moestro.use(implementation="torch"), torch.no_grad():
        return moestro.expert_mlp(x, routing, weights, strategy)


def test_rows_are_rounded_to_the_nearest_of_255_integers():
    x = torch.cat([torch.randn(50, 37) * 10.0 ** torch.randint(-30, 30, (50, 1)), torch.zeros(1, 37)])
    x[0, :5] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5])  # ties to even where the scale is 1
    x[0, 5:] = 0.0
    q, s = reference.round_rows(x)
    assert q[0, :5].tolist() == [127, 0, 2, 2, 0]
    for row, integer_row, scale in zip(x, q, s[:, 0], strict=True):
        largest = float(row.abs().max())
        assert float(scale) == float(torch.tensor(largest) / 127)
        if largest == 0:
            assert not integer_row.any()
            continue
        for value, integer in zip(row.tolist(), integer_row.tolist(), strict=True):
            assert integer == int(integer)
            assert abs(integer) <= 127
            assert abs(Fraction(value) / Fraction(float(scale)) - int(integer)) <= Fraction(1, 2) + Fraction(1, 10**4)
    assert (q.abs().amax(1)[:-1] == 127).all()


def test_rows_that_are_not_finite_or_next_to_nothing():
    x = torch.ones(6, 4)
    x[0, 1], x[1, 2], x[2, 3] = torch.nan, torch.inf, -torch.inf
    x[3], x[4] = 1e-45, 2e-43  # a scale that is zero, and one with a single bit
    q, s = reference.round_rows(x)
    assert s[:3].isnan().all()
    assert not q[:3].any()
    assert float(s[3]) == 0.0
    assert not q[3].any()
    assert (q[4].abs() <= 127).all()
    assert float(s[4]) > 0
    assert reference.round_rows(torch.zeros(2, 0))[1].shape == (2, 1)


@pytest.mark.parametrize("name", INTEGER_FORMATS)
def test_integers_times_steps_are_the_weights(name):
    sizes = sizes_for(name)
    for stored in (stored_weights(name, sizes, Activation()).gate_up, stored_weights(name, sizes, Activation()).down):
        for e in range(2):
            values, steps = integers(stored[e])
            assert torch.equal(values, values.round())
            assert float(values.abs().max()) <= 128
            wide = steps.repeat_interleave(values.shape[1] // steps.shape[1], 1)
            assert torch.equal(values * wide, dequantize(stored[e]))


@pytest.mark.parametrize("name", INTEGER_FORMATS)
def test_the_definition_by_rationals(name):
    x, _, weights = layer(name)
    q, s = reference.round_rows(x[:2])
    values, steps = integers(weights.gate_up[1])
    size = values.shape[1] // steps.shape[1]
    found = reference.product(x[:2].double(), weights.gate_up, 1, "int8")
    for t, n in itertools.product(range(2), range(0, values.shape[0], 7)):
        exact = sum(
            Fraction(float(steps[n, k // size])) * int(values[n, k]) * int(q[t, k]) for k in range(values.shape[1])
        )
        exact *= Fraction(float(s[t, 0]))
        assert abs(float(found[t, n]) - float(exact)) <= 1e-13 * float(steps[n].abs().max() * s[t, 0]) * 127 * 128


@pytest.mark.parametrize("name", INTEGER_FORMATS)
def test_plain_torch_meets_the_definition(name):
    kinds = itertools.cycle(problems.KINDS)
    for strategy, dtype, weight_on in itertools.product(PLAIN, DTYPES, ("output", "input")):
        x, sizes, weights = layer(name, problems.ACTIVATIONS[len(strategy) % 4])
        routing = problems.routing(sizes, kind=next(kinds), weight_on=weight_on)
        x = x.to(dtype)
        wide = plain(x.float(), routing, weights, strategy)
        assert_rounds(wide, x, routing, weights)
        assert bit_equal(plain(x, routing, weights, strategy), wide.to(dtype))
        if strategy in ("grouped", "all_experts"):
            assert_rounds(plain(x.float(), routing, apart(weights), strategy), x, routing, weights)


def test_sums_longer_than_float32_holds_exactly():
    """Every product is the largest: 4,096 of them need 26 bits, of which float32 would keep 24."""
    ones = torch.ones(1, 3, 4096), torch.ones(1, 4096, 3)
    data = ExpertWeights.from_dense(*ones, activation=Activation("relu", False)).quantize("int8", input_format="int8")
    data.gate_up.data[0, 0, 1::2] = -126
    x, routing = torch.ones(1, 4096), Routing(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))
    h = reference.product(x.double(), data.gate_up, 0, "int8")
    assert h[0, 0] * 127 * 127 == pytest.approx(2048 * 127, rel=1e-6)
    assert_rounds(plain(x, routing, data), x, routing, data)


@pytest.mark.parametrize("strategy", PLAIN)
def test_one_row_that_is_not_finite_leaves_the_others_alone(strategy):
    x, sizes, weights = layer("int4-g32")
    routing = problems.routing(sizes, kind="full")
    clean = plain(x, routing, weights, strategy)
    x[3, 1], x[5, 0] = torch.nan, torch.inf
    y = plain(x, routing, weights, strategy)
    others = [t for t in range(len(x)) if t not in (3, 5)]
    assert torch.equal(y[others], clean[others])
    assert y[[3, 5]].isnan().all()


def test_the_error_is_that_of_eight_bits():
    """Rounding a row's values to 255 steps: their error is near 1/127/sqrt(12) of the largest."""
    sizes = problems.Sizes(20, 256, 256, 4, 2)
    for name in ("int8", "int4-g32", "mxfp4"):
        exact = stored_weights(name, sizes, Activation())
        x, routing = torch.randn(20, 256), problems.routing(sizes, kind="full")
        y, expected = reference.expert_mlp(x, routing, rounded(exact)), reference.expert_mlp(x, routing, exact)
        error = float((y - expected).norm() / expected.norm())
        assert 0.003 < error < 0.02, (name, error)


@pytest.mark.parametrize("name", ["bfloat16", "fp8-e4m3-b128", "float64"])
def test_weights_that_are_no_integers_are_refused(name):
    sizes = problems.Sizes(2, 8, 8, 2, 1)
    weights = problems.weights(sizes, Activation(), torch.float64)
    for make in (
        lambda: weights.quantize(name, input_format="int8"),
        lambda: replace(weights.quantize(name), input_format="int8"),
        lambda: Experts.from_weights(weights).quantize(name, input_format="int8"),
        lambda: weights.quantize("int8", input_format="int8").quantize(name),
    ):
        with pytest.raises(UnsupportedError, match="weights that are integers"):
            make()
    with pytest.raises(InvalidInputError, match="one of float, int8, fp8-e4m3"):
        replace(weights, input_format="int4")


def test_the_input_format_stays_with_the_weights():
    x, sizes, weights = layer("mxfp4")
    assert weights.quantize("int8").input_format == "int8"
    assert weights.quantize("bfloat16", input_format="float").input_format == "float"
    assert replace(weights, gate_up_bias=None).input_format == apart(weights).input_format == "int8"
    leaves, spec = pytree.tree_flatten(weights)
    assert pytree.tree_unflatten(leaves, spec).input_format == "int8"
    routing = problems.routing(sizes)
    expected = plain(x, routing, weights)
    for stored in (weights, apart(weights)):
        experts = Experts.from_weights(stored)
        for module in (experts, copy.deepcopy(experts), experts.quantize("mxfp4")):
            assert module.weights.input_format == "int8"
            with moestro.use(implementation="torch"), torch.no_grad():
                torch.testing.assert_close(module(x, routing), expected)
    assert "input_format='int8'" in repr(experts)
    assert experts.quantize("mxfp4", input_format="float").weights.input_format == "float"
    assert "input format int8" in str(moestro.explain(moestro.expert_mlp, x, routing, weights))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch imports for forward-mode differentiation
def test_no_gradient_is_given_and_none_is_zero_in_silence():
    x, sizes, weights = layer("int8")
    routing = problems.routing(sizes, kind="full")
    trained = Routing(routing.expert_ids, routing.routing_weights.clone().requires_grad_())
    still = Routing(routing.expert_ids, routing.routing_weights.detach())
    biased = replace(weights, down_bias=weights.down_bias.clone().requires_grad_())
    for implementation in ("torch", "reference"):
        with moestro.use(implementation=implementation):
            for case in (
                (x.clone().requires_grad_(), still, weights),
                (x, trained, weights),
                (x, still, biased),
            ):
                with pytest.raises(UnsupportedError, match=r"torch\.no_grad"):
                    moestro.expert_mlp(*case)
                with torch.no_grad():
                    assert not moestro.expert_mlp(*case).requires_grad
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x, torch.ones_like(x))
                with pytest.raises(UnsupportedError, match=r"torch\.no_grad"):
                    moestro.expert_mlp(dual, still, weights)
            with pytest.raises(UnsupportedError, match=r"torch\.no_grad"):
                torch.func.grad(lambda rows: moestro.expert_mlp(rows, still, weights).sum())(x)
    with pytest.raises(UnsupportedError, match=r"torch\.no_grad"):
        moestro.expert_mlp(x.clone().requires_grad_(), still, weights)


def test_in_a_graph():
    x, sizes, weights = layer("int4-g32-zp")
    for stored in (weights, apart(weights)):
        experts, routing = Experts.from_weights(stored), problems.routing(sizes)
        experts.requires_grad_(False)
        expected = moestro.expert_mlp(x, routing, weights)
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert bit_equal(compiled(x, routing), experts(x, routing))
        torch.testing.assert_close(compiled(x, routing), expected)
        program = torch.export.export(experts, (x, routing))
        torch.testing.assert_close(program.module()(x, routing), expected)
        with pytest.raises(Exception, match="int8 inputs, and a tensor that requires a gradient"):
            compiled(x.clone().requires_grad_(), routing)


def test_every_strategy_has_a_name_here():
    assert {name.partition("-")[0] for name in STRATEGIES} == {name.partition("-")[0] for name in PLAIN}
