"""The experts of a model behind the slots of one budget: what is where, what is read, and what has happened."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moestro.memory.amounts import shown_bytes
from moestro.memory.budget import MemoryBudget
from moestro.memory.policy import policy_named
from moestro.memory.reader import OPERATION, Reader, Ticket
from moestro.memory.residents import Counts, Residents, Wave
from moestro.memory.sizes import LayerSize, total_bytes
from moestro.memory.slots import Build, SlotPool, SlotTensor, Source, biases_of
from moestro.weights import ExpertWeights


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One layer, before there are slots.

    Attributes:
        name: the layer's, for errors.
        size: how many experts, and what one takes; layers whose `pool_key` is equal share slots, so it says all of
            `tensors`, and all that `build` depends on.
        tensors: that make up an expert.
        sources: where each of them is in the files.
        build: makes the stored experts of a pool's stacks.
    """

    name: str
    size: LayerSize
    tensors: tuple[SlotTensor, ...]
    sources: tuple[Source, ...]
    build: Build


class ExpertMemory:
    """All experts of a model in the slots of a budget. One forward at a time: `lock` is held while a layer is computed.

    Args:
        layers: in execution order.
        budget: how much, which policy, and how many threads read.
        reader: the one that has the files of the layers' sources.

    Attributes:
        residents: which expert is in which slot.
        pools: the slots themselves.
        seconds_waiting: for reads, of all forwards.

    Raises:
        InvalidInputError: a budget below the least that works.
    """

    def __init__(self, layers: Sequence[LayerPlan], budget: MemoryBudget, reader: Reader) -> None:
        self.budget, self.reader = budget, reader
        sizes = [plan.size for plan in layers]
        self.residents = Residents(sizes, budget.nbytes, policy_named(OPERATION, budget.policy))
        firsts = [layers[pool.layers[0]] for pool in self.residents.pools]
        self.pools = [
            SlotPool(first.tensors, pool.slots, first.build)
            for first, pool in zip(firsts, self.residents.pools, strict=True)
        ]
        self.layers = [LayerMemory(self, index, plan) for index, plan in enumerate(layers)]
        self.total_bytes = total_bytes(sizes)
        self.seconds_waiting = 0.0
        self.lock = threading.RLock()

    @property
    def slot_bytes(self) -> int:
        """Of all slots; at most the budget."""
        return sum(pool.nbytes for pool in self.pools)

    def __str__(self) -> str:
        """In one line what the budget holds."""
        residents = self.residents
        little = "" if self.slot_bytes >= residents.cycle else f", below the {shown_bytes(residents.cycle)} of a token"
        how = "past the page cache" if self.reader.direct else "through the page cache"
        return (
            f"experts in {shown_bytes(self.slot_bytes)} of {shown_bytes(self.total_bytes)}{little}:"
            f" {residents.slots} slots, policy {self.budget.policy}, {self.budget.threads} threads read {how}"
        )

    def statistics(self) -> dict[str, Any]:
        """What has happened so far, as plain values: in all, and layer by layer."""
        residents, counts = self.residents, self.reader.counts
        layers = [
            {"layer": layer.plan.name, "decode": _told(decode), "prompt": _told(prompt)}
            for layer, decode, prompt in zip(self.layers, residents.decode, residents.prompt, strict=True)
        ]
        return {
            "budget_bytes": self.budget.nbytes,
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
            "layers": layers,
        }


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

    def in_turn(self, waves: Sequence[Wave], like: ExpertWeights) -> Iterator[Wave]:
        """Each wave once its experts are in their slots; what comes next is read while the caller computes.

        A wave's reads begin as soon as no slot of theirs belongs to a wave that has not been computed.

        Args:
            waves: of one visit.
            like: the layer's experts, whose biases go with them.

        Raises:
            InvalidInputError: a file is not what it was; then no expert counts as there that is not.
        """
        tickets: list[list[tuple[int, int, Ticket]]] = []
        arrived = 0
        try:
            for number, wave in enumerate(waves):
                while len(tickets) < len(waves) and self._may_begin(waves, number, len(tickets)):
                    tickets.append(self._begin(waves[len(tickets)]))
                self._finish(tickets[number], like)
                arrived += 1
                yield wave
        finally:
            for expert, slot, ticket in (each for begun in tickets[arrived:] for each in begun):
                if self.pool.holds[slot] != (self.index, expert):
                    ticket.settle()
            if arrived < len(waves):
                self._forget(waves[arrived:])

    def _may_begin(self, waves: Sequence[Wave], now: int, candidate: int) -> bool:
        """Whether a wave's reads leave alone what is computed from now on before it."""
        used = {slot for wave in waves[now:candidate] for slot in wave.slots}
        return used.isdisjoint(slot for _, slot in waves[candidate].loads)

    def _begin(self, wave: Wave) -> list[tuple[int, int, Ticket]]:
        """Ask for what is not in its slot."""
        pool, begun = self.pool, []
        for expert, slot in zip(wave.experts, wave.slots, strict=True):
            if pool.holds[slot] != (self.index, expert):
                pool.empty(slot)
                runs = pool.runs(self.plan.sources, expert, slot)
                name = f"expert {expert} of {self.plan.name}"
                begun.append((expert, slot, self.memory.reader.submit(runs, name)))
        return begun

    def _finish(self, begun: Sequence[tuple[int, int, Ticket]], like: ExpertWeights) -> None:
        if not begun:
            return
        start = time.perf_counter()
        for expert, slot, ticket in begun:
            ticket.wait()
            self.pool.set_bias(like, expert, slot)
            self.pool.holds[slot] = (self.index, expert)
        self.memory.seconds_waiting += time.perf_counter() - start

    def _forget(self, waves: Sequence[Wave]) -> None:
        for wave in waves:
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

    def __str__(self) -> str:
        """For `moestro.explain`."""
        counts, memory = self.counts, self.memory
        rate = f"{counts.hits} of {counts.lookups} lookups hit" if counts.lookups else "no lookups yet"
        return f"{memory}; here {rate}"


def _version(tensor: Tensor) -> int:
    """Goes up when the tensor is written to, but for those of inference mode, which do not count."""
    return 0 if tensor.is_inference() else tensor._version
