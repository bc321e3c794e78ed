"""Prepared calls are kept and run again, and never after the memory that they read has moved."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import moestro
from moestro import Activation, Experts, ExpertWeights, Routing, reference
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.formats import SplitTensor, dense
from moestro.ops import dispatch, native
from moestro.ops.expert_mlp import EXPERT_MLP, cpu, library
from moestro.ops.expert_mlp import run as run_below
from moestro.routing import route
from test_csrc import hops
from tolerances import assert_close, bit_equal

from . import problems
from .engines import RUNNING, needs_engine, run
from .stored import apart

pytestmark = needs_engine
SIZES = problems.Sizes(5, 32, 32, 6, 2)


def case(name="float32", split=False):
    weights = problems.weights(SIZES, Activation(), torch.float32, bias=True).quantize(name)
    return torch.randn(5, 32), problems.routing(SIZES, kind="full"), apart(weights) if split else weights


def compute(x, routing, weights):
    y = run(RUNNING[0], x, routing, weights)
    assert_close(y, reference.expert_mlp(x.double(), routing, weights), torch.float32)
    return y


@pytest.fixture
def made(monkeypatch):
    """The implementations of what was prepared anew, in order."""
    seen, original = [], dispatch._first

    def first(operation, arguments):
        prepared = original(operation, arguments)
        seen.append(prepared.implementation)
        return prepared

    monkeypatch.setattr(dispatch, "_first", first)
    monkeypatch.setattr(dispatch, "_KEPT", OrderedDict())
    return seen


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["float32", "mxfp4"])
def test_once_for_many_calls_and_values_may_change_in_place(made, name, split):
    x, routing, weights = case(name, split)
    routing = Routing(routing.expert_ids.contiguous(), routing.routing_weights.contiguous())
    first = compute(x, routing, weights)
    assert made == [f"cpu-{RUNNING[0].name}"]
    for t in weights.down.tensors:
        t.zero_()
    assert not bit_equal(compute(x, routing, weights), first)
    compute(x, routing.with_ids(torch.zeros_like(routing.expert_ids)), weights)
    compute(x, routing.with_ids(torch.full_like(routing.expert_ids, -1)), weights)
    assert len(made) == 1


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["float32", "int4-g32-zp", "nvfp4"])
def test_a_tensor_whose_storage_was_replaced(made, name, split):
    """By `.data =`, one tensor of one expert after the other; old memory is overwritten, so that reading it shows."""
    x, routing, weights = case(name, split)
    every = routing.with_ids(torch.arange(10).reshape(5, 2) % 6)
    expected = compute(x, every, weights)
    for t in [t for stored in (weights.gate_up, weights.down) for t in stored.tensors]:
        old, t.data = t.data, t.data.clone()
        old.reshape(-1).view(torch.uint8).fill_(0x7F)
        assert bit_equal(run(RUNNING[0], x, every, weights), expected)


@pytest.mark.parametrize("known", [True, False])
def test_an_expert_that_was_away_comes_back(known):
    """As an offloading hook has it: without memory in between, while calls name the others only."""
    x, routing, weights = case(split=True)
    compute(x, routing, weights)
    tensors = [t for matrix in weights.gate_up.matrices[3] for t in matrix.tensors]
    kept = [t.data for t in tensors]
    others = routing.with_ids(routing.expert_ids.masked_fill(routing.expert_ids == 3, 0))
    expected = moestro.expert_mlp(x, others, weights)
    for t in tensors:
        t.data = torch.empty(0)
    if not known:
        dispatch._KEPT.clear()
    assert bit_equal(run(RUNNING[0], x, others, weights), expected)
    for t, data in zip(tensors, kept, strict=True):
        t.data = data
    compute(x, others, weights)
    compute(x, routing.with_ids(torch.full_like(routing.expert_ids, 3)), weights)


def test_strides_and_shape_of_the_same_memory():
    """A square matrix turned round where it lies is read by its new strides, which is left to torch."""
    x, routing, weights = case()
    run(RUNNING[0], x, routing, weights)
    weights.down.data.data = weights.down.data.data.transpose(1, 2)
    candidates = moestro.explain(moestro.expert_mlp, x, routing, weights).candidates
    reason = next(c.reason for c in candidates if c.name == f"cpu-{RUNNING[0].name}")
    assert "down is not contiguous along what a product sums over" in reason
    assert_close(moestro.expert_mlp(x, routing, weights), reference.expert_mlp(x, routing, weights))
    weights.down.data.data = weights.down.data.data.transpose(1, 2)
    compute(x, routing, weights)


def test_nothing_is_kept_of_weights_that_are_gone():
    x, routing, weights = case(split=True)
    gc.collect()
    before = set(dispatch._KEPT)
    run(RUNNING[0], x, routing, weights)
    assert len(set(dispatch._KEPT) - before) == 1
    del weights
    gc.collect()
    assert set(dispatch._KEPT) <= before


def test_copies_are_prepared_by_themselves(made):
    x, routing, weights = case("mxfp4", split=True)
    expected = compute(x, routing, weights)
    copied = copy.deepcopy(weights)
    for t in weights.tensors:
        t.view(torch.uint8).fill_(0x7F)
    assert bit_equal(run(RUNNING[0], x, routing, copied), expected)
    assert len(made) == 2


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("change", ["moved", "resized", "retyped", "turned"])
def test_what_no_longer_lies_as_it_lay_is_prepared_anew(made, change, split):
    x, routing, weights = case(split=split)
    compute(x, routing, weights)
    for t in weights.down.tensors:
        old = t.data
        if change == "moved":
            t.data = old.clone()
        elif change == "retyped":
            t.data = old.bfloat16()
        elif change == "turned":
            t.data = old.clone().transpose(-2, -1)
        else:
            t.data = torch.cat([old, old])[: len(old)].clone()
    found = moestro.expert_mlp(x, routing, weights)
    expected = reference.expert_mlp(x, routing, weights)
    assert len(made) == 2
    assert_close(found, expected, torch.bfloat16 if change == "retyped" else torch.float32)


def placed_in(memory, offset, stored):
    """The same experts in tensors of their own, in some bytes of `memory`; and where the next ones go."""
    parts = {}
    for part in stored.format.names:
        tensor = getattr(stored, part)
        raw = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
        parts[part] = raw.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        offset += -(-tensor.nbytes // 64) * 64
    return replace(stored, **parts), offset


@pytest.mark.parametrize("name", ["float32", "mxfp4"])
def test_memory_that_other_experts_take_over_is_read_anew(name):
    """The same addresses, layouts and numbers of values, other tensors, and other experts."""
    x, routing, _ = case()
    memory, addresses = bytearray(1 << 22), set()
    for seed in range(10):
        torch.manual_seed(seed)
        _, _, weights = case(name)
        gate_up, offset = placed_in(memory, 0, weights.gate_up)
        weights = replace(weights, gate_up=gate_up, down=placed_in(memory, offset, weights.down)[0])
        addresses.add(weights.gate_up.data.data_ptr())
        compute(x, routing, weights)
    assert len(addresses) == 1


def test_a_storage_made_smaller_is_not_read(made):
    x, routing, weights = case()
    compute(x, routing, weights)
    weights.down.data.untyped_storage().resize_(64)
    candidates = dispatch.candidates(EXPERT_MLP, x, routing, weights, "auto")
    assert "made smaller" in candidates[f"cpu-{RUNNING[0].name}"]


@pytest.mark.parametrize(
    "change",
    [
        lambda x, routing: (x.repeat(1, 2)[:, ::2], routing),
        lambda x, routing: (x[:4], Routing(routing.expert_ids[:4], routing.routing_weights[:4])),
        lambda x, routing: (x.bfloat16(), routing),
        lambda x, routing: (x, routing.with_ids(routing.expert_ids.int())),
        lambda x, routing: (x, Routing(routing.expert_ids, routing.routing_weights, "input")),
    ],
)
def test_every_fact_of_a_call_is_in_its_key(made, change):
    x, routing, weights = case()
    run(RUNNING[0], x, routing, weights)
    run(RUNNING[0], *change(x, routing), weights)
    assert len(made) == 2
    run(RUNNING[0], *change(x, routing), weights)
    run(RUNNING[0], x, routing, weights)
    assert len(made) == 2


def test_settings_threads_and_gradients_are_in_the_key(made):
    x, routing, weights = case()
    with torch.no_grad():
        moestro.expert_mlp(x, routing, weights)
        moestro.expert_mlp(x, routing, weights)
        assert len(made) == 1
        with moestro.use(implementation="torch"):
            moestro.expert_mlp(x, routing, weights)
        with moestro.use(strategy="all_experts"):
            moestro.expert_mlp(x, routing, weights)
        torch.set_num_threads(2)
        moestro.expert_mlp(x, routing, weights)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
        moestro.expert_mlp(x, routing, weights)
        torch.use_deterministic_algorithms(True)
        assert len(made) == 5
        weights.gate_up.data.requires_grad_()
        moestro.expert_mlp(x, routing, weights)
    assert len(made) == 5
    moestro.expert_mlp(x, routing, weights)
    assert (len(made), made[-1]) == (6, "torch")


def test_no_more_is_kept_than_said(monkeypatch):
    monkeypatch.setattr(dispatch, "MOST_KEPT", 3)
    monkeypatch.setattr(dispatch, "_KEPT", OrderedDict())
    x, routing, weights = case()
    for n in (1, 2, 3, 4, 5):
        run(RUNNING[0], x[:n], Routing(routing.expert_ids[:n], routing.routing_weights[:n]), weights)
    assert len(dispatch._KEPT) == 3


def test_observers_see_what_ran_and_not_what_they_run_themselves():
    x, routing, weights = case()
    seen = []

    def observer(prepared, arguments, result):
        seen.append((prepared.implementation, prepared.walk))
        assert bit_equal(moestro.expert_mlp(*arguments), result)

    with torch.no_grad(), dispatch.observed(EXPERT_MLP, observer):
        moestro.expert_mlp(x, routing, weights)
        with moestro.use(implementation="torch", strategy="grouped"):  # which calls another operation
            moestro.expert_mlp(x, routing, weights)
    moestro.expert_mlp(x, routing, weights)
    assert seen == [(f"cpu-{RUNNING[0].name}", "grouped"), ("torch", "grouped")]


def test_observers_are_told_before_a_call_where_they_want_to_be():
    x, routing, weights = case()
    seen = []
    with (
        torch.no_grad(),
        dispatch.observed(EXPERT_MLP, lambda *told: seen.append("after"), lambda: seen.append("before")),
    ):
        moestro.expert_mlp(x, routing, weights)
        moestro.topk(x, 2)  # of which nobody wants to know
        with pytest.raises(moestro.MoestroError):
            moestro.expert_mlp(x[:, 1:], routing, weights)  # which is not computed
    moestro.expert_mlp(x, routing, weights)
    assert seen == ["before", "after"]


def test_a_routing_that_was_checked_is_not_looked_at_again(monkeypatch):
    x, routing, weights = case()
    moestro.expert_mlp(x, routing, weights)
    assert routing.checked_for == weights.num_experts
    monkeypatch.setattr(native, "ids_and_weights_fit", lambda *values: pytest.fail("looked at again"))
    moestro.expert_mlp(x, routing, weights)
    assert routing.with_ids(routing.expert_ids).checked_for is None
    routing.expert_ids[0, 0] = 1000  # an empty slot, below the edge
    left_out = routing.with_ids(routing.expert_ids.masked_fill(routing.expert_ids == 1000, -1))
    compute(x, routing, weights)
    assert_close(moestro.expert_mlp(x, routing, weights), reference.expert_mlp(x, left_out, weights))


def module_case(weights):
    x, routing, _ = case()
    experts = Experts.from_weights(weights).requires_grad_(False)

    def check():
        return compute(x.to(experts.weights.gate_up.format.storage), routing, experts.weights)

    check()
    assert experts.weights is experts.weights
    return experts, check


@pytest.mark.parametrize("split", [False, True])
def test_a_module_makes_its_value_again_when_it_must(split):
    _, _, weights = case(split=split)
    experts, check = module_case(weights)
    other = Experts.from_weights(case(split=split)[2])
    before = experts.weights
    experts.load_state_dict(other.state_dict())  # in place
    assert experts.weights is before
    check()
    if split:
        experts.gate_up_data_2_1 = torch.randn(32, 32)
        assert experts.weights is not before
        assert experts.weights.gate_up.matrices[2][1].data is experts.gate_up_data_2_1
    else:
        experts.down = nn.Parameter(torch.randn(6, 32, 32), requires_grad=False)
        assert experts.weights.down.data is experts.down
        check()
        experts.bfloat16()  # the same parameters, of another dtype
        assert experts.weights.gate_up.format.name == "bfloat16"
        experts.float()
    check()


def test_a_parametrised_module_is_computed_at_every_call():
    experts, check = module_case(case()[2])

    class Twice(nn.Module):
        def forward(self, t):
            return 2 * t

    torch.nn.utils.parametrize.register_parametrization(experts, "down", Twice())
    check()
    experts.parametrizations.down.original.data.mul_(0.5)
    with torch.no_grad():
        assert bit_equal(experts.weights.down.data, 2 * experts.parametrizations.down.original)
    check()


def test_modules_are_copied_and_pickled_as_before():
    experts, _ = module_case(case()[2])
    experts.gate_up.requires_grad_()
    x, routing, _ = case()
    with torch.no_grad():
        expected = experts(x, routing)
    file = io.BytesIO()
    torch.save(experts, file)
    file.seek(0)
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts)), torch.load(file, weights_only=False)):
        assert other.weights.gate_up.data is other.gate_up
        with torch.no_grad():
            assert bit_equal(other(x, routing), expected)
            experts.gate_up.zero_()
            assert bit_equal(other(x, routing), expected)
            experts.gate_up.copy_(other.gate_up)
    given = {"gate_up": torch.randn(6, 64, 32, requires_grad=True)}
    torch.func.functional_call(experts, given, (x, routing)).sum().backward()
    assert given["gate_up"].grad is not None
    assert experts.weights.gate_up.data is experts.gate_up
    copy.deepcopy(experts)


def node(x, ids, w, weights):
    layout = f"{library.write_layout(weights.gate_up)}|{library.write_layout(weights.down)}"
    stored = [*weights.gate_up.tensors], [*weights.down.tensors], weights.gate_up_bias, weights.down_bias
    return torch.ops.moestro.expert_mlp(x, ids, w, *stored, "output", weights.activation.code, layout, "auto")


@pytest.mark.parametrize(
    "change",
    [
        lambda x, ids, w: (x[:, :8], ids, w),
        lambda x, ids, w: (torch.cat([x, x]), ids, w),
        lambda x, ids, w: (x, ids, w[:2]),
        lambda x, ids, w: (x, ids, w.bfloat16()),
        lambda x, ids, w: (x, ids.short(), w),
    ],
)
def test_a_node_refuses_what_does_not_belong_together(change):
    """As a graph may hand it over that was made for other shapes: the engine would read and write outside."""
    x, routing, weights = case()
    given = change(x, routing.expert_ids, routing.routing_weights)
    with pytest.raises(InvalidInputError, match="expert_mlp"):
        node(*given, weights)
    with pytest.raises(InvalidInputError, match="expert_mlp"):
        run_below(given[0], Routing.unchecked(*given[1:], "output"), weights)


def test_unstacked_experts_of_a_storage_made_smaller():
    x, routing, _ = case()
    stack, down = torch.randn(6, 64, 32), torch.randn(6, 32, 32)
    split = [SplitTensor(tuple((dense(t),) for t in each.unbind(0))) for each in (stack, down)]
    weights = ExpertWeights(*split)
    compute(x, routing, weights)
    stack.untyped_storage().resize_(4096)
    found = dispatch.candidates(EXPERT_MLP, x, routing, weights, "auto")[f"cpu-{RUNNING[0].name}"]
    assert "made smaller" in found
    stack.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedError, match="hold memory, of every expert"):
        run(RUNNING[0], x, routing, weights)


def test_each_tensors_gradient_is_in_the_key():
    logits, correction = torch.randn(4, 8), nn.Parameter(torch.randn(8))
    assert route(logits, 2, correction=correction).routing_weights.grad_fn is None
    assert route(logits.clone().requires_grad_(), 2, correction=correction).routing_weights.grad_fn is not None


def test_many_unstacked_experts_turned_where_they_lie():
    sizes = problems.Sizes(5, 32, 32, 40, 2)
    weights = apart(problems.weights(sizes, Activation(), torch.float32))
    assert len(weights.tensors) > dispatch.MANY
    x, routing = torch.randn(5, 32), problems.routing(sizes, kind="full")
    compute(x, routing, weights)
    for t in weights.down.tensors:
        t.data = t.data.t()
    assert_close(moestro.expert_mlp(x, routing, weights), reference.expert_mlp(x, routing, weights))


def test_ranges_that_are_asked_for_are_in_the_key(monkeypatch, made):
    x, routing, weights = case()
    compute(x, routing, weights)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "PIECES", 3)
        compute(x, routing, weights)
    compute(x, routing, weights)
    assert len(made) == 2


def test_threads_that_prepare_at_once(monkeypatch):
    monkeypatch.setattr(dispatch, "MOST_KEPT", 8)
    x, routing, weights = case()
    failed = []

    def repeat():
        try:
            for n in range(300):
                size = n % 5 + 1
                part = Routing(routing.expert_ids[:size], routing.routing_weights[:size])
                moestro.expert_mlp(x[:size].clone(), part, weights, f"blockwise-{n % 7 + 1}")
        except Exception as error:  # whatever it is
            failed.append(error)

    threads = [threading.Thread(target=repeat) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_explain_asks_what_the_call_asks():
    x, routing, weights = case()
    with pytest.raises(InvalidInputError, match="expert_mlp"):
        moestro.explain(moestro.expert_mlp, torch.cat([x, x]), routing, weights)
    assert moestro.explain(route, torch.randn(3, 8).bfloat16(), 2).chosen == "cpu-native"


def test_the_way_from_the_layer_to_the_engine_is_the_one_on_the_page(monkeypatch):
    """It never becomes longer: a function that is entered on the way has to earn it."""
    engine, found = native.module, []

    class Prepared:
        def __init__(self, prepared):
            self.prepared = prepared

        def __getattr__(self, name):
            return getattr(self.prepared, name)

        def run(self, *arguments):
            frame = sys._getframe(1)
            while frame is not None:
                if frame.f_code.co_filename.startswith(str(Path(moestro.__file__).parent)):
                    found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
                frame = frame.f_back
            self.prepared.run(*arguments)

    class Engine:
        def __getattr__(self, name):
            return getattr(engine, name)

        def ExpertMlp(self, **arguments):
            return Prepared(engine.ExpertMlp(**arguments))

    monkeypatch.setattr(native, "module", Engine())
    monkeypatch.setattr(dispatch, "_KEPT", OrderedDict())
    layer = moestro.MoE(moestro.TopKRouter(32, 6, 2), Experts.from_weights(case()[2]).requires_grad_(False))
    with torch.no_grad():
        layer(torch.randn(5, 32))
    listed = [f"{file.name}:{name.rpartition('.')[2]}" for name, file in hops() if file.suffix == ".py"]
    assert found[::-1] == listed
