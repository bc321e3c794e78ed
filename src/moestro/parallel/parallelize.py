"""`parallelize`: cut the experts of a layer, or of every layer of a module, over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moestro.errors import invalid_input
from moestro.experts import Experts
from moestro.moe import Dispatcher, MoE
from moestro.parallel.dispatchers import AllReduceDispatcher, AllToAllDispatcher, Place
from moestro.parallel.guard import DEFAULT_TIMEOUT, Peers
from moestro.parallel.mesh import check_mesh, mesh_place, mesh_size, ranks_along
from moestro.parallel.placement import Placement
from moestro.parallel.shard import slice_of, take_experts, take_slice
from moestro.weights import ExpertWeights

OPERATION = "parallelize"

Module = TypeVar("Module", bound=nn.Module)
MakeDispatcher = Callable[[Place], Dispatcher]
"""A class of dispatchers, or a `functools.partial` of one: partial(AllToAllDispatcher, exact=True)."""


def parallelize(
    module: Module,
    mesh: DeviceMesh,
    dispatcher: MakeDispatcher = AllToAllDispatcher,
    placement: Placement | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Module:
    """Cut the experts of every `moestro.MoE` layer in a module over the ranks of a mesh, in place; collective.

    Along "ep" each rank keeps some of the experts, along "tp" a slice of each expert's intermediate size, along "dp"
    nothing is cut. A rank keeps its own part and nothing else of the experts, in whatever format they are. Ranks along
    dp and ep have tokens of their own, ranks along tp the same; with `AllReduceDispatcher` all but those along dp have
    the same. Routers and shared experts stay whole on every rank.

    Args:
        module: a layer, or a module with layers in it. All ranks pass the same weights.
        mesh: of `make_mesh`, with dimensions among dp, ep and tp.
        dispatcher: makes each layer's dispatcher from its `Place`: `AllToAllDispatcher`, `AllGatherDispatcher`,
            `AllReduceDispatcher`, or a partial of one.
        placement: which rank along ep holds which experts; contiguous ranges if None.
        timeout: seconds that a collective may take.

    Returns:
        The same module.

    Raises:
        InvalidInputError: no such layer in it, a layer that has a dispatcher already, more ranks than experts; a
            placement of other experts or on other ranks; another mesh.
        UnsupportedError: experts that cannot be cut along I so often.
        CollectiveError: ranks differ in sizes, formats, versions or placement, or one does not come.
    """
    check_mesh(mesh, OPERATION)
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, MoE)}
    if not layers:
        raise invalid_input(
            OPERATION,
            got=f"{type(module).__name__}, without a moestro.MoE in it",
            needs="a layer, or a module with layers in it",
            fix="Load a model of Transformers with moestro.load(path, mesh=mesh).",
        )
    taken = next((name for name, layer in layers.items() if layer.dispatcher is not None), None)
    if taken is not None:
        raise invalid_input(
            OPERATION,
            got=f"layer {taken or 'itself'}, which has a dispatcher",
            needs="layers on one device",
            fix="Build the layer without one, or leave it as it is.",
        )
    cuts = {name: Cut.of(name, layer.experts.weights, mesh, placement) for name, layer in layers.items()}
    agree_on({name: cut.said for name, cut in cuts.items()}, mesh, timeout)
    for name, layer in layers.items():
        cut = cuts[name]
        layer.experts = keep_own(layer.experts, cut)
        layer.dispatcher = make_dispatcher(cut, mesh, dispatcher, timeout)
    return module


class Cut:
    """What a rank keeps of a layer's experts.

    Attributes:
        name: the layer's.
        placement: along ep.
        own: the ids of the experts that this rank keeps.
        part: which slice along I it keeps, and of how many.
        said: what all ranks must say of the layer.
    """

    def __init__(self, name: str, placement: Placement, mesh: DeviceMesh, said: dict[str, object]) -> None:
        self.name, self.placement = name, placement
        self.own = placement.experts[mesh_place(mesh, "ep")]
        self.part = (mesh_place(mesh, "tp"), mesh_size(mesh, "tp"))
        self.said = {**said, "placement": placement.experts}

    @classmethod
    def of(cls, name: str, weights: ExpertWeights, mesh: DeviceMesh, placement: Placement | None = None) -> Cut:
        """The cut of these experts on this mesh.

        Raises:
            InvalidInputError: more ranks along ep than experts, or placement for other ranks or experts.
            UnsupportedError: as for `slice_of`.
        """
        placement = find_placement(name, weights.num_experts, mesh, placement)
        cut = cls(name, placement, mesh, describe(weights))
        if cut.part[1] > 1:
            slice_of(weights, *cut.part, OPERATION)
        return cut

    def take(self, weights: ExpertWeights) -> ExpertWeights:
        """What this rank keeps of the layer's experts, with memory of its own."""
        own = take_experts(weights, self.own)
        return own if self.part[1] == 1 else take_slice(own, *self.part, OPERATION)


