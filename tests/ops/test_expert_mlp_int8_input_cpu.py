"""The native engine on int8 inputs: every instruction set that this machine has, the definition, and the same bits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moestro
from moestro import Activation, ExpertWeights, Routing, reference
from moestro.errors import UnsupportedError
from moestro.formats import FORMATS, PackedTensor
from moestro.ops import native
from moestro.types import GPT_OSS_SWIGLU
from tolerances import bit_equal

from . import problems
from .engines import ROUNDING, STRATEGIES, every_rounding_isa, needs_engine, run, stored_weights
from .rounding import INTEGER_FORMATS, assert_rounds, rounded
from .stored import apart, poison, sizes_for, widths

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXACT = Activation("relu", gated=False)
KERNELS = ["int8", "int4-g32", "int4-g128-zp", "mxfp4", "nvfp4"]  # one format for each way to decode and to scale


def check(isa, x, routing, weights, strategy="auto"):
    wide = run(isa, x.float(), routing, weights, strategy)
    assert_rounds(wide, x, routing, weights)
    assert bit_equal(run(isa, x, routing, weights, strategy), wide.to(x.dtype))
    return wide


@every_rounding_isa
@pytest.mark.parametrize("name", INTEGER_FORMATS)
def test_sizes_around_vectors_and_blocks(isa, name):
    sizes_of = widths(name, isa.lanes)
    for i, hidden in enumerate(sizes_of):
        sizes = problems.Sizes((1, 7, 2)[i % 3], hidden, sizes_of[-1 - i], 3, 2)
        weights = rounded(stored_weights(name, sizes, problems.ACTIVATIONS[i % 2], bool(i % 2)))
        x, routing = torch.randn(sizes.num_tokens, hidden).to(DTYPES[i % 3]), problems.routing(sizes, kind="full")
        whole = check(isa, x, routing, weights)
        assert bit_equal(run(isa, x.float(), routing, apart(weights)), whole)


@every_rounding_isa
@pytest.mark.parametrize("name", KERNELS)
def test_any_number_of_tokens(isa, name):
    for num_tokens, dtype in zip((0, 1, 2, 5, 97), itertools.cycle(DTYPES)):
        sizes = sizes_for(name, num_tokens=num_tokens, num_experts=5, top_k=3)
        weights = rounded(stored_weights(name, sizes, GPT_OSS_SWIGLU))
        x = torch.randn(num_tokens, sizes.hidden_size).to(dtype)
        check(isa, x, problems.routing(sizes), weights)
        check(isa, x, problems.routing(sizes, kind="skewed"), apart(weights))


@every_rounding_isa
@pytest.mark.parametrize("kind", problems.KINDS)
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_every_routing_and_strategy(isa, kind, weight_on):
    for name, strategy in itertools.product(("int8", "int4-g32-zp", "nvfp4"), STRATEGIES):
        sizes = sizes_for(name, num_tokens=12)
        weights = rounded(stored_weights(name, sizes, Activation()))
        routing = problems.routing(sizes, kind=kind, weight_on=weight_on)
        check(isa, torch.randn(12, sizes.hidden_size).bfloat16(), routing, weights, strategy)


@every_rounding_isa
@pytest.mark.parametrize("activation", problems.ACTIVATIONS, ids=lambda a: f"{a.kind}-{a.gated}-{a.interleaved}")
def test_every_activation(isa, activation):
    for name in ("int8", "mxfp4"):
        sizes = sizes_for(name)
        weights = rounded(stored_weights(name, sizes, activation))
        biases = {"gate_up_bias": weights.gate_up_bias.bfloat16(), "down_bias": weights.down_bias.half()}
        check(isa, 4 * torch.randn(9, sizes.hidden_size), problems.routing(sizes), replace(weights, **biases))


def exact(name, hidden, num_tokens, seed=0):
    """A layer whose every float32 operation is exact until the last: nothing depends on how its sums are ordered."""
    torch.manual_seed(seed)
    sizes = problems.Sizes(num_tokens, hidden, 32 * 4, 3, 2)
    weights = stored_weights(name, sizes, EXACT, bias=False)
    one = {torch.uint8: 127, torch.float8_e4m3fn: 1.0}

    def powers(stored):
        scales = torch.full(stored.scales.shape, float(one.get(stored.scales.dtype, 1.0))).to(stored.scales.dtype)
        return PackedTensor(
            stored.data, stored.format, scales, stored.zeros, None if stored.global_scales is None else torch.ones(3)
        )

    weights = replace(rounded(weights), gate_up=powers(weights.gate_up), down=powers(weights.down))
    x = torch.randint(-127, 128, (num_tokens, hidden)).float()
    x[:, 0] = 127.0  # so that a row's scale is 1
    ids = torch.rand(num_tokens, 3).argsort(1)[:, :2]
    return x, Routing(ids, torch.full(ids.shape, 0.5)), weights


@every_rounding_isa
@pytest.mark.parametrize("name", INTEGER_FORMATS)
def test_integers_are_multiplied_exactly(isa, name):
    """Scales of one and rows of integers: sums between the products are whole numbers, and so are those of integers."""
    for num_tokens in (1, 3, 9, 40):
        x, routing, weights = exact(name, 256 + 128, num_tokens)
        h = reference.product(x.double(), weights.gate_up, 0, "int8")
        assert torch.equal(2 * h, (2 * h).round())
        y, expected = run(isa, x, routing, weights), reference.expert_mlp(x, routing, weights)
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=0)


@every_rounding_isa
def test_the_largest_products(isa):
    """-128 times 127 over and over, and every code against every byte: nothing saturates."""
    everything = torch.arange(-128, 128, dtype=torch.int8)
    data = torch.stack([torch.full((512,), -128, dtype=torch.int8), everything.repeat(2), everything.flip(0).repeat(2)])
    for values in (torch.full((512,), 127.0), torch.full((512,), -127.0), torch.arange(512.0) % 255 - 127):
        x = values[None].clone()
        for rows in (data, data.flip(1)):
            gate_up = PackedTensor(rows[None], FORMATS["int8"], torch.ones(1, 3, 1))
            down = PackedTensor(torch.ones(1, 512, 3, dtype=torch.int8), FORMATS["int8"], torch.ones(1, 512, 1))
            weights = ExpertWeights(gate_up, down, activation=Activation("identity", False), input_format="int8")
            one = Routing(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))
            assert_rounds(run(isa, x, one, weights), x, one, weights)


@every_rounding_isa
def test_long_rows(isa):
    """As many columns as the engine takes, all at their largest; one more is left to torch."""
    most = native.LIMITS["most_int8_columns"]
    for columns in (most, most + 4):
        gate_up = PackedTensor(
            torch.full((1, 2, columns), -128, dtype=torch.int8), FORMATS["int8"], torch.full((1, 2, 1), 2.0**-30)
        )
        down = PackedTensor(torch.ones(1, columns, 1, dtype=torch.int8), FORMATS["int8"], torch.ones(1, columns, 1))
        weights = ExpertWeights(gate_up, down, input_format="int8")
        x, one = torch.full((1, columns), -1.0), Routing(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))
        if columns == most:
            assert_rounds(run(isa, x, one, weights)[:, :9], x[:, :9], one, replace_columns(weights, 9))
        else:
            with pytest.raises(UnsupportedError, match="131072 of a row at most"):
                run(isa, x, one, weights)


def replace_columns(weights, n):
    """The first n outputs of the layer above: its rows are all alike, so the sum is the same for fewer of them."""
    columns = weights.gate_up.shape[2]
    scale = torch.full((1, 2, 1), 2.0**-30 * columns / n)
    gate_up = PackedTensor(weights.gate_up.data[:, :, :n], FORMATS["int8"], scale)
    down = PackedTensor(weights.down.data[:, :n], FORMATS["int8"], torch.ones(1, n, 1))
    return ExpertWeights(gate_up, down, input_format="int8")


@every_rounding_isa
@pytest.mark.parametrize("name", KERNELS)
def test_rows_of_zeros_and_rows_that_are_not_finite(isa, name):
    sizes = sizes_for(name, num_tokens=20)
    weights = rounded(stored_weights(name, sizes, GPT_OSS_SWIGLU))
    x, routing = torch.randn(20, sizes.hidden_size), problems.routing(sizes, kind="full")
    x[2], x[4] = 0.0, 1e-45
    clean = check(isa, x, routing, weights)
    for weight_on in ("output", "input"):
        turned = Routing(routing.expert_ids, routing.routing_weights, weight_on)
        before = run(isa, x, turned, weights)
        bad = x.clone()
        bad[3, -1], bad[7, 0], bad[11, 5] = torch.nan, torch.inf, -torch.inf
        y = run(isa, bad, turned, weights)
        others = [t for t in range(20) if t not in (3, 7, 11)]
        assert bit_equal(y[others], before[others])
        assert y[[3, 7, 11]].isnan().all()
    # A NaN that comes into being between the products: an infinite bias of one expert.
    bias = weights.gate_up_bias.clone()
    bias[1, 0] = torch.inf
    y = run(isa, x, routing, replace(weights, gate_up_bias=bias))
    hit = (routing.expert_ids == 1).any(1)
    assert bit_equal(y[~hit], clean[~hit])
    assert y[hit].isnan().all() or weights.activation.limit is not None


@every_rounding_isa
@pytest.mark.parametrize("name", ["int8", "int4-g32-zp", "nvfp4"])
def test_a_poisoned_expert_nobody_picks_is_never_seen(isa, name):
    sizes = sizes_for(name)
    weights = rounded(problems.weights(sizes, GPT_OSS_SWIGLU, torch.float32, bias=True).quantize(name))
    ids = torch.tensor([[0, 1], [1, 3], [3, -1]]).repeat(3, 1)
    routing = Routing(ids, torch.rand(9, 2).masked_fill(ids < 0, torch.nan))
    x = torch.randn(9, sizes.hidden_size)
    clean = run(isa, x, routing, weights)
    poison(weights.gate_up, 2)
    poison(weights.down, 2)
    for strategy in STRATEGIES:
        assert bit_equal(run(isa, x, routing, weights, strategy), clean)
    assert run(isa, x, routing.with_ids(ids.masked_fill(ids == 0, 2)), weights).isnan().any()


@every_rounding_isa
def test_forty_thousand_tokens(isa):
    sizes = problems.Sizes(40_000, 32, 32, 3, 2)
    weights = rounded(stored_weights("int4-g32", sizes, EXACT, bias=False))
    x, routing = torch.randn(40_000, 32), problems.routing(sizes)
    whole = run(isa, x, routing, weights)
    for rows in (slice(0, 30), slice(20_000, 20_001), slice(39_990, 40_000)):
        some = Routing(routing.expert_ids[rows], routing.routing_weights[rows])
        assert_rounds(whole[rows], x[rows], some, weights)
        assert bit_equal(run(isa, x[rows], some, weights), whole[rows])


TOKENS = 33
THREADS = (1, 2, 3, 5)


def some(routing, rows):
    return Routing(routing.expert_ids[rows], routing.routing_weights[rows], routing.weight_on)


def layer(name, num_tokens=TOKENS):
    hidden, inner = (640, 384) if FORMATS[name].per_item > 1 else (250, 203)
    sizes = problems.Sizes(num_tokens, hidden, inner, 6, 3)
    return sizes, rounded(stored_weights(name, sizes, GPT_OSS_SWIGLU)), torch.randn(num_tokens, hidden)


@every_rounding_isa
@pytest.mark.parametrize("name", KERNELS)
def test_the_same_bits_alone_in_any_batch_and_permuted(isa, name):
    sizes, weights, x = layer(name)
    routing = problems.routing(sizes, kind="duplicates")
    whole = run(isa, x, routing, weights)
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 13):
        few = slice(5, 5 + size)
        assert bit_equal(run(isa, x[few], some(routing, few), weights), whole[few]), size
    order = torch.randperm(TOKENS)
    assert bit_equal(run(isa, x[order], some(routing, order), weights), whole[order])
    for strategy, num_threads in (("grouped", 2), ("blockwise-5", 3), ("all_experts", 5), ("selective", 1)):
        torch.set_num_threads(num_threads)
        assert bit_equal(run(isa, x, routing, weights, strategy), whole), (strategy, num_threads)
        assert bit_equal(run(isa, x[:1], some(routing, slice(0, 1)), weights), whole[:1]), num_threads


@given(
    isa=st.sampled_from(ROUNDING or [None]),
    name=st.sampled_from(INTEGER_FORMATS),
    kind=st.sampled_from(problems.KINDS),
    weight_on=st.sampled_from(("output", "input")),
    strategies=st.tuples(st.sampled_from(STRATEGIES), st.sampled_from(STRATEGIES)),
    num_threads=st.sampled_from(THREADS),
    rows=st.lists(st.integers(0, 39), min_size=1, max_size=40),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60)
@pytest.mark.skipif(not ROUNDING, reason="no engine")
def test_any_choice_of_rows(isa, name, kind, weight_on, strategies, num_threads, rows, seed):
    sizes, weights, x = layer(name, num_tokens=40)
    torch.manual_seed(seed)
    routing, x = problems.routing(sizes, kind=kind, weight_on=weight_on), torch.randn(x.shape)
    torch.set_num_threads(1)
    whole = run(isa, x, routing, weights, strategies[0])
    torch.set_num_threads(num_threads)
    picked = torch.tensor(rows)
    assert bit_equal(run(isa, x[picked], some(routing, picked), weights, strategies[1]), whole[picked])


@given(
    isa=st.sampled_from(ROUNDING or [None]),
    sizes=problems.sizes(),
    activation=st.sampled_from(problems.ACTIVATIONS),
    kind=st.sampled_from(problems.KINDS),
    bias=st.booleans(),
    strategy=st.sampled_from(STRATEGIES),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=100)
@pytest.mark.skipif(not ROUNDING, reason="no engine")
def test_any_layer_meets_the_definition(isa, sizes, activation, kind, bias, strategy, seed):
    torch.manual_seed(seed)
    weights = rounded(problems.weights(sizes, activation, torch.float32, bias=bias).quantize("int8"))
    check(isa, torch.randn(sizes.num_tokens, sizes.hidden_size), problems.routing(sizes, kind=kind), weights, strategy)


@needs_engine
def test_what_runs_and_why():
    sizes = sizes_for("mxfp4")
    weights, routing = stored_weights("mxfp4", sizes, Activation()), problems.routing(sizes)
    x = torch.randn(9, sizes.hidden_size)
    plain, integers = (moestro.explain(moestro.expert_mlp, x, routing, w) for w in (weights, rounded(weights)))
    if ROUNDING[0].name == "amx-int8":
        reasons = {c.name: c.reason for c in plain.candidates}
        assert "int8 inputs only" in str(reasons["cpu-amx-int8"])
    assert integers.chosen == f"cpu-{ROUNDING[0].name}"
    assert plain.chosen != "cpu-amx-int8"
    for isa in native.ISAS:
        if isa.runs_here and not isa.multiplies_int8:
            with pytest.raises(UnsupportedError, match="inputs of floats only"):
                run(isa, x, routing, rounded(weights))
