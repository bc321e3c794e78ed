"""Every implementation and strategy of the primitive against the reference."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moestro
from moestro import Activation, ExpertWeights, Routing, reference
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.formats import PackedTensor, WeightFormat
from moestro.ops import dispatch, expert_mlp
from moestro.ops.expert_mlp import matmul as mm
from moestro.ops.expert_mlp import plain, tuning
from moestro.ops.native import ISAS
from moestro.types import GPT_OSS_SWIGLU
from tolerances import assert_close, bit_equal

from . import problems

pytestmark = pytest.mark.usefixtures("plain_torch")

STRATEGIES = ("grouped", "selective", "all_experts", "blockwise-1", "blockwise-4", "blockwise-16")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check(x, routing, weights, strategy):
    y = moestro.expert_mlp(x, routing, weights, strategy)
    assert y.dtype == x.dtype
    assert_close(y, reference.expert_mlp(x, routing, weights), x.dtype)


@given(
    sizes=problems.sizes(),
    activation=st.sampled_from(problems.ACTIVATIONS),
    kind=st.sampled_from(problems.KINDS),
    bias=st.booleans(),
    transposed=st.booleans(),
    weight_on=st.sampled_from(("output", "input")),
    strategy=st.sampled_from(STRATEGIES),
    seed=st.integers(0, 2**16),
)
def test_strategies_meet_the_reference_float32(sizes, activation, kind, bias, transposed, weight_on, strategy, seed):
    torch.manual_seed(seed)
    weights = problems.weights(sizes, activation, torch.float32, bias=bias, transposed=transposed)
    routing = problems.routing(sizes, kind=kind, weight_on=weight_on)
    check(torch.randn(sizes.num_tokens, sizes.hidden_size), routing, weights, strategy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("activation", [problems.ACTIVATIONS[0], problems.ACTIVATIONS[-1]], ids=["swiglu", "gpt-oss"])
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 150])
def test_every_dtype(dtype, strategy, activation, num_tokens):
    torch.manual_seed(num_tokens)
    sizes = problems.Sizes(num_tokens, 72, 40, 5, 3)
    weights = problems.weights(sizes, activation, dtype, bias=True)
    check(torch.randn(num_tokens, 72).to(dtype), problems.routing(sizes), weights, strategy)


RUNNING = {f"cpu-{isa.name}" for isa in ISAS if isa.runs_here and isa.multiplies_floats}

BFLOAT16 = {f"cpu-{isa.name}" for isa in ISAS if isa.multiplies_bfloat16}

# those of Triton are interpreted, and have tests of their own at smaller sizes
IMPLEMENTATIONS = [i.name for i in expert_mlp.EXPERT_MLP.implementations if i.name != "triton"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", problems.KINDS)
def test_every_implementation_meets_the_reference(implementation, dtype, kind):
    if implementation.startswith("cpu-") and (dtype == torch.float64 or implementation not in RUNNING):
        pytest.skip("the engine computes in float32, on processors that have what it needs")
    if implementation in BFLOAT16 and dtype != torch.bfloat16:
        pytest.skip("it multiplies bfloat16")
    torch.manual_seed(0)
    for num_tokens, weight_on in itertools.product((0, 1, 7, 130), ("output", "input")):
        sizes = problems.Sizes(num_tokens, 72, 40, 5, 3)
        weights = problems.weights(sizes, GPT_OSS_SWIGLU, dtype, bias=True)
        routing = problems.routing(sizes, kind=kind, weight_on=weight_on)
        with moestro.use(implementation=implementation):
            check(torch.randn(num_tokens, 72).to(dtype), routing, weights, "auto")


@pytest.mark.parametrize("strategy", ["grouped", "selective", "blockwise-16"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [Activation(), GPT_OSS_SWIGLU], ids=["swiglu", "gpt-oss"])
def test_large_experts_go_every_way(monkeypatch, strategy, dtype, activation):
    """As if no expert were small: every way of multiplying that real sizes take, inside the walks."""
    monkeypatch.setattr(tuning, "SMALL_BYTES", 0)
    torch.manual_seed(0)
    seen = set()
    for module in (plain, tuning):
        choose = tuning.choose_way
        monkeypatch.setattr(module, "choose_way", lambda *a, c=choose: seen.add(c(*a)) or c(*a), raising=False)
    for num_tokens, native in itertools.product((1, 3, 12, 90, 400), (True, False)):
        monkeypatch.setattr(tuning, "multiplies_bfloat16", lambda native=native: native)
        sizes = problems.Sizes(num_tokens, 72, 40, 3, 2)
        weights = problems.weights(sizes, activation, dtype, bias=True)
        check(torch.randn(num_tokens, 72).to(dtype), problems.routing(sizes), weights, strategy)
    if strategy != "blockwise-16":
        expected = {
            torch.float32: {mm.Way.ROWS, mm.Way.COLUMNS},
            torch.float64: {mm.Way.ROWS},
            torch.float16: {mm.Way.WIDEN, mm.Way.WIDEN_COLUMNS},
            torch.bfloat16: set(mm.Way),
        }
        assert seen == expected[dtype]


def test_int32_ids():
    torch.manual_seed(0)
    sizes = problems.Sizes(9, 8, 6, 4, 2)
    weights, routing = problems.weights(sizes, Activation(), torch.float32), problems.routing(sizes)
    short = Routing(routing.expert_ids.int(), routing.routing_weights)
    for strategy in STRATEGIES:
        check(torch.randn(9, 8), short, weights, strategy)


def test_autocast_does_not_change_the_dtypes_asked_for():
    torch.manual_seed(0)
    sizes = problems.Sizes(9, 8, 6, 4, 2)
    weights, routing, x = (
        problems.weights(sizes, Activation(), torch.float32),
        problems.routing(sizes),
        torch.randn(9, 8),
    )
    for strategy in STRATEGIES:
        expected = moestro.expert_mlp(x, routing, weights, strategy)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert bit_equal(moestro.expert_mlp(x, routing, weights, strategy), expected)


def test_stored_codes_are_never_taken_for_numbers():
    codes = WeightFormat("int8-test", "int8-test", 8, torch.uint8)
    gate_up = PackedTensor(torch.zeros(2, 8, 4, dtype=torch.uint8), codes)
    weights = ExpertWeights(gate_up, PackedTensor(torch.zeros(2, 4, 4, dtype=torch.uint8), codes))
    routing = Routing(torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1))
    with pytest.raises(UnsupportedError, match="int8-test"):
        moestro.expert_mlp(torch.zeros(3, 4), routing, weights)


def test_what_is_asked_for_is_honoured_even_for_nothing():
    weights = problems.weights(problems.Sizes(0, 6, 4, 3, 2), Activation(), torch.float32)
    routing = Routing(torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    with pytest.raises(InvalidInputError, match="strategy='fast'"):
        moestro.expert_mlp(torch.zeros(0, 6), routing, weights, "fast")
    with moestro.use(implementation="warp"), pytest.raises(UnsupportedError, match="warp"):
        moestro.expert_mlp(torch.zeros(0, 6), routing, weights)


def test_routing_weights_are_not_rounded():
    """Weights that bfloat16 cannot hold, on rows that cancel all but their difference."""
    down = torch.tensor([1.0, -1.0]).reshape(2, 1, 1).bfloat16()
    weights = ExpertWeights.from_dense(torch.ones(2, 1, 1).bfloat16(), down, activation=Activation("relu", gated=False))
    routing = Routing(torch.tensor([[0, 1]]), torch.tensor([[1.0 + 2**-12, 1.0]]))
    for strategy in STRATEGIES:
        y = moestro.expert_mlp(torch.ones(1, 1).bfloat16(), routing, weights, strategy)
        assert y.item() == 2**-12


def test_rows_beyond_the_buffer_are_added_at_once(monkeypatch):
    """Past a size the sums are accumulated batch by batch; the result is the same."""
    torch.manual_seed(0)
    monkeypatch.setattr(plain, "ACCUMULATE_BYTES", 0)
    for dtype, weight_on, kind in itertools.product(DTYPES, ("output", "input"), problems.KINDS):
        sizes = problems.Sizes(60, 24, 20, 4, 2)
        weights = problems.weights(sizes, Activation(), dtype, bias=True)
        routing = problems.routing(sizes, kind=kind, weight_on=weight_on)
        check(torch.randn(60, 24).to(dtype), routing, weights, "grouped")


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 4), (7, 1), (64, 8)])
@pytest.mark.parametrize("kind", problems.KINDS)
def test_extreme_numbers_of_experts(num_experts, top_k, kind):
    torch.manual_seed(0)
    sizes = problems.Sizes(11, 12, 10, num_experts, top_k)
    weights, routing = problems.weights(sizes, Activation(), torch.float32), problems.routing(sizes, kind=kind)
    x = torch.randn(11, 12)
    for strategy in STRATEGIES:
        check(x, routing, weights, strategy)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (0, 0), (3, 0)])
def test_nothing_to_do(strategy, num_tokens, top_k):
    weights = problems.weights(problems.Sizes(0, 6, 4, 3, 2), Activation(), torch.float32)
    routing = Routing(torch.zeros(num_tokens, top_k, dtype=torch.long), torch.zeros(num_tokens, top_k))
    y = moestro.expert_mlp(torch.randn(num_tokens, 6), routing, weights, strategy)
    assert torch.equal(y, torch.zeros(num_tokens, 6))


def test_forty_thousand_tokens():
    torch.manual_seed(0)
    sizes = problems.Sizes(40_000, 8, 4, 16, 2)
    weights, routing = problems.weights(sizes, Activation(), torch.float32), problems.routing(sizes)
    x = torch.randn(40_000, 8)
    expected = moestro.expert_mlp(x, routing, weights, "all_experts")
    for strategy in ("auto", "grouped", "selective", "blockwise-64"):
        assert_close(moestro.expert_mlp(x, routing, weights, strategy), expected)
    assert_close(expected[-50:], reference.expert_mlp(x, routing, weights)[-50:])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float16_keeps_what_overflows_between_the_matmuls(strategy):
    """gate * up reaches 1e6 here, far beyond float16, and the output is back in range."""
    gate_up, down = torch.full((1, 8, 4), 125.0), torch.full((1, 4, 4), 2.0**-10)
    weights = ExpertWeights.from_dense(gate_up.half(), down.half())
    routing = Routing(torch.zeros(2, 1, dtype=torch.long), torch.tensor([[0.5], [1.0]]))
    x = torch.full((2, 4), 2.0).half()
    y = moestro.expert_mlp(x, routing, weights, strategy)
    assert torch.isfinite(y).all()
    check(x, routing, weights, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_slots_that_cancel_beyond_half_precision(strategy):
    """Two slots of +-60000 and one of 1 sum to 1: the sum over slots must not be taken in float16."""
    down = torch.tensor([60000.0, -60000.0, 1.0]).reshape(3, 1, 1).half()
    weights = ExpertWeights.from_dense(torch.ones(3, 1, 1).half(), down, activation=Activation("relu", gated=False))
    routing = Routing(torch.tensor([[0, 1, 2], [0, 0, 1]]), torch.ones(2, 3))
    y = moestro.expert_mlp(torch.ones(2, 1).half(), routing, weights, strategy)
    assert y.tolist() == [[1.0], [60000.0]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_poisoned_expert_nobody_picks_is_never_read(strategy):
    torch.manual_seed(0)
    sizes = problems.Sizes(9, 8, 6, 4, 2)
    weights = problems.weights(sizes, Activation(), torch.float32)
    weights.gate_up.data[2] = weights.down.data[2] = torch.nan
    ids = torch.tensor([[0, 1], [1, 3], [3, -1]]).repeat(3, 1)
    y = moestro.expert_mlp(torch.randn(9, 8), Routing(ids, torch.rand(9, 2)), weights, strategy)
    assert torch.isfinite(y).all()


def test_duplicate_slots_count_with_the_sum_of_their_weights():
    torch.manual_seed(0)
    sizes = problems.Sizes(4, 8, 6, 3, 2)
    weights, x = problems.weights(sizes, Activation(), torch.float32), torch.randn(4, 8)
    twice = Routing(torch.ones(4, 2, dtype=torch.long), torch.full((4, 2), 0.25))
    once = Routing(torch.ones(4, 1, dtype=torch.long), torch.full((4, 1), 0.5))
    for strategy in STRATEGIES:
        y = moestro.expert_mlp(x, twice, weights, strategy)
        assert_close(y, moestro.expert_mlp(x, once, weights, strategy))


def test_non_contiguous_and_memory_mapped_weights(tmp_path):
    torch.manual_seed(0)
    sizes = problems.Sizes(5, 12, 10, 3, 2)
    weights, routing = problems.weights(sizes, Activation(), torch.float32), problems.routing(sizes)
    x = torch.randn(5, 12)
    expected = reference.expert_mlp(x, routing, weights)
    wide = torch.full((3, 20, 24), torch.nan)
    wide[:, :, ::2] = weights.gate_up.data
    (tmp_path / "down.bin").write_bytes(weights.down.data.numpy().tobytes())
    mapped = torch.from_file(str(tmp_path / "down.bin"), shared=False, size=weights.down.data.numel())
    strided = ExpertWeights.from_dense(wide[:, :, ::2], mapped.reshape(3, 12, 10))
    for strategy in STRATEGIES:
        assert_close(moestro.expert_mlp(x.repeat(1, 2)[:, :12], routing, strided, strategy), expected)


def test_output_norm_is_applied_before_the_weight():
    torch.manual_seed(0)
    sizes = problems.Sizes(9, 8, 6, 4, 2)
    base = problems.weights(sizes, Activation(), torch.float32)
    normed = ExpertWeights(base.gate_up, base.down, output_norm=lambda y: y / y.norm(dim=-1, keepdim=True))
    x, routing = torch.randn(9, 8), problems.routing(sizes, kind="full")
    for strategy in STRATEGIES:
        check(x, routing, normed, strategy)
    one = Routing(routing.expert_ids[:, :1], torch.full((9, 1), 3.0))
    assert_close(moestro.expert_mlp(x, one, normed).norm(dim=1), torch.full((9,), 3.0))


def test_custom_activation():
    torch.manual_seed(0)
    custom = Activation("custom", function=lambda z: z[..., :6].sin() * z[..., 6:])
    sizes = problems.Sizes(9, 8, 6, 4, 2)
    weights = problems.weights(sizes, custom, torch.float32)
    for strategy in STRATEGIES:
        check(torch.randn(9, 8), problems.routing(sizes), weights, strategy)


@pytest.mark.parametrize("way", list(mm.Way), ids=lambda w: w.value)
@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 40])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_way_to_multiply(way, num_rows, stored):
    """All of them, whichever this processor would choose; panels are made smaller than the matrix."""
    torch.manual_seed(0)
    if way is mm.Way.VECTOR and num_rows > 1:
        pytest.skip("a matrix-vector product has one row")
    widened = way in (mm.Way.WIDEN, mm.Way.WIDEN_COLUMNS)
    w = (torch.randn(8000, 70) / 8).to(stored)
    x = torch.randn(num_rows, 70).to(torch.float32 if widened else stored)
    y = mm.matmul(x, w, way)
    assert y.dtype == x.dtype
    assert mm.panel_height(num_rows, 70) < 8000
    assert_close(y, (x.double() @ w.double().T).float(), x.dtype)


def test_ways_chosen_by_rows_dtype_and_processor(monkeypatch):
    ways = {}
    for native in (True, False):
        monkeypatch.setattr(tuning, "multiplies_bfloat16", lambda native=native: native)
        ways[native] = [tuning.choose_way(n, torch.empty(2, 1024, 1024).bfloat16()) for n in (1, 2, 8, 64)]
    assert ways[True] == [mm.Way.VECTOR, mm.Way.COLUMNS, mm.Way.COLUMNS, mm.Way.COLUMNS]
    assert ways[False] == [mm.Way.VECTOR, mm.Way.WIDEN, mm.Way.WIDEN, mm.Way.WIDEN_COLUMNS]
    assert tuning.choose_way(5, torch.empty(2, 1024, 1024, device="meta").bfloat16()) is mm.Way.ROWS
    assert tuning.choose_way(5, torch.empty(2, 64, 64)) is mm.Way.ROWS


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("strategy", ["grouped", "selective"])
def test_bfloat16_on_processors_with_and_without_its_instructions(monkeypatch, native, strategy):
    torch.manual_seed(0)
    monkeypatch.setattr(tuning, "multiplies_bfloat16", lambda: native)
    for num_tokens, bias in itertools.product((1, 3, 40), (False, True)):
        sizes = problems.Sizes(num_tokens, 24, 20, 4, 2)
        weights = problems.weights(sizes, Activation(), torch.bfloat16, bias=bias)
        check(torch.randn(num_tokens, 24).bfloat16(), problems.routing(sizes), weights, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_call_gives_the_same_bits(strategy):
    torch.manual_seed(0)
    sizes = problems.Sizes(33, 40, 24, 6, 3)
    weights, routing = problems.weights(sizes, Activation(), torch.bfloat16), problems.routing(sizes)
    x = torch.randn(33, 40).bfloat16()
    assert bit_equal(
        moestro.expert_mlp(x, routing, weights, strategy), moestro.expert_mlp(x, routing, weights, strategy)
    )


def test_inputs_are_left_as_they_were():
    torch.manual_seed(0)
    sizes = problems.Sizes(9, 8, 6, 4, 2)
    weights, routing = problems.weights(sizes, Activation(), torch.float32), problems.routing(sizes)
    x = torch.randn(9, 8)
    before = [t.clone() for t in (x, routing.expert_ids, routing.routing_weights, *weights.tensors)]
    for strategy in STRATEGIES:
        moestro.expert_mlp(x, routing, weights, strategy)
    after = (x, routing.expert_ids, routing.routing_weights, *weights.tensors)
    assert all(bit_equal(a, b) for a, b in zip(before, after, strict=True))


def test_auto_picks_by_pairs_against_experts():
    assert tuning.choose_strategy(8, 64)[0] == "selective"
    assert tuning.choose_strategy(256, 64)[0] == "selective"
    assert tuning.choose_strategy(257, 64)[0] == "grouped"


def test_strategy_names():
    assert tuning.parse_strategy("blockwise-64") == ("blockwise", 64)
    assert tuning.parse_strategy("auto") == ("auto", None)
    for wrong in ("fast", "blockwise-0", "blockwise--1", "grouped-3", "blockwise-x"):
        with pytest.raises(InvalidInputError, match="strategy"):
            tuning.parse_strategy(wrong)


def test_a_forced_entry_runs_and_a_missing_one_is_an_error(monkeypatch):
    """The list is walked in order; forcing runs that entry and no other."""
    torch.manual_seed(0)
    sizes = problems.Sizes(3, 4, 3, 2, 1)
    arguments = (torch.randn(3, 4), problems.routing(sizes), problems.weights(sizes, Activation(), torch.float32))
    ran = []

    def entry(name):
        return dispatch.Implementation(name, lambda *a: dispatch.Prepared(name, lambda *a: ran.append(name)))

    first = dispatch.Implementation("first", lambda *a: "it cannot do this")
    operation = replace(expert_mlp.EXPERT_MLP, implementations=(first, entry("second"), entry("third")))
    monkeypatch.setattr(expert_mlp, "EXPERT_MLP", operation)
    monkeypatch.setattr(dispatch, "_KEPT", OrderedDict())
    monkeypatch.setitem(dispatch._OPERATIONS, "expert_mlp", operation)
    moestro.expert_mlp(*arguments)
    with moestro.use(implementation="third"):
        moestro.expert_mlp(*arguments)
    assert ran == ["second", "third"]
    with moestro.use(implementation="first"), pytest.raises(UnsupportedError, match="first: it cannot do this"):
        moestro.expert_mlp(*arguments)
    with moestro.use(implementation="sparse"), pytest.raises(UnsupportedError, match="sparse"):
        moestro.expert_mlp(*arguments)
    assert ran == ["second", "third"]


def test_the_reference_can_be_forced_and_a_strategy_too():
    torch.manual_seed(0)
    sizes = problems.Sizes(9, 8, 6, 4, 2)
    weights, routing = problems.weights(sizes, Activation(), torch.float32), problems.routing(sizes)
    x = torch.randn(9, 8)
    with moestro.use(implementation="reference"):
        assert bit_equal(moestro.expert_mlp(x, routing, weights), reference.expert_mlp(x, routing, weights))
    with moestro.use(strategy="blockwise-4"):
        assert moestro.explain(moestro.expert_mlp, x, routing, weights).strategy == "blockwise"
    assert moestro.explain(moestro.expert_mlp, x, routing, weights).strategy == "grouped"


def test_blockwise_without_a_size_uses_the_measured_roof(monkeypatch):
    torch.manual_seed(0)
    sizes = problems.Sizes(9, 8, 6, 4, 2)
    weights, routing = problems.weights(sizes, Activation(), torch.float32), problems.routing(sizes)
    x = torch.randn(9, 8)
    from moestro import machine

    seen, original = [], plain.grouping.run_blocks
    monkeypatch.setattr(plain.grouping, "run_blocks", lambda i, e, b: seen.append(b) or original(i, e, b))
    for balance, size in ((1.0, 16), (40.0, 128), (1e9, 1024)):
        monkeypatch.setattr(machine, "roof", lambda *a, b=balance: machine.Roof(1.0, b))
        monkeypatch.setattr(dispatch, "_KEPT", OrderedDict())  # a machine has one roof
        check(x, routing, weights, "blockwise")
        assert seen.pop() == size


def test_mixed_dtypes_compute_in_the_wider_one():
    torch.manual_seed(0)
    sizes = problems.Sizes(9, 8, 6, 4, 2)
    weights, routing = problems.weights(sizes, Activation(), torch.bfloat16), problems.routing(sizes)
    x = torch.randn(9, 8)
    for strategy in STRATEGIES:
        check(x, routing, weights, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_on_the_input_stay_within_float32(strategy):
    """x times its weight is beyond float16, what the expert makes of it is not."""
    gate_up, down = torch.full((1, 8, 4), 1e-6).half(), torch.full((1, 4, 8), 1e-2).half()
    weights = moestro.ExpertWeights.from_dense(gate_up, down, activation=Activation("relu", gated=False))
    x, routing = torch.full((3, 4), 40000.0).half(), Routing(torch.zeros(3, 1).long(), torch.full((3, 1), 2.0), "input")
    y = moestro.expert_mlp(x, routing, weights, strategy)
    assert torch.isfinite(y).all()
    assert_close(y, reference.expert_mlp(x, routing, weights), torch.float16)
