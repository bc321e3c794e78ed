"""A model's experts within a memory budget: where a checkpoint has each of them, and what reads them from there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moestro.checkpoint import Checkpoint
from moestro.errors import MoestroError, unsupported
from moestro.formats import StoredExperts, WeightFormat
from moestro.hf.models import find_device, routed_experts_of
from moestro.hf.routers import router_of
from moestro.hf.store import ExpertStore, Recipe, Stored, not_within_memory
from moestro.memory.amounts import shown_bytes
from moestro.memory.budget import MemoryBudget
from moestro.memory.experts import ExpertMemory
from moestro.memory.prefetch import Prefetcher
from moestro.memory.reader import Reader
from moestro.memory.sizes import LayerSize
from moestro.memory.tiers import LayerPlan, SlotTensor, Source
from moestro.memory.warm import tiers_of

OPERATION = "load"
WORTH_COLLECTING = 1 << 26
"""Bytes of other models' slots from which on Python's collector is asked for first: models refer to themselves, so that
one which was deleted keeps its slots until then."""
_MADE: weakref.WeakSet[ExpertMemory] = weakref.WeakSet()
_RULES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Of Transformers, by which a device_map is made."""


def expert_memory(model: nn.Module) -> ExpertMemory | None:
    """The memory of a model that was loaded with `memory=`; None of others."""
    for module in model.modules():
        if isinstance(module, ExpertStore) and module.memory is not None:
            return module.memory.memory
    return None


def memory_line(model: nn.Module) -> str | None:
    """In one line what a model with a memory budget takes: its experts' slots, and the rest of its weights."""
    memory = expert_memory(model)
    if memory is None:
        return None
    rest = sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    biases = sum(pool.bias_bytes for pool in memory.pools)
    own = f"{shown_bytes(rest + biases)} beside the experts, keys and values and workspace not counted"
    return f"{memory}; {own}"


def check_memory(
    budget: MemoryBudget,
    layers: Sequence[Stored],
    targets: Mapping[str, WeightFormat],
    checkpoint: Checkpoint,
    cut: bool,
) -> None:
    """Refuse experts that cannot be computed as their files have them, before any weight is read."""
    if cut:
        raise _refused("a mesh", "one process", "Leave device out, or load without memory=.")
    if budget.device_memory is not None:
        if budget.device_memory.device is None:
            fix = 'Name it: DeviceMemory(..., device="cuda"), or load by moestro.load(device="cuda").'
            raise _refused("device_memory= of no device", "the device that computes", fix)
        find_device(budget.device_memory.device, OPERATION)
    for recipe in (recipe for stored in layers for recipe in stored.recipes):
        wanted = targets[recipe.target]
        if wanted != recipe.format:
            raise _refused(
                f"format {wanted.name!r} for {recipe.target}, which is stored as {recipe.format.name}",
                "experts in the format in which their files have them",
                f"Write them so first: moestro quantize FOLDER OUT --format {wanted.name}; then load OUT.",
            )
        for name in recipe.names:
            if not checkpoint.entry(name).is_aligned:
                raise _refused(
                    f"{name} at an address that its dtype does not allow",
                    "tensors that can be used where they are",
                    "Save the model again with save_pretrained.",
                )


def plan_memory(
    layers: Sequence[tuple[str, Stored]], checkpoint: Checkpoint, model: Any, budget: MemoryBudget
) -> ExpertMemory:
    """The slots of a model's expert layers, none of which is filled.

    Raises:
        InvalidInputError: a budget below the least that works.
        UnsupportedError: prefetching for a model whose routers are not found.
    """
    if sum(memory.slot_bytes for memory in _MADE) >= WORTH_COLLECTING:
        gc.collect()
    reader = Reader(budget.threads)
    identities = checkpoint.identities
    used = {checkpoint.entry(name).file for _, stored in layers for r in stored.recipes for name in r.names}
    files = {path: reader.add(path, identities[path]) for path in checkpoint.files if path in used}
    top_k = routed_experts_of(model.config)
    memory = tiers_of([_plan(name, stored, checkpoint, files, top_k) for name, stored in layers], budget, reader)
    if budget.prefetch:
        memory.prefetcher = _prefetcher(model, layers)
    _MADE.add(memory)
    return memory


