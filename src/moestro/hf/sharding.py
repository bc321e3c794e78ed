"""Models whose experts are cut over processes: what a rank keeps of each layer, and how tokens come to it.

Two ways lead here: `moestro.load(path, device=mesh)`, and Transformers' `DistributedConfig`. Either way a rank reads
only the experts that it keeps, where they are stored expert by expert or stacked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import moestro
from moestro.errors import unsupported
from moestro.formats import PackedTensor, SplitTensor, StoredExperts
from moestro.hf.store import Part, Recipe, Stored
from moestro.moe import Dispatcher
from moestro.parallel import (
    AllReduceDispatcher,
    AllToAllDispatcher,
    Peers,
    Place,
    Placement,
    SlicedDispatcher,
)
from moestro.parallel.guard import SAME_TOKENS, job_timeout
from moestro.parallel.mesh import check_mesh, mesh_place, mesh_size, ranks_along, timeout_of
from moestro.parallel.shard import room_for, take_slice
from moestro.weights import ExpertWeights

OPERATION = "load"

ALL_TO_ALL, ALL_GATHER = "moestro_all_to_all", "moestro_all_gather"
"""Names of `DistributedConfig.ep_implementation`."""

MakeLayerDispatcher = Callable[[Placement, str], Dispatcher]


@dataclass(frozen=True)
class Sharding:
    """How the experts of a whole model are cut.

    Attributes:
        ep: this rank's place along the experts, and the number of ranks there.
        tp: the same along the intermediate size.
        ranks: of the job, that hold one copy of the experts together and run the same tokens.
        dispatcher: makes a layer's dispatcher from its placement and name.
        timeout: seconds that a collective may take.
    """

    ep: tuple[int, int]
    tp: tuple[int, int]
    ranks: tuple[int, ...]
    dispatcher: MakeLayerDispatcher
    timeout: float

    @property
    def peers(self) -> Peers:
        return Peers.of(self.ranks, self.timeout)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> Sharding:
        """Of a mesh with dimensions among dp, ep and tp; ranks along ep and tp run the same tokens."""
        check_mesh(mesh, OPERATION)
        ep, tp = ((mesh_place(mesh, name), mesh_size(mesh, name)) for name in ("ep", "tp"))
        ranks, timeout = tuple(ranks_along(mesh, "ep", "tp")), timeout_of(mesh)
        return cls(ep, tp, ranks, partial(shared_batch, partial(Peers.of, ranks, timeout), ep[0]), timeout)

    @classmethod
    def of_transformers(cls, model: Any, wanted: Any) -> Sharding:
        """Of what a `DistributedConfig` asks for, once Transformers has made its groups.

        Raises:
            UnsupportedError: other sizes than tp_size alone, or as many ranks for experts.
        """
        tp, ep = wanted.tp_size or 1, wanted.ep_size or 1
        others = {name: getattr(wanted, name, None) or 1 for name in ("pp_size", "fsdp_size", "dp_replicate_size")}
        cut = {name: size for name, size in others.items() if size > 1} | ({"ep_size": ep} if ep not in (1, tp) else {})
        if cut:
            raise unsupported(
                OPERATION,
                got=f"experts that stay as stored, with tp_size={tp} and "
                + ", ".join(f"{name}={size}" for name, size in cut.items()),
                needs="tp_size alone, or ep_size equal to it",
                fix="Load the experts in 16 bits (no MoestroConfig), or use moestro.load(path, device=mesh).",
            )
        place, timeout = dist.get_rank(), job_timeout()
        ranks = tuple(range(tp))
        peers = partial(Peers.of, ranks, timeout)
        if ep == 1:
            return cls((0, 1), (place, tp), ranks, partial(shared_batch, peers, 0), timeout)
        slices = wanted.ep_implementation in (ALL_TO_ALL, "all_to_all")
        make = partial(sliced_batch, peers) if slices else partial(shared_batch, peers, place)
        return cls((place, ep), (0, 1), ranks, make, timeout)

    def own(self, num_experts: int) -> tuple[int, ...]:
        """The experts that this rank keeps of so many.

        Raises:
            UnsupportedError: there are more ranks than experts.
        """
        return self._placement(num_experts).experts[self.ep[0]]

    def _placement(self, num_experts: int) -> Placement:
        if num_experts < self.ep[1]:
            raise unsupported(
                OPERATION,
                got=f"{num_experts} experts over {self.ep[1]} ranks",
                needs="at least one expert a rank",
                fix="Use fewer ranks along ep, and more along tp.",
            )
        return Placement.contiguous(num_experts, self.ep[1])

    def layer_dispatcher(self, num_experts: int, name: str) -> Dispatcher:
        """The dispatcher of a layer."""
        return self.dispatcher(self._placement(num_experts), name)

    def agree(self, layers: Sequence[Stored], formats: Mapping[str, Any]) -> None:
        """Compare with the other ranks what is about to be loaded.

        Raises:
            CollectiveError: they differ, or one does not come.
        """
        said = {
            "versions": [moestro.__version__, torch.__version__, transformers.__version__],
            "experts": [[s.path, *(list(r.shape) for r in s.recipes)] for s in layers],
            "formats": {target: form.name for target, form in formats.items()},
            "ep and tp": [self.ep[1], self.tp[1]],
        }
        self.peers.agree(said, OPERATION, "")


def shared_batch(peers: Callable[[], Peers], rank: int, placement: Placement, name: str) -> Dispatcher:
    """For ranks that run the same tokens: outputs are summed."""
    return AllReduceDispatcher(Place(placement, peers(), None, rank, name))


def sliced_batch(make: Callable[[], Peers], placement: Placement, name: str) -> Dispatcher:
    """For the same: each rank sends its slice of the tokens to the experts, and outputs are gathered."""
    peers = make()
    return SlicedDispatcher(AllToAllDispatcher(Place(placement, peers, None, None, name)), peers, name)


_BATCH = "_moestro_batch"

_AFTER_EXPERTS = {"labels", "num_items_in_batch", "logits_to_keep", "return_dict"} | {
    f"output_{what}" for what in ("attentions", "hidden_states", "router_logits")
}
"""Arguments of a model that its experts never see, which a rank may have alone."""


def batch_of(model: nn.Module) -> Peers | None:
    """The ranks that run the same tokens as this one, for a model whose experts are cut over them, or a copy of it."""
    return getattr(model, _BATCH, None)


def share_batch(model: nn.Module, peers: Peers) -> None:
    """Note that these ranks run the same tokens, and have them compare what they are given at the first call."""
    setattr(model, _BATCH, peers)

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            # Of this very module: the handle is the original's, of which this may be a copy.
            module._forward_pre_hooks.pop(handle.id, None)
            module._forward_pre_hooks_with_kwargs.pop(handle.id, None)
            given = _by_name(module, args, kwargs)
            said = {name: _fingerprint(value) for name, value in sorted(given.items()) if name not in _AFTER_EXPERTS}
            peers.agree(said, "first call", "", SAME_TOKENS)

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by the names of the forward's parameters, however they were passed; None is none."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    except TypeError:  # which the call itself raises next
        return {}
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        found |= value if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return {name: value for name, value in found.items() if value is not None}


def _fingerprint(value: object) -> str:
    """Shape, dtype and a hash of a tensor; of anything else its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    data = value.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {list(value.shape)} {blake2b(data, digest_size=8).hexdigest()}"


