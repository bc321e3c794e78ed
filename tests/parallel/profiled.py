"""What ranks do in the tests of profiles of layers that are cut over them."""

from __future__ import annotations

import torch
import torch.distributed as dist

import moestro
from moestro.parallel import Placement, count_loads, move_experts, placements
from moestro.parallel.mesh import make_mesh
from parallel.cases import build, cut, place_of
from parallel.models import answer, quiet


@torch.no_grad()
def profiled(case):
    """Whether outputs stay, this rank's loads beside those of its routing, stages with time, bytes told and counted."""
    torch.use_deterministic_algorithms(True)  # tests of whole models leave it off
    whole, batches, routings = build(case)
    mesh, layer = cut(case, whole)
    number, _ = place_of(case, mesh)
    layer.router.routing = routings[number]
    dispatcher, before = layer.dispatcher, layer(batches[number])
    with moestro.profile(layer) as p:
        inside = layer(batches[number])
    report = p.report
    ids = routings[number].expert_ids
    loads = tuple(int((ids == e).sum()) for e in range(case.num_experts))
    found = tuple(load.loads for load in report.layers)
    spent = [stage for stage, seconds in report.phases["forward"].seconds.items() if seconds > 0]
    peers = _place(dispatcher).peers
    with moestro.profile(layer) as p:
        start = sum(each.total() for each in peers.sent.values())
        layer(batches[number])
        sent = sum(each.total() for each in peers.sent.values()) - start
    same = torch.equal(before, inside) and layer.dispatcher == dispatcher
    return same, found == (loads,), spent, sum(p.report.wire_bytes.values()) == sent


@torch.no_grad()
def moved(case):
    """Whether the dispatcher is of its own kind again after experts have moved inside; the tokens of both calls."""
    whole, batches, routings = build(case)
    mesh, layer = cut(case, whole)
    number, _ = place_of(case, mesh)
    layer.router.routing = routings[number]
    kind, placed = type(layer.dispatcher), placements(layer)[""]
    with moestro.profile(layer) as p:
        layer(batches[number])
        move_experts(layer, mesh, {"": Placement(placed.num_experts, placed.experts[::-1])})
        layer(batches[number])
    return type(layer.dispatcher) is kind, p.report.layers[0].tokens == 2 * len(batches[number])


@torch.no_grad()
def of_a_model(folder, ep, tp):
    """Whether logits stay, and whether loads are those that `count_loads` counts; the stages with time."""
    quiet()
    mesh = make_mesh(dist.get_world_size() // (ep * tp), ep, tp)
    model = moestro.load(folder, dtype="float32", device=mesh)
    with count_loads(model) as loads:
        before = answer(model)
    with moestro.profile(model) as p:
        inside = answer(model)
    report = p.report
    counted = {name: tuple(each.tolist()) for name, each in loads.counts.items()}
    spent = [stage for stage, seconds in report.phases["prompt"].seconds.items() if seconds > 0]
    return torch.equal(before[0], inside[0]), {load.name: load.loads for load in report.layers} == counted, spent


def _place(dispatcher):
    while not hasattr(dispatcher, "place"):
        dispatcher = dispatcher.inner
    return dispatcher.place
