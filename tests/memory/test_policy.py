"""Policies: their victims are those of their definitions, and Belady's is the best that a visit's protection leaves."""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import InvalidInputError
from moestro.memory import (
    POLICIES,
    Belady,
    Counts,
    Expected,
    LayerSize,
    Policy,
    Residents,
    Visit,
    cycle_bytes,
    policy_named,
    replay,
    total_bytes,
    visit_of,
)
from moestro.memory.prompts import MOST_DECODED

PLAIN = Expected(decay=0.1, prior=math.inf)


def decoding(draw: st.DrawFn, layers: list[LayerSize], tokens: int) -> list[Visit]:
    """Tokens that go through all layers, each to some experts."""
    routed = [st.sets(st.integers(0, size.experts - 1), min_size=1, max_size=size.top_k) for size in layers]
    return [Visit(i, dict.fromkeys(sorted(draw(ids)), 1)) for _ in range(tokens) for i, ids in enumerate(routed)]


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[LayerSize], int, list[Visit]]:
    """Layers that share slots, fewer slots than experts, and tokens."""
    layers = [LayerSize(draw(st.integers(2, 6)), 2, 1)] * draw(st.integers(1, 3))
    budget = draw(st.integers(2, max(2, total_bytes(layers) - 1)))
    return layers, budget, decoding(draw, layers, draw(st.integers(1, 8)))


Key = tuple[int, int]


class LruByHand:
    """The number of the visit in which a key was last used; the lowest goes."""

    def __init__(self, layers: list[LayerSize]) -> None:
        self.layers, self.used, self.clock = layers, dict[Key, float](), 0

    def seen(self, visit: Visit) -> None:
        self.clock += 1
        self.used.update({(visit.layer, e): self.clock for e in visit.experts})

    def stays(self, layer: int, key: Key) -> float:
        return self.used[key]


class LfuByHand(LruByHand):
    """How often a key was used, then when; few visits, so that nothing is halved."""

    def __init__(self, layers: list[LayerSize]) -> None:
        super().__init__(layers)
        self.uses: dict[Key, int] = {}

    def seen(self, visit: Visit) -> None:
        super().seen(visit)
        for expert in visit.experts:
            self.uses[visit.layer, expert] = self.uses.get((visit.layer, expert), 0) + 1

    def stays(self, layer: int, key: Key) -> float:
        return self.uses[key] * 1000 + self.used[key]


class ExpectedByHand(LruByHand):
    """The published formula: layers until the key's comes, and L * (1 / p - 1) more."""

    def __init__(self, layers: list[LayerSize]) -> None:
        super().__init__(layers)
        self.rates = [[size.top_k / size.experts] * size.experts for size in layers]

    def seen(self, visit: Visit) -> None:
        tokens = max(1, math.ceil(len(visit.experts) / self.layers[visit.layer].top_k))
        assert tokens == 1
        for expert, rate in enumerate(self.rates[visit.layer]):
            self.rates[visit.layer][expert] = 0.9 * rate + 0.1 * (expert in visit.experts)

    def stays(self, layer: int, key: Key) -> float:
        count, rate = len(self.layers), self.rates[key[0]][key[1]]
        return -((key[0] - layer - 1) % count + 1 + count * (1 / max(rate, 1e-4) - 1))


@pytest.mark.parametrize(
    ("policy", "definition"),
    [(POLICIES["lru"], LruByHand), (POLICIES["lfu"], LfuByHand), (PLAIN, ExpectedByHand)],
    ids=lambda v: getattr(v, "name", ""),
)
@settings(max_examples=150, deadline=None)
@given(run=runs())
def test_victims_are_those_of_the_definition(
    policy: Policy, definition: type[LruByHand], run: tuple[list[LayerSize], int, list[Visit]]
) -> None:
    layers, budget, visits = run
    residents, hand = Residents(layers, budget, policy), definition(layers)
    for visit in visits:
        before = {(i, e) for i in range(len(layers)) for e in residents.resident(i)}
        residents.visit(visit.layer, visit.experts)
        hand.seen(visit)
        after = {(i, e) for i in range(len(layers)) for e in residents.resident(i)}
        could_go = after - {(visit.layer, e) for e in visit.experts}
        for victim in before - after:
            assert all(hand.stays(visit.layer, victim) <= hand.stays(visit.layer, key) + 1e-9 for key in could_go)


