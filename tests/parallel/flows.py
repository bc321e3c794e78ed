"""What ranks compute in the tests of meshes of rows and columns, and of layers cut along the sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moestro import MoE, SharedExperts, TopKRouter
from moestro.moe import balance_loss
from moestro.parallel import MeshFlow, Peers, Placement, SequenceParallel, make_mesh
from moestro.reference import one_expert
from moestro.routing import switch_balance_loss
from moestro.tolerances import disagreement
from parallel.cases import Layer, experts_of


@dataclass(frozen=True)
class Flow:
    """A mesh of rows and columns, or with dp, ep and tp; tokens of each row; shared experts; a placement."""

    mesh: tuple[int, ...]
    tokens: tuple[int, ...] = (5, 9, 0, 2)
    num_experts: int = 10
    top_k: int = 3
    shared: bool = False
    placement: tuple[tuple[int, ...], ...] | None = None
    dtype: torch.dtype = torch.float32
    format: str | None = None


def whole_layer(case):
    """The layer on one device, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    sizes = Layer(num_experts=case.num_experts, hidden_size=64, intermediate_size=48, bias=True, dtype=case.dtype)
    experts = experts_of(Layer(**{**vars(sizes), "format": case.format}), generator)
    torch.manual_seed(1)
    router = TopKRouter(64, case.num_experts, case.top_k, scoring="softmax-renormalized", dtype=case.dtype)
    shared = SharedExperts(64, 22, 2, gate=True, bias=True, dtype=case.dtype) if case.shared else None
    if shared is not None:
        torch.nn.init.normal_(shared.down_bias)
    return MoE(router, experts, shared).requires_grad_(False)


def rows_and_columns(case):
    return init_device_mesh("cpu", case.mesh, mesh_dim_names=("rows", "columns"))


def flow_of(case):
    layer = whole_layer(case)
    mesh = rows_and_columns(case)
    placement = None if case.placement is None else Placement(case.num_experts, case.placement)
    flow = MeshFlow.of(layer, mesh, placement)
    row, column = mesh.get_local_rank("rows"), mesh.get_local_rank("columns")
    x = torch.randn(case.tokens[row], 64, generator=torch.Generator().manual_seed(row)).to(case.dtype)
    each = 64 // case.mesh[1]
    return layer, flow, x, slice(column * each, (column + 1) * each)


@torch.no_grad()
def flowing(case):
    """How this rank's part differs from the layer on one device, of three dimensions too; bytes along the row."""
    layer, flow, x, part = flow_of(case)
    before = dict(flow.columns.sent.get("hidden states", {}))
    y = flow(x[:, part])
    sent = {r: n - before.get(r, 0) for r, n in flow.columns.sent.get("hidden states", {}).items()}
    expected = layer(x)[:, part]
    again = flow(x[None, :, part])[0]
    return disagreement(y, expected), torch.equal(y, again), sent


@torch.no_grad()
def from_metadata(case):
    """The layer's output put together from the metadata alone, expert by expert, in loops; and one device's."""
    layer, flow, x, part = flow_of(case)
    found = flow.metadata(x[:, part])
    weights = flow.layer.experts.weights
    assert int(found.token_counts.sum()) == len(found.x) == len(found.positions) == len(found.sources)
    parts = []
    for e, (start, count) in enumerate(zip(found.expert_offsets.tolist(), found.token_counts.tolist(), strict=True)):
        if count:  # an expert without tokens is not read
            block = slice(start, start + count)
            y = one_expert(found.x[block].float(), weights, e) * found.routing_weights[block, None]
            parts += zip(found.sources[block].tolist(), found.positions[block].tolist(), y, strict=True)
    return parts, layer(x), dist.get_rank()


def evenness(logits, routing):
    return switch_balance_loss(logits.softmax(-1), routing)


def balanced(case, kind):
    """Whether a layer that is cut hands on the loss of the tokens that this rank has routed, as it was given it."""
    layer = whole_layer(case).train()
    layer.balance = evenness
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    if kind == "flow":
        mesh = rows_and_columns(case)
        each = 64 // case.mesh[1]
        column = mesh.get_local_rank("columns")
        cut = MeshFlow.of(layer, mesh)
        cut(x[:, column * each : (column + 1) * each].contiguous())
        routed = x
    else:
        mesh = make_mesh(*case.mesh)
        cut = SequenceParallel.of(layer, mesh, None, 1)
        cut(x)
        rank = cut.place.peers.rank
        routed = x[4 * rank : 4 * (rank + 1)]
    return disagreement(balance_loss(cut), evenness(layer.router.logits(routed), layer.router(routed)))


def gradients(case):
    """How the gradient of this rank's part of x differs from that of one device."""
    layer, flow, x, part = flow_of(case)
    own, whole = x[:, part].clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = flow(own), layer(whole)
    target = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
    (y * target[:, part]).sum().backward()
    (expected * target).sum().backward()
    return disagreement(own.grad, whole.grad[:, part])


