"""A layer whose experts are in slots: the same call of the primitive on a routing that names slots.

What a visit needs beyond its slots is computed in waves. Rows of all waves are kept, and summed as one call sums them;
so bits are those of the same call on experts that are all in memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moestro.errors import MoestroError, unsupported
from moestro.memory.experts import LayerMemory
from moestro.memory.policy import visit_of
from moestro.memory.reader import OPERATION
from moestro.memory.residents import Wave
from moestro.memory.turns import Turn
from moestro.ops import dispatch
from moestro.ops.dispatch import InWaves, Prepared
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.ops.expert_mlp.matmul import Span
from moestro.ops.expert_mlp.plain import expert_rows
from moestro.settings import use
from moestro.types import EMPTY, Routing
from moestro.weights import ExpertWeights

_FEW = 1024
"""Ids that are renamed one by one."""


@dataclass(frozen=True, eq=False)
class MemoryWeights(ExpertWeights):
    """Experts as their files have them, of which a layer's slots have some. `run` computes with them.

    Attributes:
        layer: the layer's part of the model's memory.
        handle: by which a graph finds them, if one can; see `moestro.memory.library`.
    """

    layer: LayerMemory | None = None
    handle: Tensor | None = None

    @classmethod
    def of(cls, weights: ExpertWeights, layer: LayerMemory, handle: Tensor | None = None) -> MemoryWeights:
        """The same experts, of this layer."""
        return cls(**{**vars(weights), "layer": layer, "handle": handle})

    def check_devices(self) -> None:
        """Nothing: what is computed with are slots, and the experts themselves are in files."""

    def planned_for(self, x: Tensor) -> ExpertWeights:
        """What calls with rows like x are prepared for: these, or the slots of a device, which has nothing else."""
        assert self.layer is not None
        if x.is_cpu:
            return self
        with self.layer.memory.lock:
            return self.layer.slots_of(self)

    @property
    def note(self) -> str:
        """What `moestro.explain` adds."""
        return str(self.layer)


def run(x: Tensor, routing: Routing, weights: MemoryWeights, strategy: str = "auto") -> Tensor:
    """`moestro.ops.expert_mlp.run` for experts that are not all in memory.

    Raises:
        InvalidInputError: a file that is not what it was when the model was loaded.
        UnsupportedError: a tensor that requires a gradient, another device than that of the slots, a process that was
            forked, or an implementation or strategy that reads every expert where it is stored.
    """
    assert weights.layer is not None
    if x.device != weights.layer.memory.device:
        place = f"rows on {weights.layer.memory.device}, where its slots are"
        raise _refused(f"rows on {x.device}", place, "Leave the model where it was loaded to.")
    check_gradients(x, routing, weights)
    weights.layer.memory.reader.check_process()  # before the lock, which another thread of its parent may have had
    with torch.no_grad(), weights.layer.memory.lock:
        weights.layer.memory.below.follow()
        prepared = dispatch.prepare(EXPERT_MLP, x, routing, weights.planned_for(x), strategy)
        _check_prepared(prepared)
        y = _compute(prepared, (x, routing, weights, strategy), weights.layer)
    dispatch.tell(EXPERT_MLP, prepared, (x, routing, weights, strategy), y)
    return y


def _compute(prepared: Prepared, arguments: tuple[Any, ...], layer: LayerMemory) -> Tensor:
    """By what was prepared for all experts, on slots."""
    x, routing, weights, strategy = arguments
    visit = visit_of(layer.index, routing.expert_ids.tolist(), weights.num_experts)
    slots = layer.slots_of(weights)
    if not visit.experts:
        nobody = renamed(routing, Wave((), (), ()), weights.num_experts)  # an id may be that of a slot
        y: Tensor = prepared.compute(x, nobody, weights.planned_for(x), strategy)  # reads no expert
        return y
    waves, asked = layer.visit(visit, x)
    below = visit.last is None and _computes_below(prepared, x, routing, weights)
    with closing(layer.in_turn(visit, waves, weights, asked, below)) as turns:
        if prepared.in_waves is None:
            return _walked(prepared, arguments, turns, slots)
        with use(implementation=prepared.implementation):
            return _by_engine(arguments, turns, below or len(waves) > 1, slots)


def _by_engine(arguments: tuple[Any, ...], turns: Iterator[Turn], in_parts: bool, slots: ExpertWeights) -> Tensor:
    """In one call, or in one for each wave that leaves its rows unsummed."""
    x, routing, weights, strategy = arguments
    parts: InWaves | None = None
    rows: Tensor | None = None
    for turn in turns:
        named = renamed(routing, turn.wave, weights.num_experts)
        prepared = dispatch.prepare(EXPERT_MLP, x, named, slots, strategy)
        if not in_parts:
            y = prepared.compute(x, named, slots, strategy)
            continue
        parts = prepared.in_waves
        assert parts is not None  # the implementation is the one that had them for all experts
        rows = parts.room(x, routing) if rows is None else rows
        if turn.layer is weights.layer:
            parts.rows(x, named, slots, rows)
        else:
            parts.put(x, named, _on_host(x, named, turn.layer.slots_with(weights, turn.wave)), rows)
    if rows is not None and parts is not None:
        y = parts.total(x, routing, rows, weights.num_experts)
    whole: Tensor = y
    return whole


def _computes_below(prepared: Prepared, x: Tensor, routing: Routing, weights: MemoryWeights) -> bool:
    """Whether experts that the device lacks are computed where they are."""
    layer = weights.layer
    if layer is None or not layer.memory.computes_below:
        return False
    slots = layer.memory.below.layers[layer.index].slots_of(weights)
    if prepared.in_waves is not None and _engine(x, routing, slots) is not None:
        return True
    if layer.memory.on_miss is not None:
        return False
    needs = "kernels on the device, and an engine of the CPU that takes the same experts and rows"
    raise _refused('on_miss="compute"', needs, 'Leave on_miss to "copy" or "auto".')


def _on_host(x: Tensor, named: Routing, slots: ExpertWeights) -> Tensor:
    """The row of each pair that names a slot of the host's memory, float32 [T, K, H], by the CPU's engine."""
    own, routing = _moved(x, named)
    with use(implementation=_engine(own, routing, slots)):
        parts = dispatch.prepare(EXPERT_MLP, own, routing, slots, "auto").in_waves
    assert parts is not None  # or it would not have been named
    rows = parts.room(own, routing)
    parts.rows(own, routing, slots, rows)
    return rows


def _moved(x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    ids, routing_weights = routing.expert_ids.to("cpu"), routing.routing_weights.to("cpu")
    return x.to("cpu"), Routing.unchecked(ids, routing_weights, routing.weight_on)


def _engine(x: Tensor, routing: Routing, slots: ExpertWeights) -> str | None:
    """The first implementation of the host that computes experts in slots in parts; None if there is none."""
    found: str | None = _ENGINES.get(slots, {}).get(x.dtype, "")
    if found == "":
        own, named = _moved(x, routing)
        prepared = (each.prepare(own, named, slots, "auto") for each in EXPERT_MLP.implementations)
        names = (p.implementation for p in prepared if isinstance(p, Prepared) and p.in_waves is not None)
        found = _ENGINES.setdefault(slots, {})[x.dtype] = next(names, None)
    return found


_ENGINES: weakref.WeakKeyDictionary[ExpertWeights, dict[torch.dtype, str | None]] = weakref.WeakKeyDictionary()


def _walked(prepared: Prepared, arguments: tuple[Any, ...], turns: Iterator[Turn], slots: ExpertWeights) -> Tensor:
    """In plain PyTorch: the walk over all experts once for each wave, which computes the rows of its own."""
    x, routing, weights, strategy = arguments
    known = Rows(slots)
    fields = {name: getattr(weights, name) for name in ExpertWeights.__dataclass_fields__}
    stand_in = WaveWeights(**fields, rows_of=known)
    for turn in turns:
        known.turn_to(turn.wave)
        y = prepared.compute(x, routing, stand_in, strategy)
    whole: Tensor = y
    return whole


@dataclass(frozen=True, eq=False)
class WaveWeights(ExpertWeights):
    """Experts whose rows are computed by `rows_of`, and not from their weights; see `plain.expert_rows`."""

    rows_of: Rows | None = None

    def check_devices(self) -> None:
        """As of `MemoryWeights`."""


class Rows:
    """Rows of a walk that is repeated: those of experts that are in slots are computed, once, and kept."""

    def __init__(self, slots: ExpertWeights) -> None:
        self._slots = slots
        self._found: dict[tuple[int, int], Tensor] = {}
        self._here: dict[int, int] = {}
        self._calls = 0

    def turn_to(self, wave: Wave) -> None:
        """The walk begins anew, and these experts are there."""
        self._here, self._calls = dict(zip(wave.experts, wave.slots, strict=True)), 0

    def __call__(self, rows: Tensor, spans: Sequence[Span], out: Tensor | None) -> Tensor:
        """As `expert_rows`; zeros for those of experts that a later wave brings."""
        call, self._calls = self._calls, self._calls + 1
        parts = [self._part((call, number), rows, span, out) for number, span in enumerate(spans)]
        if out is None:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        return torch.cat(parts, out=out) if len(parts) > 1 else out.copy_(parts[0])

    def _part(self, key: tuple[int, int], rows: Tensor, span: Span, out: Tensor | None) -> Tensor:
        found, slot = self._found.get(key), self._here.get(span.expert)
        if found is not None:
            return found
        own = rows[span.start : span.stop]
        if slot is None:
            return torch.zeros_like(own if out is None else out[span.start : span.stop])
        into = None if out is None else torch.empty_like(out[span.start : span.stop])
        made = self._found[key] = expert_rows(own, self._slots, [Span(slot, 0, len(own))], into)
        return made


def renamed(routing: Routing, wave: Wave, num_experts: int) -> Routing:
    """The routing to the slots of a wave: ids of experts that are not in it become empty slots."""
    ids = routing.expert_ids
    slots = dict(zip(wave.experts, wave.slots, strict=True))
    if ids.numel() <= _FEW:
        renumbered = [[slots.get(e, EMPTY) for e in row] for row in ids.tolist()]
        named = torch.tensor(renumbered, dtype=ids.dtype, device=ids.device).view(ids.shape)
    else:
        table = torch.full((num_experts + 1,), EMPTY, dtype=ids.dtype)
        table[list(slots)] = torch.tensor(list(slots.values()), dtype=ids.dtype)
        table = table.to(ids.device)
        named = table[torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)]
    return Routing.unchecked(named, routing.routing_weights, routing.weight_on)


def check_gradients(x: Tensor, routing: Routing, weights: Any) -> None:
    """Refuse a gradient of rows, of the routing weights or of the biases of `weights`."""
    if torch.is_grad_enabled():
        biases = [bias for bias in (weights.gate_up_bias, weights.down_bias) if bias is not None]
        if any(t.requires_grad for t in (x, routing.routing_weights, *biases)):
            raise _refused(
                "a tensor that requires a gradient",
                "no gradient: slots hold other experts by the time of the backward pass",
                "Call the model under torch.no_grad(), or load it without memory= to train.",
            )


def _check_prepared(prepared: Prepared) -> None:
    if prepared.walk == "all_experts":
        got, fix = "the strategy all_experts", "Leave the strategy to auto."
    elif prepared.in_waves is None and prepared.implementation != "torch":
        got, fix = f"the implementation {prepared.implementation!r}", "Do not force it, or load without memory=."
    else:
        return
    raise _refused(got, "one that reads the experts that are routed to, and no others", fix)


def _refused(got: str, needs: str, fix: str) -> MoestroError:
    return unsupported(OPERATION, got=f"experts within a memory budget and {got}", needs=needs, fix=fix)
