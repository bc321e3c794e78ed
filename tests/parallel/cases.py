"""What ranks compute in the tests: a layer cut over them, beside the same layer on one device."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moestro
from moestro import MoE, Routing
from moestro.errors import CollectiveError
from moestro.parallel import (
    AllGatherDispatcher,
    AllReduceDispatcher,
    AllToAllDispatcher,
    Placement,
    SlicedDispatcher,
    guard,
    make_mesh,
    parallelize,
)
from moestro.parallel.guard import Peers, job_timeout
from moestro.parallel.mesh import mesh_place, ranks_along, timeout_of
from moestro.tolerances import disagreement
from moestro.types import EMPTY, GPT_OSS_SWIGLU, SWIGLU

DISPATCHERS = {
    "all-to-all": AllToAllDispatcher,
    "exact": partial(AllToAllDispatcher, exact=True),
    "all-gather": AllGatherDispatcher,
    "all-gather of 40": partial(AllGatherDispatcher, num_tokens=40),
    "all-reduce": partial(AllReduceDispatcher),
}


@dataclass(frozen=True)
class Layer:
    """A layer, how it is cut, and the tokens of each batch.

    Attributes:
        mesh: dp, ep, tp.
        tokens: of each rank along (dp, ep), its number of tokens; repeated for more ranks.
        route: how tokens choose: "random", "first" (all expert 0), "last", "none" (all empty), "holes" (some empty).
        placement: the experts of each rank along ep, or None.
    """

    mesh: tuple[int, int, int] = (1, 2, 1)
    num_experts: int = 8
    top_k: int = 2
    hidden_size: int = 64
    intermediate_size: int = 64
    tokens: tuple[int, ...] = (13, 7, 22, 5)
    route: str = "random"
    dispatcher: str = "all-to-all"
    dtype: torch.dtype = torch.float32
    format: str | None = None
    bias: bool = False
    interleaved: bool = False
    weight_on: str = "output"
    placement: tuple[tuple[int, ...], ...] | None = None


class FixedRouter(nn.Module):
    """Routes the tokens it is told to, whatever they are."""

    def __init__(self, num_experts):
        super().__init__()
        self.num_experts = num_experts
        self.routing = None

    def forward(self, x):
        return self.routing


def choose(case, generator, num_tokens):
    e, k = case.num_experts, case.top_k
    if case.route in ("first", "last"):
        ids = torch.full((num_tokens, k), EMPTY)
        ids[:, 0] = 0 if case.route == "first" else e - 1
    elif case.route == "none":
        ids = torch.full((num_tokens, k), EMPTY)
    else:
        ids = torch.rand(num_tokens, e, generator=generator).argsort(1)[:, :k].contiguous()
        if case.route == "holes":
            ids[torch.rand(ids.shape, generator=generator) < 0.4] = EMPTY
    return Routing(ids, torch.rand(ids.shape, generator=generator), case.weight_on)


def experts_of(case, generator):
    shape = case.num_experts, case.hidden_size, case.intermediate_size
    activation = GPT_OSS_SWIGLU if case.interleaved else SWIGLU
    experts = moestro.Experts(*shape, activation, bias=case.bias)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    experts = experts.to(case.dtype).requires_grad_(False)
    if case.format:
        experts = experts.quantize(case.format)
    return experts


def build(case):
    """The whole layer, the batch of every group of tokens, and its routing: the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    experts = experts_of(case, generator)
    dp, ep, _ = case.mesh
    groups = 1 if case.dispatcher == "all-reduce" else ep
    sizes = [case.tokens[i % len(case.tokens)] for i in range(dp * groups)]
    routings = [choose(case, generator, n) for n in sizes]
    batches = [torch.randn(n, case.hidden_size, generator=generator).to(case.dtype) for n in sizes]
    return experts, batches, routings


def joined(routings):
    ids, weights = (torch.cat(parts) for parts in zip(*routings, strict=True))
    return Routing(ids, weights, routings[0].weight_on)


mesh_of = cache(make_mesh)


def cut(case, experts, router=None, mesh=None):
    mesh = mesh_of(*case.mesh) if mesh is None else mesh
    layer = MoE(FixedRouter(case.num_experts) if router is None else router, experts)
    placement = None if case.placement is None else Placement(case.num_experts, case.placement)
    return mesh, parallelize(layer, mesh, DISPATCHERS[case.dispatcher], placement)


