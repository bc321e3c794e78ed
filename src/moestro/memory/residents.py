"""Which experts are in which slots: what a live run and its replay both ask, so that their counts are equal.

No weight is touched here. `Residents` says which experts are computed together, where each is and which must be read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from moestro.errors import invalid_input
from moestro.memory.policy import Ints, Policy, Visit, check_visit
from moestro.memory.sizes import LEAST_SLOTS, LayerSize, Pool, cut, cycle_bytes, least_budget

MOST_PREFETCHED = 2
"""Experts of a layer that are read before they are asked for."""


@dataclass(frozen=True)
class Wave:
    """Experts of a layer that are computed together; the waves of a visit together are its experts, each once.

    Attributes:
        experts: in this wave.
        slots: where each is, in the slots of the layer's pool.
        loads: (expert, slot) that are read before the wave is computed; the others are there.
    """

    experts: tuple[int, ...]
    slots: tuple[int, ...]
    loads: tuple[tuple[int, int], ...]


@dataclass
class Counts:
    """What happened in a layer.

    Attributes:
        visits, lookups, hits, loads: hits and loads together are the lookups.
        read_bytes: of the loads, and of the experts that were read early.
        early: experts that were read before they were asked for.
        useful: those of them that were there when they were.
    """

    visits: int = 0
    lookups: int = 0
    hits: int = 0
    loads: int = 0
    read_bytes: int = 0
    early: int = 0
    useful: int = 0

    @property
    def hit_rate(self) -> float:
        """Of the lookups; 0 without any."""
        return self.hits / self.lookups if self.lookups else 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)))


class _State:
    """The slots of a pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.keys: Ints = np.full(pool.slots, -1, np.int64)
        self.slot_of: dict[int, int] = {}
        self.free = list(range(pool.slots - 1, -1, -1))
        self.passing: dict[int, None] = {}
        self.pinned: set[int] = set()
        self.to_pin = 0

    def put_right(self, pinned: Collection[int]) -> None:
        """Have all the rest say what `keys` says."""
        self.slot_of = {int(self.keys[slot]): int(slot) for slot in np.flatnonzero(self.keys >= 0)}
        self.free = [int(slot) for slot in np.flatnonzero(self.keys < 0)[::-1]]
        self.passing = {slot: None for slot in self.passing if self.keys[slot] >= 0}
        self.pinned = {slot for key, slot in self.slot_of.items() if key in pinned}

    def held(self, stays: Iterable[int]) -> set[int]:
        """Slots that may not be taken: those of these keys, and of pinned ones."""
        return {slot for key in stays if (slot := self.slot_of.get(key)) is not None} | self.pinned

    def room(self, stays: Iterable[int]) -> int:
        """How many may be taken."""
        return self.pool.slots - len(self.held(stays))

    def put(self, key: int, slot: int) -> None:
        """An expert comes into an empty slot."""
        self.keys[slot] = key
        self.slot_of[key] = slot

    def evict(self, slot: int) -> int:
        """The expert that leaves."""
        key = int(self.keys[slot])
        self.keys[slot] = -1
        self.passing.pop(slot, None)
        self.pinned.discard(slot)
        del self.slot_of[key]
        return key


