"""What ranks do in the tests of failures inside moves, flows and sequences, and of a job that is begun again."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from moestro import MoE
from moestro.errors import CollectiveError
from moestro.parallel import (
    AllToAllDispatcher,
    MeshFlow,
    Peers,
    Placement,
    SequenceParallel,
    SlicedDispatcher,
    guard,
    make_mesh,
    move_experts,
    parallelize,
    placements,
    same_tokens,
)
from moestro.parallel.same_tokens import join_same, routing_digest
from moestro.types import Routing
from parallel.cases import FixedRouter, Layer, build, mesh_of
from parallel.flows import Flow, rows_and_columns, whole_layer

LONG, SHORT, GRACE = 30.0, 2.0, 1.0


def a_move():
    """A call of a layer, and a move of its experts by groups of their own; the collective inside."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole, batches, routings = build(Layer((1, world, 1)))
    mesh = mesh_of(1, world, 1)
    layer = parallelize(MoE(FixedRouter(8), whole), mesh, AllToAllDispatcher, timeout=LONG)
    layer.router.routing = routings[rank]
    first = placements(layer)[""]

    def move(step):
        rows = first.experts[1:] + first.experts[:1] if step else first.experts
        move_experts(layer, mesh, {"": Placement(8, rows)}, timeout=LONG - 1)

    return move, lambda: layer(batches[rank]), "all-to-all of experts"


def slices():
    """Experts along ep, each in slices along tp."""
    whole, batches, routings = build(Layer((1, 2, 2)))
    layer = parallelize(MoE(FixedRouter(8), whole), mesh_of(1, 2, 2), AllToAllDispatcher, timeout=LONG)
    layer.dispatcher = replace(layer.dispatcher, place=replace(layer.dispatcher.place, name="layers.3"))
    own = dist.get_rank() // 2
    layer.router.routing = routings[own]
    return lambda step: layer(batches[own]), lambda: layer(batches[own]), "all-to-all of rows"


def a_flow():
    case = Flow((2, 2))
    flow = MeshFlow.of(whole_layer(case), rows_and_columns(case), timeout=LONG, name="layers.3")
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    return lambda step: flow(x), lambda: flow(x), "all-to-all of rows"


def a_sequence(num_tokens, inside):
    mesh = make_mesh(1, dist.get_world_size(), 1)
    layer = SequenceParallel.of(whole_layer(Flow((1, 3, 1))), mesh, timeout=LONG, name="layers.3")
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(0))
    return lambda step: layer(x), lambda: layer(x), inside


WHAT = {
    "move": a_move,
    "flow": a_flow,
    "slices": slices,
    "prompt": lambda: a_sequence(60, "all-to-all of rows"),
    "step": lambda: a_sequence(2, "all-reduce of rows"),
}


@torch.no_grad()
def failing(what, how):
    """Rank 1 goes, or stays away, inside. What the others are told, after how long, and at the next call."""
    run, again, inside = WHAT[what]()
    run(0)
    again()
    guard.GRACE = GRACE
    if how == "stalled":
        for peers in guard._PEERS.values():
            peers.timeout = SHORT
    if dist.get_rank() == 1:
        leave_at(inside, how)
    began = time.monotonic()
    try:
        run(1)
    except CollectiveError as error:
        took = time.monotonic() - began
        try:
            again()
            other = "nothing"
        except CollectiveError as next_error:
            other = str(next_error)
        dist.destroy_process_group()
        return str(error), took, other
    return "no error"


def leave_at(operation, how):
    run = Peers._run

    def leaving(self, start, name, where):
        if name == operation and how == "killed":
            os._exit(9)
        if name == operation:
            time.sleep(SHORT + GRACE + 1)
        return run(self, start, name, where)

    Peers._run = leaving


@torch.no_grad()
def without_room():
    """Rank 1 has no memory for what came. What it raises, and what each is told when the layer runs."""
    run, again, _ = a_move()
    again()
    module = sys.modules["moestro.parallel.rebalance"]
    if dist.get_rank() == 1:

        def full(*_):
            raise MemoryError("no room")

        module.with_experts = full
    try:
        run(1)
        raised = "nothing"
    except MemoryError as error:
        raised = str(error)
    try:
        again()
        return raised, "nothing"
    except CollectiveError as error:
        return raised, str(error)


def begin_again(port, rank, world):
    """Leave the job, join another, and make a group there."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    return Peers.of(range(world), 20.0).size


@contextmanager
def collectives(found):
    run = Peers._run
    Peers._run = lambda self, start, name, where: (found.append(name), run(self, start, name, where))[1]
    try:
        yield
    finally:
        Peers._run = run


@torch.no_grad()
def other_slices(copied):
    """The collectives of a shared batch, and the error where rank 1 chose other experts for it."""
    world = dist.get_world_size()
    whole, batches, routings = build(Layer((1, world, 1)))
    layer = parallelize(MoE(FixedRouter(8), whole), mesh_of(1, world, 1))
    layer.dispatcher = SlicedDispatcher(layer.dispatcher, layer.dispatcher.place.peers)
    before, same_tokens.COPIED_BYTES = same_tokens.COPIED_BYTES, copied
    try:
        layer.router.routing, found = routings[0], []
        with collectives(found):
            layer(batches[0])
        ids = routings[0].expert_ids.flip(1) if dist.get_rank() == 1 else routings[0].expert_ids
        layer.router.routing = Routing(ids, routings[0].routing_weights)
        try:
            layer(batches[0])
            return found, "nothing"
        except CollectiveError as error:
            return found, str(error)
    finally:
        same_tokens.COPIED_BYTES = before


def gradient_of_slices():
    """The gradient of this rank's slice of what is gathered with a digest, beside what it is to be."""
    peers = Peers.of(range(dist.get_world_size()))
    y = torch.ones(3, 4, requires_grad=True)
    out = join_same(peers, y, routing_digest(peers, torch.arange(4)), ("a test", ""))
    target = torch.arange(out.numel(), dtype=torch.float32).view(out.shape)
    (out * target).sum().backward()
    return torch.equal(y.grad, target[3 * peers.rank : 3 * peers.rank + 3]), out.shape
