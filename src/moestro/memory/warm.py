"""The warm tier: slots in the host's memory, of which experts are copied to a device's, or computed where they are."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from moestro.memory.amounts import shown_bytes
from moestro.memory.budget import MemoryBudget
from moestro.memory.experts import ExpertMemory
from moestro.memory.policy import Visit
from moestro.memory.reader import Reader
from moestro.memory.tiers import Copy, Files, LayerPlan, Link, Rooms, link_to
from moestro.memory.turns import Turn, Turns
from moestro.ops.grouping.tuning import MOST_EXPERTS


def tiers_of(layers: Sequence[LayerPlan], budget: MemoryBudget, reader: Reader) -> ExpertMemory:
    """The topmost tier of a budget, with the others below it: slots of the device, of the host, files.

    Raises:
        InvalidInputError: a budget below the least that works.
        UnsupportedError: a device that is neither the CPU nor an NVIDIA GPU.
    """
    host, own = ExpertMemory(layers, budget, Files(reader, layers)), budget.device_memory
    if own is None:
        return host
    device = torch.empty(0, device=own.device).device
    memory = [part for pool in host.pools for part in pool.memory]
    return ExpertMemory(_told_apart(layers, own.nbytes), budget, Warm(host, link_to(device, memory)), device)


def _told_apart(layers: Sequence[LayerPlan], nbytes: int) -> list[LayerPlan]:
    """The layers, those that are alike in groups that share slots, with at most `MOST_EXPERTS` experts each.

    A call is given all slots of its layer's group, and a GPU's kernels take no more than that.
    """
    alike: dict[tuple[int, str], int] = {}
    for size in (plan.size for plan in layers):
        key = size.expert_bytes, size.pool_key
        alike[key] = alike.get(key, 0) + size.experts
    begun: dict[tuple[int, str], tuple[int, int]] = {}
    found = []
    for plan in layers:
        size = plan.size
        key = size.expert_bytes, size.pool_key
        if min(alike[key], nbytes // size.expert_bytes) <= MOST_EXPERTS:
            found.append(plan)
            continue
        part, experts = begun.get(key, (0, 0))
        part, experts = (part, experts) if experts + size.experts <= MOST_EXPERTS else (part + 1, 0)
        begun[key] = part, experts + size.experts
        found.append(replace(plan, size=replace(size, pool_key=f"{size.pool_key} {part}")))
    return found


class Warm:
    """Slots of the host's memory, as the tier of a device sees them.

    They are asked for what the device lacks only, so that by the same policy an expert that stays on the device leaves
    them in time.

    Args:
        memory: the slots.
        link: what copies from them.
    """

    one_by_one = True

    def __init__(self, memory: ExpertMemory, link: Link) -> None:
        self.memory, self.link, self.reader = memory, link, memory.reader
        self.layers = memory.layers
        self._last: Delivery | None = None
        self._kept: list[Rooms] = []

    def bring(self, visit: Visit, rooms: Mapping[int, Rooms], urgent: bool = True) -> Mapping[int, Part]:
        """As of every tier: what is here is copied, the rest is read from the files first."""
        if self._last is not None:
            self._last.end()
        self._last = delivery = Delivery(self, visit, rooms)
        delivery.begin()
        return {expert: Part(delivery, expert) for expert in rooms}

    def follow(self) -> None:
        """As of every tier."""
        self.link.follow()

    def keep(self, memory: Rooms) -> None:
        """As of every tier."""
        self._kept.append(memory)

    def statistics(self) -> dict[str, Any] | None:
        """As of every tier."""
        return self.memory.statistics()

    def __str__(self) -> str:
        return f"below {shown_bytes(self.memory.slot_bytes)} of the host's memory, {self.memory.below}"


class Delivery:
    """Experts of one visit on their way up, in the order in which the warm tier comes to have them."""

    def __init__(self, warm: Warm, visit: Visit, rooms: Mapping[int, Rooms]) -> None:
        self._warm, self._rooms = warm, dict(rooms)
        self._layer = warm.memory.layers[visit.layer]
        self._copies: dict[int, Copy | None] = {}
        self._awaited = set(rooms)
        self._early: list[Turn] = []
        self._waves, asked = self._layer.visit(visit, None)
        self._reads = Turns(self._layer, visit, self._waves, None)
        self._turns = self._reads.each(asked)

    def begin(self) -> None:
        """Ask the files for what is not here, and copy what is."""
        self._reads.begin()
        if self._waves and not self._waves[0].loads:
            self._early.append(self._advance())

    def has(self, expert: int) -> bool:
        """Whether its copy has begun."""
        return expert not in self._rooms

    def there(self) -> Generator[Turn, None, None]:
        """Each wave where it is, while it is copied."""
        while self._early or self._rooms:
            yield self._early.pop() if self._early else self._advance()

    def bring(self, expert: int) -> Copy | None:
        """Have it copied; those before it go first."""
        while expert in self._rooms:
            self._advance()
        self._awaited.discard(expert)
        return self._copies[expert]

    def end(self) -> None:
        """Another visit begins. Copies that were waited for may go on: the slots above have them."""
        if self._awaited:
            self.close()
        else:
            self._turns.close()
            self._reads.end()

    def close(self) -> None:
        """A call broke off: nothing more is read or copied, once this returns."""
        self._turns.close()
        self._reads.end()
        for copy in self._copies.values():
            if copy is not None:
                copy.settle()

    def _advance(self) -> Turn:
        turn = next(self._turns)
        pool = self._layer.pool
        for expert, slot in zip(turn.wave.experts, turn.wave.slots, strict=True):
            copy = self._warm.link.copy(self._rooms[expert], pool.rooms(slot))
            if copy is not None:
                pool.copies[slot] = copy
            self._copies[expert] = copy
            del self._rooms[expert]
        return turn


class Part:
    """One expert of a delivery."""

    def __init__(self, delivery: Delivery, expert: int) -> None:
        self._delivery, self._expert = delivery, expert

    def wait(self) -> Copy | None:
        """As of every tier; its copy may still go on, and what uses the slot waits for that."""
        return self._delivery.bring(self._expert)

    def there(self) -> Generator[Turn, None, None]:
        """All experts that were asked for with it, where they are, in turn."""
        return self._delivery.there()

    def settle(self) -> None:
        """As of every tier."""
        self._delivery.close()

    def hurry(self) -> None:
        """They come in order."""

    @property
    def has_ended(self) -> bool:
        return self._delivery.has(self._expert)

    def drop(self) -> bool:
        """They come together."""
        return False
