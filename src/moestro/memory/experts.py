"""The experts of a model behind the slots of one budget: what is where, what is read, and what has happened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from moestro.memory.amounts import shown_bytes
from moestro.memory.budget import MemoryBudget
from moestro.memory.policy import Visit, policy_named
from moestro.memory.prefetch import Prefetcher
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
        prefetcher: what predicts the experts of a next layer; None where nobody asked for it.

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
        for pool in self.pools:
            reader.keep(pool.memory)
        self.layers = [LayerMemory(self, index, plan) for index, plan in enumerate(layers)]
        self.total_bytes = total_bytes(sizes)
        self.seconds_waiting = 0.0
        self.prefetcher: Prefetcher | None = None
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
        ahead = "" if self.prefetcher is None else f", {self.prefetcher}"
        return (
            f"experts in {shown_bytes(self.slot_bytes)} of {shown_bytes(self.total_bytes)}{little}:"
            f" {residents.slots} slots, policy {self.budget.policy}, {self.budget.threads} threads read {how}{ahead}"
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
            "prefetch": self._prefetched(),
            "layers": layers,
        }

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

    def visit(self, visit: Visit, rows: Tensor) -> tuple[Sequence[Wave], Callable[[], None]]:
        """What is computed in turn for rows [T, H], and what is to be done once its reads have been asked for."""
        memory = self.memory
        prefetcher, decodes = memory.prefetcher, visit.last is None
        if prefetcher is not None:
            if self.index == 0:
                prefetcher.gain.begin(decodes)
            prefetcher.meet(self.index, visit.experts)
            self._meet(visit.experts)
        waves = memory.residents.visit(visit.layer, visit.experts, visit.last)
        if prefetcher is None:
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

    def _ahead(self, prefetcher: Prefetcher, rows: Tensor) -> None:
        """Have experts of the next layer read after all that was asked for."""
        memory, layer = self.memory, self.index + 1
        if not (experts := prefetcher.predict(layer, rows)):
            return
        owner = memory.layers[layer]
        for expert, slot in memory.residents.prefetch(layer, experts):
            ticket = owner._read(expert, slot, urgent=False)
            owner.pool.coming[slot] = (layer, expert), ticket

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
        self, waves: Sequence[Wave], like: ExpertWeights, asked: Callable[[], None]
    ) -> Generator[Wave, None, None]:
        """Each wave once its experts are in their slots; what comes next is read while the caller computes.

        A wave's reads begin as soon as no slot of theirs belongs to a wave that has not been computed.

        Args:
            waves: of one visit.
            like: the layer's experts, whose biases go with them.
            asked: called once all reads that can begin have been asked for.

        Raises:
            InvalidInputError: a file is not what it was; then no expert counts as there that is not.
        """
        tickets: list[list[tuple[int, int, Ticket]]] = []
        arrived = 0
        try:
            for number, wave in enumerate(waves):
                while len(tickets) < len(waves) and self._may_begin(waves, number, len(tickets)):
                    tickets.append(self._begin(waves[len(tickets)]))
                if number == 0:
                    asked()
                self._finish(tickets[number], like)
                arrived += 1
                yield wave
        finally:
            for expert, slot, ticket in (each for begun in tickets[arrived:] for each in begun):
                if self.pool.holds[slot] != (self.index, expert):
                    ticket.settle()
            if arrived < len(waves):
                self._forget(waves[arrived:])
            elif self.memory.prefetcher is not None and self.index == len(self.memory.layers) - 1:
                self.memory.prefetcher.gain.end()

    def _may_begin(self, waves: Sequence[Wave], now: int, candidate: int) -> bool:
        """Whether a wave's reads leave alone what is computed from now on before it."""
        used = {slot for wave in waves[now:candidate] for slot in wave.slots}
        return used.isdisjoint(slot for _, slot in waves[candidate].loads)

    def _begin(self, wave: Wave) -> list[tuple[int, int, Ticket]]:
        """Ask for what is not in its slot."""
        pool, begun = self.pool, []
        for expert, slot in zip(wave.experts, wave.slots, strict=True):
            if pool.holds[slot] != (self.index, expert):
                key, ticket = pool.coming.pop(slot, (None, None))
                if ticket is not None and key == (self.index, expert):
                    ticket.hurry()
                else:
                    if ticket is not None:
                        ticket.settle()
                    ticket = self._read(expert, slot, urgent=True)
                begun.append((expert, slot, ticket))
        return begun

    def _read(self, expert: int, slot: int, urgent: bool) -> Ticket:
        """Ask for an expert."""
        self.pool.empty(slot)
        runs = self.pool.runs(self.plan.sources, expert, slot)
        return self.memory.reader.submit(runs, f"expert {expert} of {self.plan.name}", urgent)

    def _finish(self, begun: Sequence[tuple[int, int, Ticket]], like: ExpertWeights) -> None:
        if not begun:
            return
        start = time.perf_counter()
        for expert, slot, ticket in begun:
            ticket.wait()
            self.pool.set_bias(like, expert, slot)
            self.pool.holds[slot] = (self.index, expert)
            self.memory.residents.arrived(self.index, expert)
        self.memory.seconds_waiting += time.perf_counter() - start

    def _forget(self, waves: Sequence[Wave]) -> None:
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
            self._biases = now
            for slot, key in enumerate(self.pool.holds):
                if key is not None and key[0] == self.index:
                    self.pool.set_bias(like, key[1], slot)
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