@settings(max_examples=100, deadline=None)
@given(run=runs())
def test_a_layer_over_its_share_gives_first(run: tuple[list[LayerSize], int, list[Visit]]) -> None:
    layers, budget, visits = run
    residents = Residents(layers, budget, POLICIES["layer_lfu"])
    for visit in visits:
        before = [residents.resident(i).keys() for i in range(len(layers))]
        residents.visit(visit.layer, visit.experts)
        after = [residents.resident(i).keys() for i in range(len(layers))]
        share = budget / len(layers)
        for i, (was, now) in enumerate(zip(before, after, strict=True)):
            if i != visit.layer and len(was - now) and len(now) < share - 1:  # below it only if all others are, too
                others = [len(a) for j, a in enumerate(after) if j not in (i, visit.layer)]
                assert all(count <= len(now) + 1 for count in others)


def fewest_loads(layers: list[LayerSize], budget: int, visits: list[Visit]) -> int:
    """By trying everything that could be kept after each visit, the visit's own experts included."""

    @cache
    def after(index: int, there: frozenset[Key]) -> int:
        if index == len(visits):
            return 0
        asked = frozenset((visits[index].layer, e) for e in visits[index].experts)
        missing, others = len(asked - there), sorted(there - asked)
        kept = min(len(others), budget - len(asked))
        return missing + min(after(index + 1, asked | frozenset(stay)) for stay in combinations(others, kept))

    return after(0, frozenset())


@settings(max_examples=150, deadline=None)
@given(run=runs())
def test_belady_reads_the_fewest(run: tuple[list[LayerSize], int, list[Visit]]) -> None:
    layers, budget, visits = run
    best = replay(layers, visits, budget, Belady(tuple(visits))).total
    assert best.loads == fewest_loads(layers, budget, visits)
    assert all(replay(layers, visits, budget, p).total.loads >= best.loads for p in (*POLICIES.values(), PLAIN))


def test_belady_refuses_another_future() -> None:
    layers = [LayerSize(4, 1, 1)] * 2
    residents = Residents(layers, 2, Belady((Visit(0, {1: 1}),)))
    with pytest.raises(InvalidInputError, match=r"visit 0 of layer 0 of experts \[2\]"):
        residents.visit(0, {2: 1})
    residents = Residents(layers, 2, Belady((Visit(0, {1: 1}),)))
    residents.visit(0, {1: 1})
    with pytest.raises(InvalidInputError, match="visit 1 of layer 1"):
        residents.visit(1, {1: 1})


def test_other_names_and_values() -> None:
    assert policy_named("memory", "expected") == Expected()
    with pytest.raises(InvalidInputError, match=r"'mru'; needs one of expected, lru, lfu, layer_lfu"):
        policy_named("memory", "mru")
    for wrong in ({"decay": 0}, {"decay": 1}, {"prior": 0}):
        with pytest.raises(InvalidInputError, match="0 < decay < 1, and prior above 0"):
            Expected(**wrong)


def hits(layers: list[LayerSize], visits: list[Visit], budget: int) -> dict[str, float]:
    policies = [*POLICIES.values(), Belady(tuple(visits))]
    return {p.name: 100 * sum(replay(layers, visits, budget, p).decode, Counts()).hit_rate for p in policies}


