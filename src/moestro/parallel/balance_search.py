"""The search for a balanced placement: how many replicas, where they go, and what is then exchanged.

Every replica of an expert carries the same share of its load. No rank holds an expert twice. An empty slot is -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ENOUGH = 1.0005
"""The slowest rank's load over the mean at which nothing more is tried."""
NEAR = 1.005
"""The same, at which no expert is given other replicas."""
SLACK = 1e-9
"""By which share a change has to lower the loads it touches; less would be rounding."""
SMALL = 256
"""Slots times experts up to which placements are searched through."""
MAX_NODES = 5_000
"""How many steps of that search at most."""
REPAIRED = 8
"""New replicas that are tried with exchanges after them."""
MAX_REPAIR = 16
"""Slots that those exchanges may change."""
MAX_CHANGES = 8
"""For each slot, at which the search ends where it has not come to rest."""


@dataclass
class State:
    """A placement while it is changed.

    Attributes:
        loads: of each expert, float64 [E].
        slots: the expert of each slot, [ranks, most slots]; -1 empty, -2 no slot.
        held: which rank holds which expert, bool [ranks, E].
        counts: replicas of each expert, [E].
        ranks: the load of each rank, [ranks].
    """

    loads: Floats
    slots: Ints
    held: NDArray[np.bool_]
    counts: Ints
    ranks: Floats

    @classmethod
    def of(cls, loads: Floats, slots: Ints) -> State:
        """The state of slots that hold every expert."""
        held = np.zeros((len(slots), len(loads)), bool)
        rank, place = np.nonzero(slots >= 0)
        held[rank, slots[rank, place]] = True
        made = cls(loads, slots.copy(), held, held.sum(0), np.zeros(len(slots)))
        made.refresh()
        return made

    @property
    def share(self) -> Floats:
        """The load of a replica of each expert, [E], with a zero at the end for the empty slot's -1."""
        return np.append(self.loads / self.counts, 0.0)

    @property
    def slowest(self) -> float:
        return float(self.ranks.max())

    def put(self, rank: int, place: int, expert: int) -> None:
        """Another expert, or none (-1), into a slot; loads are refreshed by `refresh`."""
        old = int(self.slots[rank, place])
        if old >= 0:
            self.held[rank, old] = False
            self.counts[old] -= 1
        if expert >= 0:
            self.held[rank, expert] = True
            self.counts[expert] += 1
        self.slots[rank, place] = expert

    def refresh(self) -> None:
        """The loads of ranks for the slots as they are."""
        share = self.share
        self.ranks = share[np.maximum(self.slots, -1)].sum(1)


def empty_slots(num_slots: int, num_ranks: int) -> Ints:
    """Slots without experts; the first ranks have one more where the number is not divisible."""
    each, more = divmod(num_slots, num_ranks)
    made = np.full((num_ranks, each + (more > 0)), -1)
    if more:
        made[more:, -1] = -2
    return made


def plan(loads: Floats, slots: Ints) -> State:
    """Fill empty slots: heaviest first, then exchanges; small cases are then searched through."""
    counts = _replica_counts(loads, int((slots == -1).sum()), len(slots))
    state = improve(State.of(loads, _pack(loads, counts, slots)))
    return Search(state, slots).run() if slots.size * len(loads) <= SMALL else state


def _replica_counts(loads: Floats, num_slots: int, num_ranks: int) -> Ints:
    """Replicas of each expert. Every slot goes to the expert with the most load a replica, at most one a rank.

    Where loads are equal, to the one with the fewest replicas, so that a layer without load is replicated evenly.
    """
    counts = np.ones(len(loads), np.int64)
    for _ in range(min(num_slots, len(loads) * num_ranks) - len(loads)):
        share = np.where(counts < num_ranks, loads / counts, -1.0)
        heaviest = np.flatnonzero(share == share.max())
        counts[heaviest[counts[heaviest].argmin()]] += 1
    return counts