def _prefetcher(model: nn.Module, layers: Sequence[tuple[str, Stored]]) -> Prefetcher:
    recipes = [(name, stored.recipes[0]) for name, stored in layers]
    routers = [router_of(model, name, recipe.shape[0], recipe.shape[2]) for name, recipe in recipes]
    found = Prefetcher(routers, [min(routed_experts_of(model.config), recipe.shape[0]) for _, recipe in recipes])
    if not found.layers:
        raise _refused(
            f"prefetch, of {len(layers)} layers without a router that another could ask",
            "two expert layers at least, and beside each a module with a weight [num_experts, hidden_size]",
            "Leave prefetch out.",
        )
    return found


def keep_here(model: nn.Module) -> None:
    """Have a model refuse to be moved away from its slots as a whole: before the first of its tensors is moved."""
    for path, store in list(model.named_modules()):
        if isinstance(store, ExpertStore):
            parts = path.split(".")[:-1]
            for depth in range(len(parts) + 1):
                module = model.get_submodule(".".join(parts[:depth]))
                module.__dict__["_apply"] = _Apply(module, store)


class _Apply:
    """A module's own `_apply`, by way of which `to` and its kin go, after a look at where they go."""

    def __init__(self, module: nn.Module, store: ExpertStore) -> None:
        self._module, self._store = weakref.ref(module), weakref.ref(store)

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module | None:
        module, store = self._module(), self._store()
        if store is not None:
            store.check_stays(fn)
        return None if module is None else type(module)._apply(module, fn, recurse)

    def __reduce__(self) -> str:
        raise not_within_memory("copy", "a model whose experts can all be in memory")


def check_place(device: Any) -> None:
    """Refuse another device than the CPU, which has no memory of the budget: one, or a device_map that names one.

    What "auto" comes to shows later.

    Raises:
        UnsupportedError: so.
    """
    places = device.values() if isinstance(device, Mapping) else [device] if device not in (None, *_RULES) else []
    others = [place for place in places if str(place).partition(":")[0] != "cpu"]
    if others:
        fix = 'Give it a part of its own, as in load(..., device="cuda", memory="20GB", device_memory="6GB").'
        raise _refused(f"device {str(others[0])!r}", "the CPU, or device_memory= for slots there", fix)


def placed(budget: MemoryBudget, place: torch.device | None) -> tuple[MemoryBudget, torch.device | None]:
    """A budget whose part on a device says which, and where the model goes.

    Raises:
        UnsupportedError: a device that has no part of the budget, or another than the part's own; a part of the CPU's
            memory that nobody named so.
    """
    own = budget.device_memory
    if own is None:
        check_place(place)
        return budget, place
    if own.device is None and (place is None or place.type == "cpu"):
        needs = 'a device with memory of its own, as in load(..., device="cuda")'
        raise _refused("device_memory= on the CPU", needs, "Leave device_memory out: there memory= is all.")
    wanted = place if own.device is None else find_device(own.device, OPERATION)
    if place is not None and torch.empty(0, device=place).device != torch.empty(0, device=wanted).device:
        raise _refused(f"device {str(place)!r}", f"{wanted}, which device_memory names", "Name the same device twice.")
    return replace(budget, device_memory=replace(own, device=str(wanted))), wanted


def keep_in_memory(model: nn.Module) -> None:
    """Copy the weights beside the experts, which Transformers may have left as views of the files."""
    for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
        tensor.data = tensor.data.clone()


def _plan(name: str, stored: Stored, checkpoint: Checkpoint, files: Mapping[Path, int], top_k: int) -> LayerPlan:
    tensors = _slot_tensors(stored, checkpoint)
    groups = [names for recipe in stored.recipes for part in recipe.parts for names in part.values()]
    sources = []
    for names, tensor in zip(groups, tensors, strict=True):
        entries = [checkpoint.entry(each) for each in names]
        sources.append(Source(tuple((files[e.file], e.start) for e in entries), tensor.nbytes))
    first, last = stored.recipes

    def build(stacks: Sequence[Tensor]) -> tuple[StoredExperts, StoredExperts]:
        own = sum(len(part) for part in first.parts)
        return _on_slots(first, stacks[:own]), _on_slots(last, stacks[own:])

    return LayerPlan(name, layer_size(stored, checkpoint, top_k), tuple(tensors), tuple(sources), build)