def drawn(layers: list[LayerSize], tokens: int, exponent: float, sticky: float) -> list[Visit]:
    """Tokens that keep an expert of the one before at a rate, and draw the others by popularity."""
    rng = np.random.default_rng(0)
    likely = [rng.permutation(np.arange(1, size.experts + 1.0) ** -exponent) for size in layers]
    before: list[list[int]] = [[] for _ in layers]
    visits = []
    for _ in range(tokens):
        for i, size in enumerate(layers):
            kept = [e for e in before[i] if rng.random() < sticky]
            weights = likely[i].copy()
            weights[kept] = 0
            fresh = rng.choice(size.experts, size.top_k - len(kept), replace=False, p=weights / weights.sum())
            before[i] = kept + [int(e) for e in fresh]
            visits.append(Visit(i, dict.fromkeys(before[i], 1)))
    return visits


LAYERS = [LayerSize(32, 4, 10)] * 12


@pytest.mark.parametrize("cycles", [0.5, 0.75])
def test_lru_hits_nothing_below_a_cycle(cycles: float) -> None:
    """The cliff: each token needs the same experts again, and each was evicted just before.

    Counts that are all equal fall back to it. The others hit.
    """
    visits = [Visit(i, dict.fromkeys(range(4), 1)) for _ in range(20) for i in range(12)]
    found = hits(LAYERS, visits, int(cycles * cycle_bytes(LAYERS)))
    assert found["lru"] == found["lfu"] == 0
    assert min(found["expected"], found["layer_lfu"]) > 30
    assert found["belady"] >= max(found.values())
    assert set(hits(LAYERS, visits, cycle_bytes(LAYERS)).values()) == {95.0}


@pytest.mark.parametrize(
    ("exponent", "sticky", "behind"),
    [(0.8, 0.0, 1.5), (0.8, 0.35, 1.5), (1.0, 0.15, 1.5), (0.0, 0.0, 1.5)],
    ids=["popular", "sticky", "both", "neither"],
)
def test_expected_is_near_the_best_that_does_not_know_the_future(exponent: float, sticky: float, behind: float) -> None:
    visits = drawn(LAYERS, 100, exponent, sticky)
    for cycles in (0.5, 1.05, 2, 4):
        found = hits(LAYERS, visits, int(cycles * cycle_bytes(LAYERS)))
        online = {name: rate for name, rate in found.items() if name != "belady"}
        assert online["expected"] >= max(online.values()) - behind, (cycles, found)
        assert found["belady"] > max(online.values())
    assert hits(LAYERS, visits, total_bytes(LAYERS))["lru"] == found_whole(visits)


def found_whole(visits: list[Visit]) -> float:
    """Hits in percent where everything stays: all but the first use of each expert."""
    lookups = sum(len(visit.experts) for visit in visits)
    return 100 * (1 - len({(v.layer, e) for v in visits for e in v.experts}) / lookups)


def test_popularity_helps_counts_and_repetition_helps_recency() -> None:
    at = int(1.05 * cycle_bytes(LAYERS))
    popular, sticky = (hits(LAYERS, drawn(LAYERS, 150, *kind), at) for kind in ((1.2, 0.0), (0.3, 0.5)))
    assert popular["lfu"] > popular["lru"] + 5
    assert sticky["lru"] > sticky["lfu"] + 5


def test_what_a_prompt_says_of_rates_is_used() -> None:
    """After a prompt that goes to some experts most, these are kept over those that a single token asked for."""
    layers = [LayerSize(8, 2, 1)]
    residents = Residents(layers, 4, POLICIES["expected"])
    residents.visit(0, {0: 50, 1: 40, 2: 3, 3: 3, 4: 2, 5: 2}, last=(0, 1))
    residents.visit(0, {6: 1, 7: 1})
    assert {0, 1} <= residents.resident(0).keys()


def test_visits_of_ids() -> None:
    assert visit_of(3, [[0, 2], [2, -1], [9, 2]], 8) == Visit(3, {0: 1, 2: 3}, None)
    prompt = visit_of(0, [[1, 2]] * MOST_DECODED + [[5, 8]], 8)
    assert prompt == Visit(0, {1: MOST_DECODED, 2: MOST_DECODED, 5: 1}, frozenset({5}))