def refused_flow(what):
    case = Flow((1, 3), num_experts=2 if what == "experts" else 10, top_k=2)
    layer, mesh = whole_layer(case), rows_and_columns(case)
    if what == "names":
        mesh = make_mesh(ep=3)
    if what == "falling":
        mesh = DeviceMesh("cpu", [[2, 1, 0]], mesh_dim_names=("rows", "columns"))
    if what == "shared":
        layer.shared_experts = torch.nn.Linear(64, 64)
    if what in ("falling", "names", "experts", "hidden"):
        return MeshFlow.of(layer, mesh)
    rows = init_device_mesh("cpu", (3, 1), mesh_dim_names=("rows", "columns"))
    flow = MeshFlow.of(layer, rows)
    return flow(torch.zeros(3, 32))


@torch.no_grad()
def routed_otherwise():
    """A rank of the row has another router: it chooses other experts for the same tokens."""
    case = Flow((1, 2), (9,))
    _, flow, x, part = flow_of(case)
    if dist.get_rank() == 1:
        flow.layer.router.weight.neg_()
    return flow(x[:, part]).shape


@torch.no_grad()
def in_sequence(case, sizes, shards=False):
    """For each number of tokens: how it differs from one device, its mode, rows that router and shared experts saw."""
    layer = whole_layer(case)
    mesh = make_mesh(*case.mesh)
    placement = None if case.placement is None else Placement(case.num_experts, case.placement)
    cut = SequenceParallel.of(layer, mesh, placement)
    peers, said = cut.place.peers, []
    for number, size in enumerate(sizes):
        x = torch.randn(size, 64, generator=torch.Generator().manual_seed(number)).to(case.dtype)
        expected = layer(x)
        seen = {"router": 0, "shared": 0}
        hooks = [
            module.register_forward_hook(lambda m, given, y, name=name, seen=seen: seen.update({name: len(given[0])}))
            for name, module in (("router", cut.layer.router), ("shared", cut.layer.shared_experts))
            if module is not None
        ]
        before = dict(peers.sent.get("routing", {}))
        if shards:
            ends = [size * (i + 1) // peers.size for i in range(peers.size)]
            own = slice([0, *ends][peers.rank], ends[peers.rank])
            y, expected = cut.on_shard(x[own]), expected[own]
        else:
            y = cut(x)
        sent = {r: n - before.get(r, 0) for r, n in peers.sent.get("routing", {}).items()}
        for hook in hooks:
            hook.remove()
        said.append((disagreement(y, expected), cut.mode(size), seen, sent))
    return said


def refused_sequence(what):
    case = Flow((1, 3, 1), num_experts=2 if what == "experts" else 10, top_k=2)
    layer = whole_layer(case)
    if what == "shared":
        layer.shared_experts = torch.nn.Linear(64, 64)
    tokens = 0 if what == "tokens" else 16
    if what == "disagree" and dist.get_rank() == 1:
        tokens = 5
    return SequenceParallel.of(layer, make_mesh(*case.mesh), None, tokens)


@torch.no_grad()
def other_sequence():
    """Rank 1 has other tokens, of as many, in a step of few."""
    cut = SequenceParallel.of(whole_layer(Flow((1, 2, 1))), make_mesh(ep=2))
    assert Peers.of(range(2)) is cut.place.peers
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    return cut(x).shape


@torch.no_grad()
def other_dtype(what):
    """Rank 1 has rows of another dtype than its neighbour, of as many tokens."""
    if what == "flow":
        _, layer, x, part = flow_of(Flow((1, 2)))
        x = x[:, part]
    else:
        layer = SequenceParallel.of(whole_layer(Flow((1, 2, 1))), make_mesh(ep=2))
        x = torch.zeros(64 if what == "shards" else 3, 64)
    return layer(x.double() if dist.get_rank() == 1 else x).shape


@torch.no_grad()
def other_prompt():
    """Rank 1 has another last token, of a prompt of as many."""
    cut = SequenceParallel.of(whole_layer(Flow((1, 2, 1))), make_mesh(ep=2), name="layers.7")
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(0))
    x[-1] *= -1 if dist.get_rank() == 1 else 1
    return cut(x).shape


def sequence_backward(num_tokens):
    cut = SequenceParallel.of(whole_layer(Flow((1, 2, 1))), make_mesh(ep=2))
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    cut(x).sum().backward()
    return x.grad


def other_shared():
    """Rank 1 has no shared experts."""
    case = Flow((1, 2, 1), shared=dist.get_rank() == 0)
    return SequenceParallel.of(whole_layer(case), make_mesh(ep=2))


def no_tensor(what):
    if what == "flow":
        return flow_of(Flow((1, 2)))[1](None)
    return SequenceParallel.of(whole_layer(Flow((1, 2, 1))), make_mesh(ep=2))([1.0])