def layer_size(stored: Stored, checkpoint: Checkpoint, top_k: int) -> LayerSize:
    """What the slots of a layer take, from the headers of its files."""
    num_experts, tensors = stored.projections.num_experts, _slot_tensors(stored, checkpoint)
    key = repr((tensors, _kinds(stored)))
    return LayerSize(num_experts, min(top_k, num_experts), sum(t.nbytes for t in tensors), pool_key=key)


def _slot_tensors(stored: Stored, checkpoint: Checkpoint) -> list[SlotTensor]:
    """What one expert has in its slot."""
    found = []
    for recipe in stored.recipes:
        for names in (names for part in recipe.parts for names in part.values()):
            entry = checkpoint.entry(names[0])
            shape = entry.shape if _is_unstacked(recipe, names) else _of_one(recipe, entry.shape)
            found.append(SlotTensor(entry.dtype, shape))
    return found


def _kinds(stored: Stored) -> list[Any]:
    """All of a layer's recipes but names, of which two layers with the same may share slots."""
    return [
        (
            (recipe.shape[1:], recipe.format.name, recipe.unstacked),
            recipe.projection and (recipe.projection.transposed, recipe.projection.flat),
            [[(kind, _is_unstacked(recipe, names)) for kind, names in part.items()] for part in recipe.parts],
        )
        for recipe in stored.recipes
    ]


def _is_unstacked(recipe: Recipe, names: Sequence[str]) -> bool:
    return len(names) > 1 or recipe.unstacked


def _of_one(recipe: Recipe, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one expert's part of a stack."""
    experts = recipe.shape[0]
    return shape[1:] if shape[0] == experts else (shape[0] // experts, *shape[1:])


def _on_slots(recipe: Recipe, stacks: Sequence[Tensor]) -> StoredExperts:
    """The same recipe, of slots instead of experts."""
    num_slots = stacks[0].shape[0]
    tensors: dict[str, Tensor] = {}
    parts: list[dict[str, tuple[str, ...]]] = []
    remaining = iter(stacks)
    for part in recipe.parts:
        names: dict[str, tuple[str, ...]] = {}
        for kind, own in part.items():
            stack, stem = next(remaining), f"{len(parts)}.{kind}"
            if _is_unstacked(recipe, own):
                names[kind] = tuple(f"{stem}.{slot}" for slot in range(num_slots))
                tensors |= dict(zip(names[kind], stack.unbind(), strict=True))
            else:
                flat = recipe.projection is not None and recipe.projection.flat and recipe.format.is_dense
                names[kind] = (stem,)
                tensors[stem] = stack.flatten(0, 1) if flat else stack
        parts.append(names)
    return replace(recipe, shape=(num_slots, *recipe.shape[1:]), parts=tuple(parts)).build(tensors)


def _refused(got: str, needs: str, fix: str) -> MoestroError:
    return unsupported(OPERATION, got=f"memory= and {got}", needs=needs, fix=fix)


def hits_line(model: nn.Module) -> str | None:
    """In one line how many experts of those that were asked for were there; None of a model without a budget."""
    memory = expert_memory(model)
    if memory is None:
        return None
    told = memory.statistics()
    parts = [
        f"{name} {part['hit_rate']:.1%} of {part['lookups']:,} lookups hit"
        for name, part in (("prompt", told["prompt"]), ("generation", told["decode"]))
        if part["lookups"]
    ]
    if (host := told["host"]) is not None:
        lookups, hits = (sum(host[phase][key] for phase in ("prompt", "decode")) for key in ("lookups", "hits"))
        parts += [f"{hits / lookups:.1%} of {lookups:,} others were in host memory"] if lookups else []
    read = f"{shown_bytes(told['bytes_from_files'])} read, {told['seconds_waiting']:.1f} s waited for"
    return ", ".join([*parts, read])
