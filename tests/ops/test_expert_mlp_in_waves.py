"""Calls in parts: rows of some experts at a time, and their sums, have the bits of the one call."""

from __future__ import annotations

import pytest
import torch

import moestro
from moestro import Routing, reference
from moestro.ops import dispatch
from moestro.ops.expert_mlp import EXPERT_MLP, triton
from moestro.ops.expert_mlp.triton_launch import in_waves
from tolerances import assert_close

from . import problems
from .test_expert_mlp_triton import PLANS
from .triton_calls import launch

DTYPES = (torch.float32, torch.bfloat16)


def halves(routing, num_experts):
    """The routing to even experts, and that to odd ones; other pairs are empty slots."""
    ids = routing.expert_ids
    known = (ids >= 0) & (ids < num_experts)
    for rest in (0, 1):
        named = torch.where(known & (ids % 2 == rest), ids, -1)
        yield Routing.unchecked(named, routing.routing_weights, routing.weight_on)


def in_parts(parts, x, routing, weights):
    room = parts.room(x, routing)
    room.fill_(torch.nan)
    for named in halves(routing, weights.num_experts):
        parts.rows(x, named, weights, room)
    return parts.total(x, routing, room, weights.num_experts)


@pytest.mark.parametrize("how", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton(how, dtype, triton_device):
    turn = (list(PLANS.values()).index(how) + DTYPES.index(dtype)) % 2
    sizes = problems.Sizes(4, 41, 37, 4, 2)
    weights = problems.weights(sizes, problems.ACTIVATIONS[2], dtype, bias=turn == 0)
    kind, weight_on = (("random", "output"), ("duplicates", "input"))[turn]
    routing = problems.routing(sizes, kind=kind, weight_on=weight_on)
    x = torch.randn(4, 41).to(dtype)
    parts = in_waves(how, triton.compute_dtype(x, weights))
    assert torch.equal(in_parts(parts, x, routing, weights), launch(x, routing, weights, how))


def test_triton_makes_no_other_room_for_pieces(monkeypatch, triton_device):
    sizes, how = problems.Sizes(4, 41, 37, 4, 2), next(iter(PLANS.values()))
    weights = problems.weights(sizes, problems.ACTIVATIONS[0], torch.float32)
    routing, x = problems.routing(sizes, kind="random"), torch.randn(4, 41)
    parts = in_waves(how, triton.compute_dtype(x, weights))
    room, empty, made = parts.room(x, routing), torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda *size, **options: made.append(size[0]) or empty(*size, **options))
    parts.rows(x, routing, weights, room)
    assert made
    assert room.numel() not in made


@pytest.mark.parametrize("implementation", [None, "triton"])
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_rows_that_were_computed_elsewhere(implementation, weight_on):
    """`put` of the reference's rows: before their weights on outputs, in whatever layout the implementation has."""
    sizes = problems.Sizes(5, 64, 32, 6, 3)
    weights = problems.weights(sizes, problems.ACTIVATIONS[0], torch.float32)
    routing = problems.routing(sizes, kind="full", weight_on=weight_on)
    x = torch.randn(5, 64)
    here, there = halves(routing, 6)
    with moestro.use(implementation=implementation):
        parts = dispatch.prepare(EXPERT_MLP, x, routing, weights, "auto").in_waves
    assert parts is not None
    rows = torch.full((5, 3, 64), torch.nan)
    for t, k in torch.nonzero(there.expert_ids >= 0).tolist():
        one = there.expert_ids[t : t + 1, k : k + 1]
        w = there.routing_weights[t : t + 1, k : k + 1] if weight_on == "input" else torch.ones(1, 1)
        rows[t, k] = reference.expert_mlp(x[t : t + 1], Routing(one, w, weight_on), weights)[0]
    room = parts.room(x, routing)
    room.fill_(torch.nan)
    parts.rows(x, here, weights, room)
    parts.put(x, there, rows, room)
    y = parts.total(x, routing, room, 6)
    assert_close(y, reference.expert_mlp(x, routing, weights), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_set_of_instructions(dtype):
    """Of those that this machine has."""
    sizes = problems.Sizes(7, 96, 64, 5, 3)
    weights, x = problems.weights(sizes, problems.ACTIVATIONS[0], dtype), torch.randn(7, 96).to(dtype)
    for kind in problems.KINDS:
        routing = problems.routing(sizes, kind=kind)
        for each in EXPERT_MLP.implementations:
            prepared = each.prepare(x, routing, weights, "auto")
            if isinstance(prepared, dispatch.Prepared) and prepared.in_waves is not None:
                y = in_parts(prepared.in_waves, x, routing, weights)
                assert torch.equal(y, prepared.compute(x, routing, weights)), (each.name, kind)
            else:
                assert not (each.name.startswith("cpu-") and isinstance(prepared, dispatch.Prepared)), each.name
