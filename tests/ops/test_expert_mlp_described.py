"""What the engine remembers of experts between calls: it is used again, and never after their memory has moved."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn

import moestro
from moestro import Activation, Experts, reference
from moestro.ops.expert_mlp import described
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
    """What was described anew, in order."""
    seen, original = [], described._reason
    monkeypatch.setattr(described, "_reason", lambda stored: seen.append(stored) or original(stored))
    return seen


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["float32", "mxfp4"])
def test_once_for_many_calls_and_values_may_change_in_place(made, name, split):
    x, routing, weights = case(name, split)
    first = compute(x, routing, weights)
    assert made == [weights.gate_up, weights.down]
    for t in weights.down.tensors:
        t.zero_()
    assert not bit_equal(compute(x, routing, weights), first)
    compute(x, routing.with_ids(torch.zeros_like(routing.expert_ids)), weights)
    compute(x, routing.with_ids(torch.full_like(routing.expert_ids, -1)), weights)
    assert len(made) == 2


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
        described._KNOWN.clear()
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
    before = len(described._KNOWN)
    run(RUNNING[0], x, routing, weights)
    assert len(described._KNOWN) == before + 2
    del weights
    gc.collect()
    assert len(described._KNOWN) == before


def test_copies_have_a_description_of_their_own(made):
    x, routing, weights = case("mxfp4", split=True)
    expected = compute(x, routing, weights)
    copied = copy.deepcopy(weights)
    for t in weights.tensors:
        t.view(torch.uint8).fill_(0x7F)
    assert bit_equal(run(RUNNING[0], x, routing, copied), expected)
    assert len(made) == 4


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