class Search:
    """Branch and bound over every number of replicas and every placement, from the best one known.

    It ends after `MAX_NODES` steps, each of which places one expert, with the best so far. Ranks of one load and room
    are alike.
    """

    def __init__(self, state: State, slots: Ints) -> None:
        self.best, self.slots, self.top = state, slots, state.slowest
        self.enough = ENOUGH * float(state.ranks.mean())
        self.nodes = 0

    def run(self) -> State:
        """The best placement found."""
        room = (self.slots == -1).sum(1)
        for counts in self._all_counts((), int(room.sum())):
            if self.over:
                break
            self.nodes += 1
            share = self.best.loads / np.array(counts)
            if share.max() >= self.top:
                continue
            order = np.argsort(-share, kind="stable").tolist()
            rest = np.append(np.cumsum((share * counts)[order][::-1])[::-1], 0.0).tolist()
            items = [(expert, counts[expert], float(share[expert])) for expert in order]
            self._place(items, rest, [0.0] * len(room), room.tolist(), [])
        return self.best

    @property
    def over(self) -> bool:
        return self.nodes >= MAX_NODES or self.top <= self.enough

    def _all_counts(self, chosen: tuple[int, ...], left: int) -> Iterator[tuple[int, ...]]:
        """Every number of replicas of each expert that fits, those with the most first."""
        more = len(self.best.loads) - len(chosen)
        if not more:
            yield chosen
            return
        for count in range(min(len(self.slots), left - more + 1), 0, -1):
            if self.best.loads[len(chosen)] / count < self.top:
                yield from self._all_counts((*chosen, count), left - count)

    def _place(
        self,
        items: list[tuple[int, int, float]],
        rest: list[float],
        ranks: list[float],
        room: list[int],
        chosen: list[tuple[int, ...]],
    ) -> None:
        """Place the replicas of the next expert in every way that may end below the best."""
        if len(chosen) == len(items):
            self._keep(items, chosen)
            return
        limit = self.top * (1 - SLACK)
        if rest[len(chosen)] > sum(limit - load for load, free in zip(ranks, room, strict=True) if free):
            return
        _, count, share = items[len(chosen)]
        alike = set()
        possible = [r for r in range(len(ranks)) if room[r] and ranks[r] + share < limit]
        for where in combinations(sorted(possible, key=ranks.__getitem__), count):
            key = tuple((ranks[r], room[r]) for r in where)
            if key in alike or self.over:
                continue
            alike.add(key)
            self.nodes += 1
            after, less = ranks.copy(), room.copy()
            for r in where:
                after[r] += share
                less[r] -= 1
            self._place(items, rest, after, less, [*chosen, where])

    def _keep(self, items: list[tuple[int, int, float]], chosen: list[tuple[int, ...]]) -> None:
        slots = self.slots.copy()
        for (expert, _, _), where in zip(items, chosen, strict=True):
            for rank in where:
                slots[rank, int((slots[rank] == -1).argmax())] = expert
        found = State.of(self.best.loads, slots)
        if found.slowest < self.top:
            self.best, self.top = found, found.slowest


def _pack(loads: Floats, counts: Ints, slots: Ints) -> Ints:
    """Replicas into slots, from the heaviest, each to the lightest rank that has room and does not hold the expert."""
    slots = slots.copy()
    num_ranks = len(slots)
    room, held, ranks = (slots == -1).sum(1), np.zeros((num_ranks, len(loads)), bool), np.zeros(num_ranks)
    share = loads / counts
    falling = np.argsort(-share, kind="stable")
    for expert in np.repeat(falling, counts[falling]):
        free = room > 0
        if not (free & ~held[:, expert]).any():
            _make_room(slots, held, ranks, share, int(expert))
            room = (slots == -1).sum(1)
            continue
        rank = int(np.where(free & ~held[:, expert], ranks, np.inf).argmin())
        _put(slots, held, ranks, share, (rank, int(expert)))
        room[rank] -= 1
    return slots


def _put(slots: Ints, held: NDArray[np.bool_], ranks: Floats, share: Floats, what: tuple[int, int]) -> None:
    rank, expert = what
    slots[rank, int((slots[rank] == -1).argmax())] = expert
    held[rank, expert] = True
    ranks[rank] += share[expert]


def _make_room(slots: Ints, held: NDArray[np.bool_], ranks: Floats, share: Floats, expert: int) -> None:
    """Every rank with room holds the expert: a full rank gives one of its others to the roomiest, and takes it."""
    rank = int((slots == -1).sum(1).argmax())
    full = int(np.where(held[:, expert], np.inf, ranks).argmin())
    movable = np.flatnonzero(held[full] & ~held[rank])
    moved = int(movable[share[movable].argmin()])
    place = int((slots[full] == moved).argmax())
    slots[full, place], held[full, moved] = -1, False
    ranks[full] -= share[moved]
    _put(slots, held, ranks, share, (rank, moved))
    _put(slots, held, ranks, share, (full, expert))