_MESH: ContextVar[DeviceMesh | None] = ContextVar("moestro.mesh", default=None)


@contextmanager
def cut_over(mesh: DeviceMesh | None) -> Iterator[None]:
    """Inside, experts that are loaded are cut over this mesh."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def wanted_sharding(model: Any) -> Sharding | None:
    """How the model that is being loaded is to be cut; None if it is not."""
    mesh, wanted = _MESH.get(), getattr(model.config, "distributed_config", None)
    if mesh is not None:
        return Sharding.of_mesh(mesh)
    sizes = [getattr(wanted, name, None) or 1 for name in ("tp_size", "ep_size", "pp_size", "fsdp_size")]
    if max(sizes) == 1 and not getattr(wanted, "enable_expert_parallel", False):
        return None
    if not hasattr(wanted, "ep_implementation"):
        raise unsupported(
            OPERATION,
            got=f"experts that stay as stored, and a DistributedConfig of Transformers {transformers.__version__}",
            needs="Transformers 5.23 or later, whose expert parallelism has implementations that can be registered",
            fix="Update Transformers, or use moestro.load(path, device=mesh).",
        )
    return Sharding.of_transformers(model, wanted)


@contextmanager
def local_parameters(module: nn.Module) -> Iterator[None]:
    """Inside, the parameters of a module that Transformers has cut are this rank's own tensors."""
    cut: dict[str, Any] = {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)}
    module._parameters.update({name: nn.Parameter(p.to_local(), p.requires_grad) for name, p in cut.items()})
    try:
        yield
    finally:
        module._parameters.update(cut)


def is_cut(module: nn.Module) -> bool:
    """Whether Transformers has cut a parameter of this very module."""
    return any(isinstance(p, DTensor) for p in module._parameters.values())


