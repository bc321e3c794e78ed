"""Another placement for a running module: experts are counted, placed by what was counted, and sent to their ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moestro.errors import invalid_input, unsupported
from moestro.experts import Experts
from moestro.moe import Dispatcher, MoE
from moestro.parallel.balance import Balanced, Move, balance, moves
from moestro.parallel.dispatchers import Place
from moestro.parallel.flow import MeshFlow
from moestro.parallel.guard import DEFAULT_TIMEOUT, Peers
from moestro.parallel.mesh import check_mesh, mesh_place, mesh_size, ranks_along
from moestro.parallel.parallelize import find_placement
from moestro.parallel.placement import Placement
from moestro.parallel.sequence import SequenceParallel
from moestro.parallel.shard import expert_tensors, with_experts
from moestro.routing import expert_counts
from moestro.types import Routing
from moestro.weights import ExpertWeights

OPERATION = "move_experts"


class CutLayer(Protocol):
    """A layer whose experts are cut over ranks."""

    @property
    def weights(self) -> ExpertWeights:
        """What this rank keeps."""
        ...

    @property
    def dispatcher(self) -> Dispatcher: ...

    def put_weights(self, weights: ExpertWeights) -> None:
        """Keep these in their place."""
        ...

    def put_dispatcher(self, dispatcher: Dispatcher) -> None: ...


@dataclass(frozen=True)
class _Layer:
    """A `moestro.MoE` as such a layer."""

    layer: MoE

    @property
    def weights(self) -> ExpertWeights:
        return self.layer.experts.weights

    @property
    def dispatcher(self) -> Dispatcher:
        assert self.layer.dispatcher is not None
        return self.layer.dispatcher

    def put_weights(self, weights: ExpertWeights) -> None:
        before = self.layer.experts
        self.layer.experts = Experts.from_weights(weights, before.strategy).train(before.training)

    def put_dispatcher(self, dispatcher: Dispatcher) -> None:
        self.layer.dispatcher = dispatcher


def _own_layers(module: nn.Module) -> dict[str, CutLayer]:
    inside = {m for each in module.modules() if isinstance(each, MeshFlow | SequenceParallel) for m in each.modules()}
    found = {name: m for name, m in module.named_modules() if isinstance(m, MoE) and m not in inside}
    return {name: _Layer(layer) for name, layer in found.items() if _place(layer.dispatcher) is not None}


FINDERS: list[Callable[[nn.Module], dict[str, CutLayer]]] = [_own_layers]
"""What finds the cut layers of a module, by their names; `moestro.hf` adds those of Transformers."""


def find_cut_layers(module: nn.Module) -> dict[str, CutLayer]:
    """As `cut_layers`, where there may be none."""
    return {name: layer for find in FINDERS for name, layer in find(module).items()}


def cut_layers(module: nn.Module, operation: str) -> dict[str, CutLayer]:
    """The layers of a module whose experts are cut over ranks, by their names.

    Raises:
        InvalidInputError: there is none.
    """
    found = find_cut_layers(module)
    if not found:
        raise invalid_input(
            operation,
            got=f"{type(module).__name__}, without a layer whose experts are cut",
            needs="a layer of moestro.parallel.parallelize, or a model of moestro.load(path, device=mesh)",
            fix="Cut it first. Experts of MeshFlow, of SequenceParallel and of models that Transformers has cut stay.",
        )
    return found


def placements(module: nn.Module) -> dict[str, Placement]:
    """Where the experts of each cut layer are now, by the layer's name.

    Raises:
        InvalidInputError: no layer is cut.
    """
    return {name: _placed(layer).placement for name, layer in cut_layers(module, "placements").items()}


class Loads:
    """The rows of each expert, as this rank's routers have chosen.

    Attributes:
        counts: int64 [E] of each layer, by its name.
        timeout: seconds that a collective may take, where nobody says otherwise: that of the layers.
    """

    def __init__(self, counts: dict[str, Tensor], timeout: float = DEFAULT_TIMEOUT) -> None:
        self.counts, self.timeout = counts, timeout

    def total(self, mesh: DeviceMesh, timeout: float | None = None) -> dict[str, Tensor]:
        """The counts of all ranks of the mesh added up, the same on each; collective.

        Tokens that several ranks have are counted by each, which changes no proportion.
        """
        peers = Peers.of(ranks_along(mesh, *(mesh.mesh_dim_names or ())), self.timeout if timeout is None else timeout)
        sizes = {name: len(each) for name, each in self.counts.items()}
        peers.agree({"layers and their experts": sizes}, "Loads.total", "")
        joined = peers.all_reduce(torch.cat([*self.counts.values()]), "loads", "")
        return dict(zip(sizes, torch.split(joined, [*sizes.values()]), strict=True))


@dataclass(frozen=True)
class _Counting(Dispatcher):
    """Another dispatcher, whose routings are counted before anything is sent."""

    inner: Dispatcher
    counts: Tensor

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing, Any]:
        self.counts.add_(expert_counts(routing, len(self.counts)).to(self.counts))
        return self.inner.dispatch(x, routing)

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        return self.inner.combine(y, handle)


@contextmanager
def count_loads(module: nn.Module) -> Iterator[Loads]:
    """Inside, the rows of each expert are counted where they are routed, in every cut layer of a module.

    Raises:
        InvalidInputError: no layer is cut.
    """
    layers = cut_layers(module, "count_loads")
    counts = {
        name: torch.zeros(_placed(layer).placement.num_experts, dtype=torch.int64, device=_device(layer))
        for name, layer in layers.items()
    }
    for name, layer in layers.items():
        layer.put_dispatcher(_Counting(layer.dispatcher, counts[name]))
    try:
        yield Loads(counts, _timeout_of(layers.values()))
    finally:
        for name, layer in layers.items():  # what is there now: experts may have moved inside
            layer.put_dispatcher(without(layer.dispatcher, partial(_counts, counts[name])))


def rebalance(
    module: nn.Module,
    mesh: DeviceMesh,
    loads: Mapping[str, Tensor],
    num_slots: int | None = None,
    policy: Balanced = Balanced(),  # noqa: B008 (frozen)
    timeout: float | None = None,
) -> dict[str, tuple[Move, ...]]:
    """`balance` each layer's loads from the placement in use, and `move_experts`; collective.

    Args:
        module: with cut layers.
        mesh: that they are cut over.
        loads: [E] of layers by their names, the same on every rank: of `Loads.total`. Other layers stay as they are.
        num_slots: experts that all ranks along ep hold together in a layer; None for as many as now.
        policy: as for `balance`; max_moves is a layer's.
        timeout: as for `move_experts`.

    Returns:
        What every rank has received, by layer.

    Raises:
        InvalidInputError, CollectiveError, UnsupportedError: as of `balance` and `move_experts`.
    """
    now, ranks = placements(module), mesh_size(mesh, "ep")
    _check_names(loads, now, "rebalance")
    wanted = {name: balance(each, ranks, num_slots, policy, now[name]) for name, each in loads.items()}
    return move_experts(module, mesh, wanted, timeout)


def move_experts(
    module: nn.Module, mesh: DeviceMesh, wanted: Mapping[str, Placement], timeout: float | None = None
) -> dict[str, tuple[Move, ...]]:
    """Bring the experts of a running module to another placement, between two steps, in place; collective.

    Only experts that come to a rank which did not hold them are sent, each as it is stored, by a rank that holds it. A
    layer has memory for both placements until its own move is done; layers move one after the other. A `moestro.MoE`
    has a new module of experts then: make an optimizer after the move. A layer that has its placement already is left
    as it is. Where a move fails once experts travel, the groups of all these layers refuse to run from then on.

    Args:
        module: with layers of `parallelize`, or a model of `moestro.load(path, device=mesh)`.
        mesh: that they are cut over; each copy along dp moves its own.
        wanted: the placements along ep of layers by their names; other layers stay as they are.
        timeout: seconds that a collective may take; None for that of the layers.

    Returns:
        What every rank has received, by layer; the bytes are `Peers.sent["experts"]` of the ranks along ep.

    Raises:
        InvalidInputError: no layer is cut, or none has such a name; a placement of other experts or on other ranks; a
            rank without experts; another mesh.
        UnsupportedError: experts with an output_norm.
        CollectiveError: ranks differ in what they want, or one does not come.
    """
    check_mesh(mesh, OPERATION)
    layers = cut_layers(module, OPERATION)
    _check_names(wanted, layers, OPERATION)
    for name, placement in wanted.items():
        _check_move(name, layers[name], mesh, placement)
    limit = _timeout_of(layers[name] for name in wanted) if timeout is None else timeout
    said = {name: [_placed(layers[name]).placement.experts, wanted[name].experts] for name in sorted(wanted)}
    peers = Peers.of(ranks_along(mesh, *(mesh.mesh_dim_names or ())), limit)
    peers.agree({"layers": [*said]}, OPERATION, "")
    peers.agree({f"placements of {name or 'the layer'}": each for name, each in said.items()}, OPERATION, "")
    along, rank = Peers.of(ranks_along(mesh, "ep"), limit), mesh_place(mesh, "ep")
    found, name = {}, ""
    try:
        for name in sorted(wanted):
            layer, after = layers[name], wanted[name]
            before = _placed(layer).placement
            found[name] = moves(before, after)
            if before != after:
                layer.put_weights(_exchanged(layer.weights, (before, after), along, rank, name))
                layer.put_dispatcher(_with_placement(layer.dispatcher, after))
    except BaseException as error:
        why = f"{OPERATION} of {name or 'the layer'} ended with {type(error).__name__}: {error}"
        places = [_placed(layers[each]) for each in wanted]
        for group in {along, *(p.peers for p in places), *(p.slices for p in places if p.slices is not None)}:
            group.give_up(why)  # ranks may hold experts of different placements now
        raise
    return found


def _check_move(name: str, layer: CutLayer, mesh: DeviceMesh, placement: Placement) -> None:
    """Raise for what cannot move: on every rank, before anything has."""
    place, along = _placed(layer), ranks_along(mesh, "ep")
    find_placement(name, place.placement.num_experts, mesh, placement)
    groups = (along, ranks_along(mesh, "ep", "tp"))  # of `AllReduceDispatcher` the second
    slices = None if place.slices is None else [*place.slices.ranks]
    if (
        [*place.peers.ranks] not in groups
        or place.own != mesh_place(mesh, "ep")
        or slices not in (None, ranks_along(mesh, "tp"))
        or place.placement.num_ranks != len(along)
    ):
        raise invalid_input(
            OPERATION,
            got=f"{name or 'the layer'}, cut over {place.placement.num_ranks} ranks, of which this one, among "
            f"{[*place.peers.ranks]}, is number {place.own}; and a mesh whose ranks along ep are {along}",
            needs="the mesh that it was cut over",
            fix="Pass the mesh of parallelize or load.",
        )
    if layer.weights.output_norm is not None:
        raise unsupported(
            OPERATION,
            got=f"{name or 'the layer'}, whose experts have an output_norm",
            needs="experts that are weights and biases",
            fix="Leave this layer out.",
        )


@torch.no_grad()
def _exchanged(
    weights: ExpertWeights, placed: tuple[Placement, Placement], peers: Peers, rank: int, name: str
) -> ExpertWeights:
    """What this rank keeps in the second placement, of what it keeps in the first and of what others send."""
    before, after = (placement.experts[rank] for placement in placed)
    all_moves = moves(*placed)
    given = sorted((m for m in all_moves if m.source == rank), key=lambda m: m.rank)
    taken = sorted((m for m in all_moves if m.rank == rank), key=lambda m: m.source)
    like = expert_tensors(weights, 0)
    sizes = [t.nbytes for t in like]
    out = torch.empty(len(given), sum(sizes), dtype=torch.uint8, device=like[0].device)
    for row, move in zip(out, given, strict=True):
        for part, tensor in zip(row.split(sizes), expert_tensors(weights, before.index(move.expert)), strict=True):
            part.copy_(tensor.contiguous().flatten().view(torch.uint8))
    send = [sum(m.rank == r for m in given) for r in range(peers.size)]
    receive = [sum(m.source == r for m in taken) for r in range(peers.size)]
    came = peers.all_to_all(out, send, receive, "experts", name)
    del out
    new = {}
    for row, move in zip(came, taken, strict=True):
        parts = zip(row.split(sizes), like, strict=True)
        new[move.expert] = [part.clone().view(t.dtype).view(t.shape) for part, t in parts]
    kept = {expert: local for local, expert in reversed([*enumerate(before)])}
    return with_experts(weights, [kept[e] if e in kept else new[e] for e in after])


def _check_names(given: Mapping[str, object], layers: Mapping[str, object], operation: str) -> None:
    unknown = sorted(set(given) - set(layers))
    if unknown or not given:
        raise invalid_input(
            operation,
            got=f"a layer {unknown[0]!r}" if unknown else "no layer",
            needs=f"names among {', '.join(map(repr, layers))}",
            fix="moestro.parallel.placements(module) has them.",
        )


def _place(dispatcher: Dispatcher | None) -> Place | None:
    inner = getattr(dispatcher, "inner", None)
    found = getattr(dispatcher, "place", None) if inner is None else _place(inner)
    return found if isinstance(found, Place) else None


def _placed(layer: CutLayer) -> Place:
    found = _place(layer.dispatcher)
    assert found is not None
    return found


def _timeout_of(layers: Iterable[CutLayer]) -> float:
    """The longest of the layers' own."""
    return max(_placed(layer).peers.timeout for layer in layers)


def _counts(counts: Tensor, dispatcher: Dispatcher) -> bool:
    """Whether it adds to these counts."""
    return isinstance(dispatcher, _Counting) and dispatcher.counts is counts


def without(dispatcher: Dispatcher, is_gone: Callable[[Dispatcher], bool]) -> Dispatcher:
    """The same dispatcher without those around another that are gone."""
    inner = getattr(dispatcher, "inner", None)
    if inner is None:
        return dispatcher
    if is_gone(dispatcher):
        return without(inner, is_gone)
    made: Any = dispatcher
    kept = without(inner, is_gone)
    return dispatcher if kept is inner else replace(made, inner=kept)


def _device(layer: CutLayer) -> torch.device:
    return layer.weights.tensors[0].device


def _with_placement(dispatcher: Any, placement: Placement) -> Dispatcher:
    """The same dispatcher for experts that are elsewhere."""
    inner = getattr(dispatcher, "inner", None)
    if inner is not None:
        made: Dispatcher = replace(dispatcher, inner=_with_placement(inner, placement))
    else:
        made = replace(dispatcher, place=replace(dispatcher.place, placement=placement))
    return made