def improve(state: State, target: float = 0.0, max_moves: int | None = None) -> State:
    """Exchange experts between the slowest rank and others, or replicas for others, while that helps.

    Each step lowers the load of the slowest rank and leaves all that it touches below what that was.

    Args:
        state: changed in place, and returned.
        target: the slowest rank's load at which to stop.
        max_moves: at most so many slots get another expert; None for no limit.
    """
    moves = 0
    for _ in range(MAX_CHANGES * state.slots.size):
        target = max(target, ENOUGH * float(state.ranks.mean()))
        if state.slowest <= target:
            break
        left = None if max_moves is None else max_moves - moves
        cost = _exchange(state, left)
        if not cost and state.slowest > NEAR * state.ranks.mean():
            cost = _replicate(state, left)
        if not cost:
            break
        moves += cost
    return state


def _exchange(state: State, left: int | None) -> int:
    """The best swap of an expert of the slowest rank with one of another rank. The number of slots that changed, or 0.

    A swap with an empty slot is a move.
    """
    hot = int(state.ranks.argmax())
    share, top = state.share, state.slowest
    mine, others = state.slots[hot], state.slots
    gain = share[mine][:, None, None] - share[np.maximum(others, -1)][None]  # [own slot, rank, slot]
    after = np.maximum(top - gain, state.ranks[None, :, None] + gain)
    dead = (mine < 0)[:, None, None] | (others == -2)[None] | state.held[:, mine].T[:, :, None]
    dead = dead | (state.held[hot][np.maximum(others, 0)] & (others >= 0))[None]
    cost = np.where(others >= 0, 2, 1)
    if left is not None:
        dead |= (cost > left)[None]
    after = np.where(dead, np.inf, after)
    own, rank, place = (int(i) for i in np.unravel_index(int(after.argmin()), after.shape))
    if not after[own, rank, place] < top * (1 - SLACK):
        return 0
    given, taken = int(mine[own]), int(others[rank, place])
    state.put(hot, own, -1)
    state.put(rank, place, given)
    state.put(hot, own, taken)
    state.refresh()
    return int(cost[rank, place])


def _replicate(state: State, left: int | None) -> int:
    """A replica put where another expert has one too many, so that the slowest rank has less.

    Where no such step helps by itself, the nearest ones are tried with exchanges after them. The number of slots that
    changed, or 0.
    """
    if left == 0:
        return 0
    hot, top = int(state.ranks.argmax()), state.slowest * (1 - SLACK)
    own = np.flatnonzero(state.held[hot]).tolist()
    everything = list(range(len(state.loads)))
    found: list[tuple[float, int, int, int]] = []
    for given in [*np.flatnonzero(state.counts > 1).tolist(), -1]:  # loses a replica
        for taken in everything if given >= 0 and state.held[hot, given] else own:  # gains one
            if taken != given:
                value, rank = _after_replacing(state, given, taken, hot)
                found.append((value, given, taken, rank))
    for value, given, taken, rank in sorted(found)[:REPAIRED]:
        if value == np.inf:
            break
        tried = State.of(state.loads, state.slots)
        tried.put(rank, int((tried.slots[rank] == given).argmax()), taken)
        tried.refresh()
        cost = 1
        while value >= top and (left is None or cost < left) and cost < MAX_REPAIR:
            if not (step := _exchange(tried, None if left is None else left - cost)):
                break
            cost += step
            value = tried.slowest
        if value < top:
            state.slots, state.held, state.counts, state.ranks = tried.slots, tried.held, tried.counts, tried.ranks
            return cost
    return 0


def _after_replacing(state: State, given: int, taken: int, hot: int) -> tuple[float, int]:
    """The most load of a rank that is touched if one replica of an expert becomes one of another, and the best rank."""
    loads, counts, held = state.loads, state.counts, state.held
    more = loads[given] / (counts[given] - 1) - loads[given] / counts[given] if given >= 0 else 0.0
    less = loads[taken] / counts[taken] - loads[taken] / (counts[taken] + 1)
    gives = held[:, given] if given >= 0 else (state.slots == -1).any(1)
    after = state.ranks - less * held[:, taken] + (more * gives if given >= 0 else 0.0)
    touched = held[:, taken] | (gives if given >= 0 else False)
    touched[hot] = True
    possible = np.flatnonzero(gives & ~held[:, taken])
    if not len(possible):
        return np.inf, 0
    own = after[possible] + loads[taken] / (counts[taken] + 1)
    if given >= 0:
        own -= loads[given] / (counts[given] - 1)
    rest = np.where(touched, after, -np.inf)
    first = int(rest.argmax())
    second = np.partition(rest, -2)[-2] if len(rest) > 1 else -np.inf
    value = np.maximum(own, np.where(possible == first, second, rest[first]))
    return float(value.min()), int(possible[value.argmin()])