def find_placement(name: str, num_experts: int, mesh: DeviceMesh, placement: Placement | None) -> Placement:
    """The placement along ep: those given, if they fit, or contiguous ranges.

    Raises:
        InvalidInputError: they do not fit, or there are more ranks than experts.
    """
    size = mesh_size(mesh, "ep")
    found = Placement.contiguous(num_experts, size) if placement is None else placement
    if not all(found.experts):
        raise invalid_input(
            OPERATION,
            got=f"{num_experts} experts of {name or 'the layer'} for ep={size}, with none on some ranks",
            needs="at least one expert a rank",
            fix="Lower ep and raise dp or tp, or give a placement with replicas.",
        )
    if found.num_experts != num_experts or found.num_ranks != size:
        raise invalid_input(
            OPERATION,
            got=f"placement of {found.num_experts} experts on {found.num_ranks} ranks",
            needs=f"{num_experts} experts on {size} ranks, as the layer and the mesh have them",
            fix="Make them for this layer, or pass None.",
        )
    return found


def describe(weights: ExpertWeights) -> dict[str, object]:
    """What the ranks compare of a layer's experts before they cut them."""
    return {
        "sizes [E, H, I]": [weights.num_experts, weights.hidden_size, weights.intermediate_size],
        "formats": [weights.gate_up.format.name, weights.down.format.name, weights.input_format],
        "dtypes": sorted({str(t.dtype) for t in weights.tensors}),
        "activation": weights.activation.code,
    }


def describe_shared(layer: MoE) -> dict[str, object]:
    """What the ranks compare of shared experts of which each computes a part."""
    shared = layer.shared_experts
    return {"shared experts": [] if shared is None else [list(p.shape) for p in shared.parameters()]}


def agree_on(said: dict[str, dict[str, object]], mesh: DeviceMesh, timeout: float) -> None:
    """Compare, over the whole mesh, what every rank is about to do.

    Raises:
        CollectiveError: they differ, or one does not come.
    """
    peers = Peers.of(ranks_along(mesh, *(mesh.mesh_dim_names or ())), timeout)
    peers.agree({"layers": sorted(said), "torch": torch.__version__}, OPERATION, "")
    flat = {f"{field} of {name or 'the layer'}": value for name, each in said.items() for field, value in each.items()}
    peers.agree(flat, OPERATION, "")


def keep_own(experts: Experts, cut: Cut) -> Experts:
    """The module over what this rank keeps."""
    made = Experts.from_weights(cut.take(experts.weights), experts.strategy)
    return made.train(experts.training)


def make_dispatcher(cut: Cut, mesh: DeviceMesh, make: MakeDispatcher, timeout: float) -> Dispatcher:
    """A layer's dispatcher on this mesh."""
    tp = mesh_size(mesh, "tp")
    made = make.func if isinstance(make, partial) else make
    shared = isinstance(made, type) and issubclass(made, AllReduceDispatcher)
    if shared:
        peers = Peers.of(ranks_along(mesh, "ep", "tp"), timeout)
        return make(Place(cut.placement, peers, None, mesh_place(mesh, "ep"), cut.name))
    slices = Peers.of(ranks_along(mesh, "tp"), timeout) if tp > 1 else None
    peers = Peers.of(ranks_along(mesh, "ep"), timeout)
    return make(Place(cut.placement, peers, slices, None, cut.name))