def place_of(case, mesh):
    """The number of this rank's batch, and those of the batches in its group."""
    groups = 1 if case.dispatcher == "all-reduce" else case.mesh[1]
    first = mesh_place(mesh, "dp") * groups
    own = 0 if groups == 1 else mesh_place(mesh, "ep")
    return first + own, range(first, first + groups)


@torch.no_grad()
def compare(case, repeats=1, ranks=None):
    """How this rank's output differs from one device's on the whole batch: a sentence, or None; and whether any bit.

    `ranks` [dp, ep, tp] are the mesh's where `make_mesh` is not to number them.
    """
    whole, batches, routings = build(case)
    mesh = None if ranks is None else DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "ep", "tp"))
    mesh, layer = cut(case, whole, mesh=mesh)
    number, group = place_of(case, mesh)
    reference = whole(torch.cat([batches[i] for i in group]), joined([routings[i] for i in group]))
    start = sum(len(batches[i]) for i in group if i < number)
    expected = reference[start : start + len(batches[number])]
    layer.router.routing = routings[number]
    found = [layer(batches[number]) for _ in range(repeats)]
    same = all(torch.equal(found[0], y) for y in found)
    return disagreement(found[0], expected), torch.equal(found[0], expected) and same


def compare_by(implementation, case, repeats):
    """`compare` where all experts are computed by one implementation."""
    with moestro.use(implementation=implementation):
        return compare(case, repeats)


@torch.no_grad()
def resident(case):
    """Bytes of experts that this rank keeps, its share of all, and the bytes of one expert."""
    whole, _, _ = build(case)
    total, one = (sum(t.nbytes for t in whole.weights.tensors), whole.weights.bytes_per_expert)
    _, layer = cut(case, whole)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in layer.experts.weights.tensors}
    return sum(storages.values()), total / (case.mesh[1] * case.mesh[2]), one


@torch.no_grad()
def traffic(case):
    """Bytes that this rank sent, by kind and receiver; its tokens' ranks and the size of a row."""
    whole, batches, routings = build(case)
    mesh, layer = cut(case, whole)
    number, _ = place_of(case, mesh)
    layer.router.routing = routings[number]
    peers = layer.dispatcher.place.peers
    before = {kind: dict(counts) for kind, counts in peers.sent.items()}
    layer(batches[number])
    after = {
        kind: {r: n - before.get(kind, {}).get(r, 0) for r, n in each.items()} for kind, each in peers.sent.items()
    }
    return {kind: each for kind, each in after.items() if any(each.values())}


@torch.no_grad()
def growing(case, sizes):
    """The same layer with more and then fewer tokens, and other routings: what differs from one device."""
    whole, _, _ = build(case)
    _, layer = cut(case, whole)
    said = []
    for step, size in enumerate(sizes):
        other = replace(case, tokens=tuple((size * (i + 1)) % 61 for i in range(4)))
        generator = torch.Generator().manual_seed(step)
        counts = [other.tokens[i % 4] for i in range(case.mesh[1])]
        routings = [choose(other, generator, n) for n in counts]
        batches = [torch.randn(n, case.hidden_size, generator=generator) for n in counts]
        rank, start = dist.get_rank(), sum(counts[: dist.get_rank()])
        expected = whole(torch.cat(batches), joined(routings))[start : start + counts[rank]]
        layer.router.routing = routings[rank]
        said.append(disagreement(layer(batches[rank]), expected))
    return said


def gradients(case):
    """How gradients of x, of routing weights and of this rank's experts differ from those of one device."""
    whole, batches, routings = build(case)
    mesh, layer = cut(case, whole)
    number, group = place_of(case, mesh)
    both = []
    for rows, routing, experts in (
        (batches[number], routings[number], None),
        (torch.cat([batches[i] for i in group]), joined([routings[i] for i in group]), whole),
    ):
        x, w = rows.clone().requires_grad_(), routing.routing_weights.clone().requires_grad_()
        routing = Routing(routing.expert_ids, w, routing.weight_on)
        run = layer.experts if experts is None else experts
        run.requires_grad_()
        if experts is None:
            layer.router.routing = routing
            y = layer(x)
        else:
            y = experts(x, routing)
        y.square().sum().backward()
        both.append((x.grad, w.grad, run.gate_up.grad))
    start = sum(len(batches[i]) for i in group if i < number)
    own = slice(start, start + len(batches[number]))
    held = list(layer.dispatcher.place.placement.experts[mesh_place(mesh, "ep")])
    (x, w, g), (all_x, all_w, all_g) = both
    return [disagreement(x, all_x[own]), disagreement(w, all_w[own]), disagreement(g, all_g[held])]


