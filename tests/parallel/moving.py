"""What ranks do in the tests of experts that move while a module is in use."""

from __future__ import annotations

import torch
import torch.distributed as dist

import moestro
from hf.checkpoints import IDS
from moestro import MoE
from moestro.parallel import (
    Balanced,
    Peers,
    Placement,
    SequenceParallel,
    SlicedDispatcher,
    count_loads,
    move_experts,
    parallelize,
    placements,
    rebalance,
)
from moestro.parallel.mesh import make_mesh, ranks_along
from moestro.parallel.simulate_traces import zipf_ids
from moestro.tolerances import disagreement
from moestro.types import Routing
from parallel.cases import FixedRouter, Layer, build, cut, joined, place_of
from parallel.models import answer, quiet


def sent_along(mesh):
    return dict(Peers.of(ranks_along(mesh, "ep")).sent.get("experts", {}))


@torch.no_grad()
def moved(case, rows, back=True, sliced=False):
    """Whether outputs stay, before and after and when moved back; how they differ from one device; bytes sent."""
    torch.use_deterministic_algorithms(True)  # tests of whole models leave it off
    whole, batches, routings = build(case)
    mesh, layer = cut(case, whole)
    if sliced:
        layer.dispatcher = SlicedDispatcher(layer.dispatcher, Peers.of(ranks_along(mesh, "ep")))
    number, group = (0, [0]) if sliced else place_of(case, mesh)
    layer.router.routing = routings[number]
    expected = whole(torch.cat([batches[i] for i in group]), joined([routings[i] for i in group]))
    start = sum(len(batches[i]) for i in group if i < number)
    first = placements(layer)[""]
    outputs, sent = [layer(batches[number])], []
    for placement in [Placement(case.num_experts, rows), *([first] if back else [])]:
        before = sent_along(mesh)
        found = move_experts(layer, mesh, {"": placement})
        assert placements(layer)[""] == placement
        assert layer.experts.num_experts == len(placement.experts[layer_rank(layer)])
        outputs.append(layer(batches[number]))
        sent.append({rank: n - before.get(rank, 0) for rank, n in sent_along(mesh).items() if n != before.get(rank, 0)})
    same = all(torch.equal(outputs[0], y) for y in outputs)
    expected = expected[start : start + len(batches[number])]
    return same, disagreement(outputs[1], expected), sent, [len(each) for each in found.values()]


def layer_rank(layer):
    found = layer.dispatcher
    while hasattr(found, "inner"):
        found = found.inner
    return found.place.own


@torch.no_grad()
def under_zipf(num_tokens, num_slots):
    """Rows that this rank computes before and after it was balanced by other tokens, and whether outputs stayed."""
    torch.use_deterministic_algorithms(True)
    world, rank = dist.get_world_size(), dist.get_rank()
    case = Layer((1, world, 1), 64, 2, 16, 16, (num_tokens,), dispatcher="exact")
    whole, _, _ = build(case)
    mesh, layer = cut(case, whole)

    def batch(seed):
        # The i-th expert is the i-th likeliest, as with experts that are numbered by their use.
        ids = zipf_ids(world * num_tokens, 64, 2, 0.8, seed)
        order = torch.bincount(zipf_ids(4096, 64, 2, 0.8, 99).flatten(), minlength=64).argsort(descending=True)
        ids = order.argsort()[ids].view(world, num_tokens, 2)[rank]
        generator = torch.Generator().manual_seed(seed * 100 + rank)
        x = torch.randn(num_tokens, 16, generator=generator)
        return x, Routing(ids, torch.rand(ids.shape, generator=generator))

    def pairs(x, routing):
        return int((layer.dispatcher.dispatch(x, routing)[1].expert_ids >= 0).sum())

    with count_loads(layer) as loads:
        x, layer.router.routing = batch(1)
        layer(x)
    counts = loads.total(mesh)
    x, layer.router.routing = batch(2)
    before, first = layer(x), pairs(x, layer.router.routing)
    found = rebalance(layer, mesh, counts, num_slots)
    after, second = layer(x), pairs(x, layer.router.routing)
    return first, second, torch.equal(before, after), int(counts[""].sum()), len(found[""])


