"""The experts of a model behind the slots of one tier: what is where, what is asked of the tier below, and counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moestro.memory.amounts import shown_bytes
from moestro.memory.budget import MemoryBudget
from moestro.memory.policy import Visit, policy_named
from moestro.memory.prefetch import Gain, Prefetcher
from moestro.memory.reader import OPERATION
from moestro.memory.residents import Counts, Residents, Wave
from moestro.memory.sizes import total_bytes
from moestro.memory.slots import SlotPool, biases_of
from moestro.memory.tiers import Arrival, Below, LayerPlan
from moestro.memory.turns import Turn, Turns
from moestro.weights import ExpertWeights

_CPU = torch.device("cpu")
_MISSED = {
    "copy": "",
    "compute": ", misses computed by the CPU (not bit-identical)",
    "auto": ", misses computed by the CPU where that is faster (not bit-identical)",
}


class ExpertMemory:
    """All experts of a model in the slots of a tier. One forward at a time: `lock` is held while a layer is computed.

    Args:
        layers: in execution order.
        budget: how much, which policy, and how many threads read.
        below: the tier that experts come from.
        device: whose memory the slots are, of the part of the budget that is its own; None for the host's.

    Attributes:
        nbytes: that the slots may take.
        residents: which expert is in which slot.
        pools: the slots themselves.
        seconds_waiting: for the tier below, of all forwards.
        prefetcher: what predicts the experts of a next layer; None where nobody asked for it.
        on_miss: what compares computing experts where they are with copying them; None where that is not compared.

    Raises:
        InvalidInputError: a budget below the least that works.
    """

    def __init__(
        self, layers: Sequence[LayerPlan], budget: MemoryBudget, below: Below, device: torch.device | None = None
    ) -> None:
        self._own = own = budget.device_memory if device is not None else None
        self.budget, self.below, self.reader = budget, below, below.reader
        self.nbytes = budget.nbytes if own is None else own.nbytes
        self.device = device or _CPU
        sizes = [plan.size for plan in layers]
        self.residents = Residents(sizes, self.nbytes, policy_named(OPERATION, budget.policy))
        firsts = [layers[pool.layers[0]] for pool in self.residents.pools]
        self.pools = [
            SlotPool(first.tensors, pool.slots, first.build, self.device)
            for first, pool in zip(firsts, self.residents.pools, strict=True)
        ]
        for pool in self.pools:
            below.keep(pool.memory)
        self.layers = [LayerMemory(self, index, plan) for index, plan in enumerate(layers)]
        self.total_bytes = total_bytes(sizes)
        self.seconds_waiting = 0.0
        self.prefetcher: Prefetcher | None = None
        self.on_miss = Gain() if own is not None and own.on_miss == "auto" else None
        self.lock = threading.RLock()

    @property
    def computes_below(self) -> bool:
        """Whether decoding computes experts that are not here where they are, in the step that goes on."""
        if self.on_miss is not None:
            return self.on_miss.on
        return self._own is not None and self._own.on_miss == "compute"

    def step_began(self, decodes: bool) -> None:
        """A forward begins at its first layer."""
        for gain in self._gains():
            gain.begin(decodes)

    def step_ended(self, layer: int) -> None:
        """A layer has been computed; with the last of them the forward has ended."""
        if layer == len(self.layers) - 1:
            for gain in self._gains():
                gain.end()

    def _gains(self) -> list[Gain]:
        ahead = None if self.prefetcher is None else self.prefetcher.gain
        return [gain for gain in (ahead, self.on_miss) if gain is not None]

    @property
    def slot_bytes(self) -> int:
        """Of all slots; at most the budget."""
        return sum(pool.nbytes for pool in self.pools)

    def __str__(self) -> str:
        """In one line what the budget holds."""
        residents = self.residents
        little = "" if self.slot_bytes >= residents.cycle else f", below the {shown_bytes(residents.cycle)} of a token"
        ahead = "" if self.prefetcher is None else f", {self.prefetcher}"
        missed = "" if self._own is None else _MISSED[self._own.on_miss]
        return (
            f"experts in {shown_bytes(self.slot_bytes)} of {shown_bytes(self.total_bytes)}{little}:"
            f" {residents.slots} slots, policy {self.budget.policy}{missed}, {self.below}{ahead}"
        )

    def statistics(self) -> dict[str, Any]:
        """What has happened so far, as plain values: in all, layer by layer, and in slots of the `host` below."""
        residents, counts = self.residents, self.reader.counts
        layers = [
            {"layer": layer.plan.name, "decode": _told(decode), "prompt": _told(prompt)}
            for layer, decode, prompt in zip(self.layers, residents.decode, residents.prompt, strict=True)
        ]
        return {
            "budget_bytes": self.nbytes,
            "device": str(self.device),
            "slot_bytes": self.slot_bytes,
            "expert_bytes": self.total_bytes,
            "cycle_bytes": residents.cycle,
            "least_bytes": residents.least,
            "slots": residents.slots,
            "policy": self.budget.policy,
            "threads": self.budget.threads,
            "direct": self.reader.direct,
            "decode": _told(sum(residents.decode, Counts())),
            "prompt": _told(sum(residents.prompt, Counts())),
            "bytes_from_files": counts["bytes_from_files"],
            "seconds_waiting": self.seconds_waiting,
            "prefetch": self._prefetched(),
            "on_miss": self._missed(),
            "host": self.below.statistics(),
            "layers": layers,
        }

    def _missed(self) -> dict[str, Any] | None:
        if self._own is None:
            return None
        gain = None if self.on_miss is None else self.on_miss.gain
        return {"asked": self._own.on_miss, "computes": self.computes_below, "gain": gain}

    def _prefetched(self) -> dict[str, Any] | None:
        if self.prefetcher is None:
            return None
        total = self.residents.total
        return {**self.prefetcher.told(), "read": total.early, "used": total.useful}


def _told(counts: Counts) -> dict[str, Any]:
    return {
        "lookups": counts.lookups,
        "hits": counts.hits,
        "hit_rate": counts.hit_rate,
        "read_bytes": counts.read_bytes,
    }


class LayerMemory:
    """The experts of one layer."""

    def __init__(self, memory: ExpertMemory, index: int, plan: LayerPlan) -> None:
        self.memory, self.index, self.plan = memory, index, plan
        self.pool = memory.pools[memory.residents.pool_of[index]]
        self._biases: tuple[Any, ...] = ()

    @property
    def counts(self) -> Counts:
        """Of decoding and prompts."""
        return self.memory.residents.decode[self.index] + self.memory.residents.prompt[self.index]

    def visit(self, visit: Visit, rows: Tensor | None) -> tuple[Sequence[Wave], Callable[[], None]]:
        """What is computed in turn for rows [T, H], and what is to be done once its reads have been asked for."""
        memory = self.memory
        prefetcher, decodes = memory.prefetcher, visit.last is None
        if self.index == 0:
            memory.step_began(decodes)
        if prefetcher is not None:
            prefetcher.meet(self.index, visit.experts)
            self._meet(visit.experts)
        waves = memory.residents.visit(visit.layer, visit.experts, visit.last)
        if prefetcher is None or rows is None:
            return waves, _nothing
        ahead = partial(self._ahead, prefetcher, rows) if decodes and prefetcher.gain.on else _nothing
        return self._late_ones_last(waves) if decodes else waves, ahead

    def _meet(self, experts: Collection[int]) -> None:
        """Look at what was read early: what has come may go, and what nobody needs and has not begun is left out."""
        residents = self.memory.residents
        for pool in self.memory.pools:
            for slot, (key, ticket) in list(pool.coming.items()):
                layer, expert = key
                if ticket.has_ended:
                    residents.arrived(layer, expert)
                elif layer == self.index and expert not in experts and ticket.drop():
                    del pool.coming[slot]
                    residents.forget(layer, [expert])
        residents.only_coming(key for pool in self.memory.pools for key, _ in pool.coming.values())

    def _ahead(self, prefetcher: Prefetcher, rows: Tensor) -> None:
        """Have experts of the next layer read after all that was asked for."""
        memory, layer = self.memory, self.index + 1
        if not (experts := prefetcher.predict(layer, rows)):
            return
        owner = memory.layers[layer]
        for expert, slot in memory.residents.prefetch(layer, experts):
            arrivals = owner.ask(Visit(layer, {expert: 1}), {expert: slot}, urgent=False)
            owner.pool.coming[slot] = (layer, expert), arrivals[expert]

    def _late_ones_last(self, waves: Sequence[Wave]) -> Sequence[Wave]:
        """Experts that are still being read early go with those that are read now."""
        first = waves[0] if waves else None
        if first is None or first.loads or not self.pool.coming:
            return waves
        late = [i for i, slot in enumerate(first.slots) if self._is_late(slot)]
        if not late:
            return waves
        ready = [i for i in range(len(first.slots)) if i not in late]
        parts = [Wave(tuple(first.experts[i] for i in p), tuple(first.slots[i] for i in p), ()) for p in (ready, late)]
        following = waves[1] if len(waves) > 1 else Wave((), (), ())
        joined = Wave(parts[1].experts + following.experts, parts[1].slots + following.slots, following.loads)
        return [wave for wave in (parts[0], joined, *waves[2:]) if wave.experts]

    def _is_late(self, slot: int) -> bool:
        coming = self.pool.coming.get(slot)
        return coming is not None and not coming[1].has_ended

    def in_turn(
        self,
        visit: Visit,
        waves: Sequence[Wave],
        like: ExpertWeights | None,
        asked: Callable[[], None],
        below: bool = False,
    ) -> Generator[Turn, None, None]:
        """Each wave once its experts are in their slots; what comes next is read while the caller computes.

        Args:
            visit: what was asked for, and its `waves`.
            like, below: as for `Turns`.
            asked: called once all reads that can begin have been asked for.
        """
        return Turns(self, visit, waves, like, below).each(asked)

    def ask(self, visit: Visit, slots: Mapping[int, int], urgent: bool) -> Mapping[int, Arrival]:
        """Ask the tier below for experts of this layer, each for a slot."""
        for slot in slots.values():
            self.pool.empty(slot)
        rooms = {expert: self.pool.rooms(slot) for expert, slot in slots.items()}
        return self.memory.below.bring(visit, rooms, urgent)

    def forget(self, waves: Sequence[Wave]) -> None:
        """A visit broke off before these waves: what has not come is not there."""
        for wave in waves:
            for slot in wave.slots:
                if slot in self.pool.coming:
                    self.pool.coming.pop(slot)[1].settle()
            lost = [
                expert
                for expert, slot in zip(wave.experts, wave.slots, strict=True)
                if self.pool.holds[slot] != (self.index, expert)
            ]
            self.memory.residents.forget(self.index, lost)

    def slots_of(self, like: ExpertWeights) -> ExpertWeights:
        """The pool's slots as experts, with the biases of this layer's as they are now."""
        now = tuple(None if b is None else (b.data_ptr(), _version(b), b.dtype) for b in biases_of(like))
        slots = self.pool.weights(like)
        if now != self._biases:
            for slot, key in enumerate(self.pool.holds):
                if key is not None and key[0] == self.index:
                    self.pool.set_bias(like, key[1], slot)
            self._biases = now  # at the end: whoever is broken off begins again
        return slots

    def slots_with(self, like: ExpertWeights, wave: Wave) -> ExpertWeights:
        """`slots_of`, for experts of which some may have come for another tier, and so without their biases."""
        slots, pool = self.slots_of(like), self.pool
        for expert, slot in zip(wave.experts, wave.slots, strict=True):
            if slot in pool.unbiased:
                pool.set_bias(like, expert, slot)
                pool.unbiased.discard(slot)
        return slots

    def __str__(self) -> str:
        """For `moestro.explain`."""
        counts, memory = self.counts, self.memory
        rate = f"{counts.hits} of {counts.lookups} lookups hit" if counts.lookups else "no lookups yet"
        return f"{memory}; here {rate}"


def _nothing() -> None:
    """Where nothing is predicted."""


def _version(tensor: Tensor) -> int:
    """Goes up when the tensor is written to, but for those of inference mode, which do not count."""
    return 0 if tensor.is_inference() else tensor._version