@torch.no_grad()
def sliced(case, exact):
    """A batch that all ranks share, of which each sends a slice."""
    whole, _, _ = build(case)
    mesh, layer = cut(case, whole)
    generator = torch.Generator().manual_seed(3)
    x, routing = torch.randn(11, case.hidden_size, generator=generator), choose(case, generator, 11)
    inner = replace(layer.dispatcher, exact=exact)
    layer.dispatcher = SlicedDispatcher(inner, Peers.of(ranks_along(mesh, "ep")))
    layer.router.routing = routing
    y, expected = layer(x), whole(x, routing)
    return disagreement(y, expected), torch.equal(y, expected)


@torch.no_grad()
def kept_pairs(case):
    """How many pairs this rank computes of a batch, and the ids of its own tokens."""
    whole, batches, routings = build(case)
    mesh, layer = cut(case, whole)
    number, _ = place_of(case, mesh)
    _, local, _ = layer.dispatcher.dispatch(batches[number], routings[number])
    return int((local.expert_ids >= 0).sum())


@torch.no_grad()
def another_batch(case, what, shared=False):
    """Rank 1 has other tokens than the ranks that it should have the same as: fewer, or routed otherwise."""
    whole, batches, routings = build(case)
    mesh, layer = cut(case, whole)
    if shared:
        layer.dispatcher = SlicedDispatcher(layer.dispatcher, Peers.of(ranks_along(mesh, "ep")), "a layer")
    x, routing = batches[0], routings[0]
    ids = routing.expert_ids
    if what == "ids":  # at any call
        layer.router.routing = routing
        assert all(torch.equal(layer(x), layer(x)) for _ in range(2))
    if dist.get_rank() == 1 and what == "size":
        x, ids = x[1:], ids[1:]
    if dist.get_rank() == 1 and what == "ids":
        ids = ids.clone()
        ids[3] = ids[3].flip(0)
    layer.router.routing = Routing(ids, routing.routing_weights[: len(ids)])
    return layer(x).shape


@torch.no_grad()
def fewer_later():
    """Rank 1 has a token less than before; the others have as many."""
    world = dist.get_world_size()
    whole, batches, routings = build(Layer((1, world, 1), dispatcher="all-reduce"))
    layer = parallelize(MoE(FixedRouter(8), whole), mesh_of(1, world, 1), AllReduceDispatcher, timeout=4.0)
    x, layer.router.routing = batches[0], routings[0]
    layer(x)
    if dist.get_rank() == 1:
        ids, weights = (t[1:] for t in (routings[0].expert_ids, routings[0].routing_weights))
        x, layer.router.routing = x[1:], Routing(ids, weights)
    return layer(x).shape


def other_options():
    """One rank wants each slot back, the others sums."""
    dispatcher = "exact" if dist.get_rank() == 1 else "all-to-all"
    return compare(Layer((1, dist.get_world_size(), 1), dispatcher=dispatcher))


def falling():
    mesh = DeviceMesh("cpu", [2, 1, 0], mesh_dim_names=("ep",))
    return parallelize(MoE(FixedRouter(8), build(Layer())[0]), mesh)


def timeouts():
    """Of a mesh, and of one that was made otherwise afterwards."""
    mesh = make_mesh(ep=dist.get_world_size(), timeout=77.0)
    return timeout_of(mesh), job_timeout(), timeout_of(init_device_mesh("cpu", (3,), mesh_dim_names=("ep",)))