@torch.no_grad()
def of_a_model(folder, form, ep, tp, step):
    """Logits and bytes of a loaded model before, after its experts were balanced, and after they went back."""
    quiet()
    mesh = make_mesh(dist.get_world_size() // (ep * tp), ep, tp)
    model = moestro.load(folder, form, dtype="float32", device=mesh)
    with count_loads(model) as loads:
        found = [answer(model)]
    counts = loads.total(mesh)
    first = placements(model)
    if step == "balanced":
        num_slots = first[next(iter(first))].num_experts + ep
        rebalance(model, mesh, counts, num_slots, Balanced(hysteresis=0.0))
    else:
        move_experts(model, mesh, {name: Placement(p.num_experts, p.experts[::-1]) for name, p in first.items()})
    assert placements(model) != first
    found.append(answer(model))
    move_experts(model, mesh, first)
    found.append(answer(model))
    return found, {name: int(each.sum()) for name, each in counts.items()}, int(IDS.numel())


def disagreeing():
    """Rank 1 wants another placement than the others."""
    world = dist.get_world_size()
    case = Layer((1, world, 1))
    mesh, layer = cut(case, build(case)[0])
    rows = Placement.contiguous(8, world).experts
    return move_experts(layer, mesh, {"": Placement(8, rows[::-1] if dist.get_rank() == 1 else rows)})


def misnamed():
    case = Layer((1, dist.get_world_size(), 1))
    mesh, layer = cut(case, build(case)[0])
    return move_experts(layer, mesh, {"layers.0": Placement.contiguous(8, dist.get_world_size())})


def too_few_ranks():
    case = Layer((1, dist.get_world_size(), 1))
    mesh, layer = cut(case, build(case)[0])
    return move_experts(layer, mesh, {"": Placement.contiguous(8, 2)})


@torch.no_grad()
def counted_and_moved(rows):
    """Experts move while loads are counted. How outputs differ inside and afterwards; counts; what is left around."""
    torch.use_deterministic_algorithms(True)
    case = Layer((1, dist.get_world_size(), 1), dispatcher="exact")
    whole, batches, routings = build(case)
    mesh, layer = cut(case, whole)
    number, _ = place_of(case, mesh)
    layer.router.routing = routings[number]
    outputs, kind = [layer(batches[number])], type(layer.dispatcher)
    with count_loads(layer) as outer:
        layer(batches[number])
        with count_loads(layer) as loads:
            layer(batches[number])
            move_experts(layer, mesh, {"": Placement(8, rows)})
            outputs.append(layer(batches[number]))
        outputs.append(layer(batches[number]))
    outputs.append(layer(batches[number]))
    counts = [int(each.counts[""].sum()) // routings[number].expert_ids.numel() for each in (outer, loads)]
    return [torch.equal(outputs[0], y) for y in outputs], counts, type(layer.dispatcher) is kind


def by_another_mesh():
    """Cut over ranks 0 1 and 2 3, moved over 0 2 and 1 3."""
    case = Layer((2, 2, 1))
    _, layer = cut(case, build(case)[0])
    return move_experts(layer, make_mesh(1, 2, 2), {"": Placement.contiguous(8, 2)})


def stays():
    """Whether a layer that has its placement already is left as it is; what is said to have moved."""
    case = Layer((1, dist.get_world_size(), 1))
    mesh, layer = cut(case, build(case)[0])
    experts, dispatcher = layer.experts, layer.dispatcher
    found = move_experts(layer, mesh, placements(layer))
    return found, layer.experts is experts and layer.dispatcher is dispatcher


def timeouts():
    """Of the groups that count and move a layer with a timeout of its own."""
    world = dist.get_world_size()
    layer = parallelize(MoE(FixedRouter(8), build(Layer())[0]), make_mesh(ep=world), timeout=66.0)
    found, made = set(), Peers.of.__func__
    try:
        Peers.of = classmethod(lambda cls, ranks, timeout=None: (found.add(timeout), made(cls, ranks, timeout))[1])
        with count_loads(layer) as loads:
            pass
        rebalance(layer, make_mesh(ep=world, timeout=66.0), loads.total(make_mesh(ep=world, timeout=66.0)))
    finally:
        Peers.of = classmethod(made)
    return found


def of_other_modules(what):
    """A flow or a sequence, which have placements of their own."""
    from parallel import flows

    if what == "flow":
        module = flows.flow_of(flows.Flow((1, dist.get_world_size())))[1]
    else:
        module = SequenceParallel.of(flows.whole_layer(flows.Flow((1, 3, 1))), make_mesh(ep=dist.get_world_size()))
    with count_loads(module):
        return "no error"


def nothing_cut():
    case = Layer((1, dist.get_world_size(), 1))
    mesh, _ = cut(case, build(case)[0])
    return move_experts(torch.nn.Linear(2, 2), mesh, {"": Placement.contiguous(8, 2)})