class Residents:
    """The slots of a budget, and the experts in them.

    Not safe for threads: one visit after the other, in execution order. What Ctrl-C leaves half done the next call puts
    right. The experts of a visit are no victims of it unless it needs more slots than there are.

    A visit in decoding (`last` is None) keeps all that it reads. A visit of a prompt keeps the experts of its last
    tokens and, in empty slots, its largest groups, as far as its layer's even share of them goes; the others pass
    through a few slots, which go first from then on. A visit that needs more slots than there are does the same.

    Loads of a wave never go to a slot of the wave before it, but may go to one of an earlier wave: a wave can be read
    while the one before it is computed, once all before that are done.

    Args:
        layers: sizes, in execution order.
        budget: bytes of all slots together, at most.
        policy: who goes.

    Attributes:
        pools: of slots; `pool_of[layer]` is the index of a layer's.
        decode, prompt: counts by layer.

    Raises:
        InvalidInputError: a budget below the least that works, or pinned experts that leave too few slots.
    """

    def __init__(self, layers: Sequence[LayerSize], budget: int, policy: Policy) -> None:
        self.layers = tuple(layers)
        self.budget = budget
        self.policy = policy
        self.pools = cut("memory", layers, budget)
        self.least = least_budget(layers)
        self.cycle = cycle_bytes(layers)
        self.pool_of = [next(i for i, p in enumerate(self.pools) if layer in p.layers) for layer in range(len(layers))]
        self.decode = [Counts() for _ in layers]
        self.prompt = [Counts() for _ in layers]
        self._ranking = policy.start(layers)
        self._first = self._ranking.first
        self._states = [_State(pool) for pool in self.pools]
        self._whole = all(pool.slots == pool.experts for pool in self.pools)  # then nobody ever goes
        self._early: set[int] = set()
        self._coming: set[int] = set()
        self._visited: tuple[int, frozenset[int]] = (-1, frozenset())
        self._changing = False
        self._check_pinned()

    @property
    def bytes_used(self) -> int:
        """Of the slots that hold something; never more than the budget."""
        return sum((s.pool.slots - len(s.free)) * s.pool.expert_bytes for s in self._states)

    @property
    def slots(self) -> int:
        """Of all pools."""
        return sum(pool.slots for pool in self.pools)

    @property
    def total(self) -> Counts:
        """Of all layers, decoding and prompts."""
        return sum([*self.decode, *self.prompt], Counts())

    def slot_of(self, layer: int, expert: int) -> int | None:
        """Where an expert is; None where it is not."""
        return self._states[self.pool_of[layer]].slot_of.get(self._first[layer] + expert)

    def resident(self, layer: int) -> dict[int, int]:
        """Slots by the experts of a layer that are in one."""
        begin, end = self._first[layer], self._first[layer + 1]
        slots = self._states[self.pool_of[layer]].slot_of
        return {key - begin: slot for key, slot in sorted(slots.items()) if begin <= key < end}

    def visit(self, layer: int, experts: Mapping[int, int], last: Collection[int] | None = None) -> tuple[Wave, ...]:
        """What is computed in turn for a layer of a forward: hits first, then what is read, largest groups first.

        Args:
            layer: its index.
            experts: by each expert that is routed to, its number of tokens.
            last: None in decoding; in a prompt the experts of its last tokens, of all sequences.

        Raises:
            InvalidInputError: another layer or other experts than there are.
        """
        visit = Visit(layer, experts, last)
        check_visit("memory", self.layers, visit)
        self._begin()
        base, state = self._first[layer], self._states[self.pool_of[layer]]
        need = [base + expert for expert in sorted(experts, key=lambda e: (-experts[e], e))]
        hits = [key for key in need if key in state.slot_of]
        misses = [key for key in need if key not in state.slot_of]
        self._visited = layer, frozenset(need)
        stays = self._visited[1] | self._coming
        if not self._whole:
            self._ranking.seen(visit)
        self._count(visit, hits, len(misses))
        room = state.room(stays)
        if last is None and len(misses) <= room:
            for key in hits:
                state.passing.pop(state.slot_of[key], None)
            waves = [self._wave(layer, hits), self._load(layer, misses, self._take(layer, len(misses), stays))]
        else:
            waves = self._stream(visit, hits, misses, stays)
        self._end()
        return tuple(wave for wave in waves if wave.experts)

    def prefetch(self, layer: int, experts: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Experts to read before a layer asks for them, and the slot of each: at most two of those that are not there.

        They take no slot of what is predicted, nor of the visit that goes on, and leave the least that works to what is
        not being read. Until `arrived` or `forget` says otherwise their slots are not taken.

        Args:
            layer: that comes next.
            experts: that are predicted for it, the likeliest first.

        Raises:
            InvalidInputError: another layer or other experts than there are.
        """
        check_visit("memory", self.layers, Visit(layer, dict.fromkeys(experts, 1)))
        self._begin()
        base, state = self._first[layer], self._states[self.pool_of[layer]]
        wanted = [base + expert for expert in dict.fromkeys(experts) if base + expert not in state.slot_of]
        stays = self._visited[1] | self._coming | {base + expert for expert in experts}
        coming = sum(key in state.slot_of for key in self._coming)
        spare = state.pool.slots - state.pool.least - state.to_pin - coming
        keys = wanted[: max(0, min(MOST_PREFETCHED, state.room(stays), spare))]
        loads = self._load(layer, keys, self._take(layer, len(keys), stays)).loads
        for key in keys:
            self._ranking.fetched(key)
            self._early.add(key)
            self._coming.add(key)
        counts = self.decode[layer]
        counts.early += len(keys)
        counts.read_bytes += len(keys) * state.pool.expert_bytes
        self._end()
        return loads

    def arrived(self, layer: int, expert: int) -> None:
        """An expert that `prefetch` had read is in its slot; it may go from now on."""
        self._coming.discard(self._first[layer] + expert)

    def only_coming(self, experts: Iterable[tuple[int, int]]) -> None:
        """Of what `prefetch` had read, only these (layer, expert) are still on their way; what Ctrl-C lost may go."""
        self._coming.intersection_update({self._first[layer] + expert for layer, expert in experts})

    def forget(self, layer: int, experts: Iterable[int]) -> None:
        """Experts are not where they were to be: their read failed, or was dropped. Their slots are empty."""
        self._begin()
        state = self._states[self.pool_of[layer]]
        for expert in experts:
            slot = self.slot_of(layer, expert)
            if slot is not None:
                self._evict(state, slot)
                state.free.append(slot)
        self._end()

    def _begin(self) -> None:
        """Slots change from here to `_end`; what a Ctrl-C left half done is put right first."""
        if self._changing:
            for state in self._states:
                state.put_right(self._ranking.pinned)
            held = [key for state in self._states for key in state.slot_of]
            self._early.intersection_update(held)
            self._coming.intersection_update(held)
        self._changing = True

    def _end(self) -> None:
        assert self.bytes_used <= self.budget
        self._changing = False

    def _take(self, layer: int, count: int, stays: frozenset[int]) -> list[int]:
        """So many slots of a layer's pool, empty now: free ones, those that experts passed through, the policy's."""
        state = self._states[self.pool_of[layer]]
        found = [state.free.pop() for _ in range(min(count, len(state.free)))]
        passing = [slot for slot in state.passing if int(state.keys[slot]) not in stays][: count - len(found)]
        for slot in passing:
            self._evict(state, slot)
        found += passing
        if len(found) < count:
            protected = [*state.held(stays), *found]
            victims = self._ranking.victims(layer, state.keys, count - len(found), protected)
            for slot in victims:
                self._evict(state, slot)
            found += victims
        return found

    def _evict(self, state: _State, slot: int) -> None:
        key = state.evict(slot)
        self._early.discard(key)
        self._coming.discard(key)

    def _wave(self, layer: int, keys: Sequence[int]) -> Wave:
        """Of experts that are there."""
        base, slot_of = self._first[layer], self._states[self.pool_of[layer]].slot_of
        return Wave(tuple(key - base for key in keys), tuple(slot_of[key] for key in keys), ())

    def _load(self, layer: int, keys: Sequence[int], slots: Sequence[int]) -> Wave:
        """Of experts that come into empty slots."""
        base, state = self._first[layer], self._states[self.pool_of[layer]]
        for key, slot in zip(keys, slots, strict=True):
            state.put(key, slot)
            if key in self._ranking.pinned:
                state.pinned.add(slot)
        experts = tuple(key - base for key in keys)
        return Wave(experts, tuple(slots), tuple(zip(experts, slots, strict=True)))

    def _stream(self, visit: Visit, hits: list[int], misses: list[int], stays: frozenset[int]) -> list[Wave]:
        """Hits, then misses that stay, then the others through a few slots, half of them at a time."""
        layer = visit.layer
        state, top_k = self._states[self.pool_of[layer]], self.layers[layer].top_k
        room = state.room(stays)
        keep = {self._first[layer] + expert for expert in visit.last or ()} | self._ranking.pinned
        share = max(0, state.pool.slots // len(state.pool.layers) - len(self.resident(layer)))
        kept, others = _split(keep, misses, min(len(state.free), share), room)
        spare = room - len(kept)
        count = min(len(others), max(LEAST_SLOTS, min(2 * top_k, spare)))
        lost = _lost(keep, self._ranking.pinned, hits, max(0, count - spare))
        for key in keep.intersection(hits):
            state.passing.pop(state.slot_of[key], None)
        kept_slots = self._take(layer, len(kept), stays)
        last = self._load(layer, kept, kept_slots)
        stage = [*self._take(layer, count - len(lost), stays), *(state.slot_of[key] for key in lost)]
        halves = stage[: (count + 1) // 2], stage[(count + 1) // 2 :]
        early = [key for key in lost if state.slot_of[key] in halves[0]]
        waves = [self._wave(layer, early), self._wave(layer, [key for key in hits if key not in early]), last]
        for begin in range(0, len(others), max(1, count)):
            group = others[begin : begin + count]
            for slots, keys in zip(halves, (group[: len(halves[0])], group[len(halves[0]) :]), strict=True):
                for slot in slots[: len(keys)]:
                    if state.keys[slot] >= 0:
                        self._evict(state, slot)
                waves.append(self._load(layer, keys, slots[: len(keys)]))
        state.passing.update(dict.fromkeys(stage))
        return waves

    def _count(self, visit: Visit, hits: Sequence[int], loads: int) -> None:
        counts = (self.decode if visit.last is None else self.prompt)[visit.layer]
        counts.visits += 1
        counts.lookups += len(hits) + loads
        counts.hits += len(hits)
        counts.loads += loads
        counts.read_bytes += loads * self.layers[visit.layer].expert_bytes
        if self._early:
            counts.useful += len(self._early.intersection(hits))
            self._early.difference_update(hits)

    def _check_pinned(self) -> None:
        for pool, state in zip(self.pools, self._states, strict=True):
            begins = [(self._first[layer], self._first[layer + 1]) for layer in pool.layers]
            pinned = sum(begin <= key < end for key in self._ranking.pinned for begin, end in begins)
            state.to_pin = pinned
            if pinned and pinned > pool.slots - pool.least:
                raise invalid_input(
                    "memory",
                    got=f"{pinned} pinned experts in {pool.slots} slots of {pool.expert_bytes:,} bytes",
                    needs=f"at least {pool.least} slots beside them",
                    fix="Pin fewer, or raise the budget.",
                )


def _split(keep: Collection[int], misses: list[int], free: int, room: int) -> tuple[list[int], list[int]]:
    """Misses that stay: those to keep, then as many as there are empty slots. And those that pass through."""
    wanted = [key for key in misses if key in keep]
    rest = [key for key in misses if key not in keep]
    wanted += rest[: max(0, free - len(wanted))]
    if len(wanted) + min(LEAST_SLOTS, len(misses) - len(wanted)) > room:
        wanted = wanted[: max(0, room - LEAST_SLOTS)]
    chosen = set(wanted)
    return [key for key in misses if key in chosen], [key for key in misses if key not in chosen]


def _lost(keep: Collection[int], pinned: Collection[int], hits: list[int], count: int) -> list[int]:
    """Hits that give their slots: the smallest groups, what is to be kept at the very last, what is pinned never."""
    return sorted((key for key in reversed(hits) if key not in pinned), key=lambda key: key in keep)[:count]