def fp8_rows():
    """Rows of an 8-bit float, which gloo does not send as such, to the next rank."""
    peers = Peers.of(range(dist.get_world_size()))
    rows = (torch.arange(12.0).reshape(4, 3) + peers.rank).to(torch.float8_e4m3fn)
    splits = [0] * peers.size
    splits[(peers.rank + 1) % peers.size] = 4
    back = [0] * peers.size
    back[(peers.rank - 1) % peers.size] = 4
    got = peers.all_to_all(rows, splits, back, "rows", "a test")
    return (got.float() - torch.arange(12.0).reshape(4, 3)).unique().tolist()


def disagree(field):
    """Parallelize a layer that is another one on rank 1."""
    odd = dist.get_rank() == 1
    sizes = {"num_experts": 8, "hidden_size": 64} | (
        {field: 16} if odd and field in ("num_experts", "hidden_size") else {}
    )
    case = Layer((1, dist.get_world_size(), 1), **sizes)
    if field == "dtype" and odd:
        case = replace(case, dtype=torch.bfloat16)
    if field == "format" and odd:
        case = replace(case, format="int8")
    if field == "mesh" and odd:
        case = replace(case, mesh=(dist.get_world_size(), 1, 1))
    if field == "mesh":
        return make_mesh(*case.mesh)
    return cut(case, build(case)[0])[1].dispatcher is not None


@torch.no_grad()
def disagree_later():
    """Rows of another dtype on rank 0, once the layer runs: found before data moves."""
    case = Layer((1, dist.get_world_size(), 1))
    whole, batches, routings = build(case)
    _, layer = cut(case, whole)
    layer.router.routing = routings[0]
    layer(batches[0])
    layer.experts.double() if dist.get_rank() == 0 else layer.experts.half()
    return layer(batches[0].double() if dist.get_rank() == 0 else batches[0].half()).shape


@torch.no_grad()
def failing(dispatcher, when, how, timeout):
    """Rank 1 goes, or stays away, before the layer, inside it or after its dispatch. What the others are told."""
    guard.GRACE = 1.0
    world = dist.get_world_size()
    case = Layer((1, world, 1), dispatcher=dispatcher)
    whole, batches, routings = build(case)
    layer = parallelize(MoE(FixedRouter(8), whole), mesh_of(1, world, 1), DISPATCHERS[dispatcher], timeout=timeout)
    rank = dist.get_rank()
    own = rank if len(batches) > 1 else 0
    x, layer.router.routing = batches[own], routings[own]
    layer(x)

    def leave(*_):
        if rank == 1 and how == "killed":
            os._exit(9)
        if rank == 1:
            time.sleep(2 * timeout)

    if when == "before":
        leave()
    elif when == "inside":
        layer.experts.register_forward_pre_hook(leave)
    began = time.monotonic()
    try:
        layer(x)
        if when == "after":
            leave()
            layer(x)
    except CollectiveError as error:
        took = time.monotonic() - began
        again = "nothing"
        try:
            layer(x)
        except CollectiveError as other:
            again = str(other)
        dist.destroy_process_group()
        return str(error), took, again
    return "no error"


def alone():
    """A group that only this rank makes."""
    return Peers.of(range(dist.get_world_size()), 1.0).size


def agreements(number):
    """How many agreements all ranks have come to."""
    peers = Peers.of(range(dist.get_world_size()))
    for i in range(number):
        peers.agree({"a number": i}, "a test", "")
    return number


def refused():
    case = Layer((1, 3, 1), 2)
    return cut(case, build(case)[0])


def wrong_mesh():
    return make_mesh(ep=2)


def no_layer():
    return parallelize(nn.Linear(2, 2), mesh_of(1, 3, 1))


def twice():
    case = Layer((1, 3, 1))
    mesh, layer = cut(case, build(case)[0])
    return parallelize(layer, mesh)


def other_placement():
    case = Layer((1, 3, 1), placement=((0, 1, 2, 3), (4, 5, 6, 7)))
    return cut(case, build(case)[0])


def few_groups():
    case = Layer((1, 1, 3), format="mxfp4")
    return cut(case, build(case)[0])


def exact_slices():
    case = Layer((1, 1, 3), dispatcher="exact")
    return cut(case, build(case)[0])


def too_many():
    case = Layer((1, 3, 1), tokens=(41,), dispatcher="all-gather of 40")
    return compare(case)


def other_names():
    return parallelize(MoE(FixedRouter(8), build(Layer())[0]), init_device_mesh("cpu", (3,), mesh_dim_names=("rows",)))