def cut_as_planned(model: Any, name: str) -> None:
    """Cut a whole parameter as the model's tensor parallel plan says, if it is loaded by such a plan."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or _MESH.get() is not None:
        return
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, _get_parameter_plan

    style = _get_parameter_plan(name, model.tp_plan)
    if style is not None:
        above, _, own = name.rpartition(".")
        ALL_PARALLEL_STYLES[style].shard_param(model.get_submodule(above), own, mesh["tp"])


def own_part(recipe: Recipe, tensors: Mapping[str, Tensor], own: Sequence[int]) -> tuple[Recipe, dict[str, Tensor]]:
    """The recipe and the tensors of some experts, a range: views under the same names, nothing is read."""
    num_experts = recipe.shape[0]
    parts: list[Part] = []
    kept: dict[str, Tensor] = {}
    unstacked = recipe.unstacked or any(len(part["data"]) > 1 for part in recipe.parts)
    for part in recipe.parts:
        chosen: dict[str, tuple[str, ...]] = {}
        for kind, names in part.items():
            if len(names) > 1 or recipe.unstacked:
                chosen[kind] = tuple(names[e] for e in own)
                kept |= {name: tensors[name] for name in chosen[kind]}
            else:
                (name,) = chosen[kind] = names
                each = tensors[name].shape[0] // num_experts
                kept[name] = tensors[name][own[0] * each : (own[-1] + 1) * each]
        parts.append(chosen)
    shape = (len(own), *recipe.shape[1:])
    return replace(recipe, shape=shape, parts=tuple(parts), unstacked=unstacked), kept


def recipe_of(target: str, stored: StoredExperts) -> tuple[Recipe, dict[str, Tensor]]:
    """A recipe under moestro's own names for experts that are in memory, and their tensors."""
    form, (e, n, k) = stored.format, stored.shape
    if isinstance(stored, PackedTensor):
        names = {kind: f"{target}_{kind}" for kind in form.names}
        tensors = {name: getattr(stored, kind) for kind, name in names.items()}
        return Recipe(target, (e, n, k), form, ({kind: (name,) for kind, name in names.items()},)), tensors
    parts, tensors = [], {}
    for block in range(len(stored.matrices[0])):
        part = {kind: tuple(f"{target}.{i}.{block}_{kind}" for i in range(e)) for kind in form.names}
        for kind, each in part.items():
            tensors |= {name: getattr(stored.matrices[i][block], kind) for i, name in enumerate(each)}
        parts.append(part)
    return Recipe(target, (e, n, k), form, tuple(parts), unstacked=True), tensors


def cut_biases(holder: Any, stored: Stored, own: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
    """Leave of the biases that a module keeps beside its stored experts those of some experts, and return them."""
    found: list[Tensor | None] = []
    for projection in stored.projections.both:
        bias = getattr(holder, f"{projection.name}_bias", None)
        if bias is not None:
            whole = bias.full_tensor() if isinstance(bias, DTensor) else bias
            bias = whole.detach()[own[0] : own[-1] + 1].clone()
            put_bias(holder, projection.name, bias)
        found.append(bias)
    return found[0], found[1]


def put_bias(holder: Any, projection: str, bias: Tensor | None) -> None:
    """Have a module keep this bias, or none, of a projection."""
    name = f"{projection}_bias"
    if name in holder._parameters:
        holder._parameters[name] = None if bias is None else nn.Parameter(bias, requires_grad=False)


class Slices:
    """The slices along I of a layer's experts, put together from one expert after the other."""

    def __init__(self, tp: tuple[int, int], num_experts: int) -> None:
        self.tp, self.num_experts, self.count = tp, num_experts, 0
        self._parts: list[list[StoredExperts]] = []
        self._biases: list[tuple[Tensor | None, Tensor | None]] = []

    def add(self, expert: ExpertWeights) -> None:
        """Cut the next expert, which is alone in its stacks, and keep this rank's slice."""
        part = take_slice(expert, *self.tp, OPERATION)
        both = [part.gate_up, part.down]
        if not self._parts:
            self._parts = [
                [room_for(stored, self.num_experts)] if isinstance(stored, PackedTensor) else [] for stored in both
            ]
        for kept, stored in zip(self._parts, both, strict=True):
            if isinstance(stored, PackedTensor):
                for all_experts, own in zip(kept[0].tensors, stored.tensors, strict=True):
                    all_experts[self.count] = own[0]
            else:
                kept.append(stored)
        self._biases.append((part.gate_up_bias, part.down_bias))
        self.count += 1

    def stored(self, holder: Any, stored: Stored) -> tuple[Stored, dict[str, Tensor]]:
        """What is stored of the layer, and its tensors; the biases are put into `holder`."""
        made = []
        for recipe, parts in zip(stored.recipes, self._parts, strict=True):
            first = parts[0]
            split = [part for part in parts if isinstance(part, SplitTensor)]
            experts = SplitTensor(tuple(m for part in split for m in part.matrices)) if split else first
            made.append(recipe_of(recipe.target, experts))
        for projection, rows in zip(stored.projections.both, zip(*self._biases, strict=True), strict=True):
            found = [row for row in rows if row is not None]
            put_bias(holder, projection.name, torch.cat(found) if found else None)
        (gate_up, tensors), (down, others) = made
        return replace(stored, recipes=(gate_up, down)), tensors | others
