"""Slots and the experts in them: whatever comes, what is computed is there, and no more is read than is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import InvalidInputError
from moestro.memory import (
    POLICIES,
    Belady,
    LayerSize,
    Pinned,
    Policy,
    Residents,
    Visit,
    cycle_bytes,
    least_budget,
    total_bytes,
)

NAMES = [*POLICIES, "pinned", "belady"]


@dataclass(frozen=True)
class Case:
    layers: tuple[LayerSize, ...]
    budget: int
    policy: Policy
    visits: tuple[Visit, ...]


def draw_visit(draw: st.DrawFn, index: int, layer: LayerSize, widest: int) -> Visit:
    most = min(layer.experts, layer.top_k * widest)
    experts = draw(st.lists(st.integers(0, layer.experts - 1), max_size=most, unique=True))
    counts = {expert: draw(st.integers(1, 3)) for expert in experts}
    last = draw(st.none() | st.sets(st.sampled_from(experts), max_size=layer.top_k)) if experts else None
    return Visit(index, counts, None if last is None else tuple(sorted(last)))


@st.composite
def cases(draw: st.DrawFn, widest: int = 4) -> Case:
    """Layers of one or two kinds, any budget that works, any policy, visits of decoding and prompts, some too wide."""
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        experts = draw(st.integers(1, 9))
        layers.append(LayerSize(experts, draw(st.integers(1, experts)), draw(st.sampled_from([3, 5]))))
    budget = draw(st.integers(least_budget(layers), total_bytes(layers) + 4))
    indices = draw(st.lists(st.integers(0, len(layers) - 1), max_size=12))
    visits = tuple(draw_visit(draw, i, layers[i], widest) for i in indices)
    return Case(tuple(layers), budget, draw_policy(draw, layers, budget, visits), visits)


def draw_policy(draw: st.DrawFn, layers: Sequence[LayerSize], budget: int, visits: tuple[Visit, ...]) -> Policy:
    name = draw(st.sampled_from(NAMES))
    if name == "belady":
        return Belady(visits)
    if name != "pinned":
        return POLICIES[name]
    pools = Residents(layers, budget, POLICIES["lru"]).pools
    pinned: set[tuple[int, int]] = set()
    for pool in pools:
        keys = [(layer, expert) for layer in pool.layers for expert in range(layers[layer].experts)]
        pinned |= draw(st.sets(st.sampled_from(keys), max_size=pool.slots - pool.least))
    return Pinned(frozenset(pinned), POLICIES[draw(st.sampled_from(list(POLICIES)))])


class Memory:
    """What is in every slot, as the loads say; the model of the test."""

    def __init__(self, residents: Residents) -> None:
        self.residents = residents
        self.content: dict[tuple[int, int], tuple[int, int]] = {}

    def there(self, layer: int) -> set[int]:
        return {expert for owner, expert in self.content.values() if owner == layer}

    def load(self, layer: int, loads: Sequence[tuple[int, int]]) -> None:
        pool = self.residents.pool_of[layer]
        for expert, slot in loads:
            assert 0 <= slot < self.residents.pools[pool].slots
            assert expert not in self.there(layer)
            self.content[pool, slot] = layer, expert
        held = {}
        for index, _ in self.content:
            held[index] = held.get(index, 0) + self.residents.pools[index].expert_bytes
        assert sum(held.values()) <= self.residents.budget

    def visit(self, visit: Visit) -> int:
        """Run a visit and check its waves; the number of loads."""
        before, pool = self.there(visit.layer), self.residents.pool_of[visit.layer]
        waves = self.residents.visit(visit.layer, visit.experts, visit.last)
        assert sorted(expert for wave in waves for expert in wave.experts) == sorted(visit.experts)
        previous: set[int] = set()
        for wave in waves:
            assert len(set(wave.slots)) == len(wave.slots) == len(wave.experts) > 0
            assert {slot for _, slot in wave.loads}.isdisjoint(previous)
            assert {expert for expert, _ in wave.loads} == set(wave.experts) - before
            self.load(visit.layer, wave.loads)
            for expert, slot in zip(wave.experts, wave.slots, strict=True):
                assert self.content[pool, slot] == (visit.layer, expert)
            previous = set(wave.slots)
        loads = [expert for wave in waves for expert, _ in wave.loads]
        assert sorted(loads) == sorted(set(visit.experts) - before)
        return len(loads)

    def check(self) -> None:
        """The slots say what was loaded."""
        for layer in range(len(self.residents.layers)):
            resident = self.residents.resident(layer)
            pool = self.residents.pool_of[layer]
            assert {e: (pool, s) for e, s in resident.items()} == {
                expert: where for where, (owner, expert) in self.content.items() if owner == layer
            }
        assert self.residents.bytes_used <= self.residents.budget


@settings(max_examples=400, deadline=None)
@given(cases())
def test_what_is_computed_is_there_and_read_once(case: Case) -> None:
    residents = Residents(case.layers, case.budget, case.policy)
    memory = Memory(residents)
    loads = [0] * len(case.layers)
    for visit in case.visits:
        loads[visit.layer] += memory.visit(visit)
        memory.check()
    for layer, size in enumerate(case.layers):
        counts = residents.decode[layer] + residents.prompt[layer]
        assert counts.loads == loads[layer]
        assert (
            counts.hits + counts.loads == counts.lookups == sum(len(v.experts) for v in case.visits if v.layer == layer)
        )
        assert counts.read_bytes == counts.loads * size.expert_bytes
    assert residents.total.visits == len(case.visits)


@settings(max_examples=150, deadline=None)
@given(cases(widest=1))
def test_no_victim_of_the_same_visit(case: Case) -> None:
    """Tokens one by one: what a visit needs is all there when it ends, and its hits are computed in one wave."""
    residents = Residents(case.layers, case.budget, case.policy)
    for visit in case.visits:
        before = residents.resident(visit.layer)
        waves = residents.visit(visit.layer, visit.experts)
        assert {e for wave in waves for e in wave.experts} == set(visit.experts)
        assert set(visit.experts) <= residents.resident(visit.layer).keys()
        assert [bool(wave.loads) for wave in waves] in ([], [False], [True], [False, True])
        for wave in waves:
            for expert, slot in zip(wave.experts, wave.slots, strict=True):
                assert residents.slot_of(visit.layer, expert) == slot
                assert expert not in before or before[expert] == slot


@settings(max_examples=100, deadline=None)
@given(cases())
def test_the_same_visits_give_the_same_waves(case: Case) -> None:
    first, second = (Residents(case.layers, case.budget, case.policy) for _ in range(2))
    for visit in case.visits:
        backwards = dict(reversed(visit.experts.items()))
        assert first.visit(visit.layer, visit.experts, visit.last) == second.visit(visit.layer, backwards, visit.last)
    assert first.decode == second.decode
    assert first.prompt == second.prompt


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_prefetched_and_forgotten(case: Case, data: st.DataObject) -> None:
    """Early reads take no slot of the visit that goes on or of what is predicted, and are forgotten without a trace."""
    residents = Residents(case.layers, case.budget, case.policy)
    memory = Memory(residents)
    for visit in case.visits:
        memory.visit(visit)
        following = (visit.layer + 1) % len(case.layers)
        ids = st.integers(0, case.layers[following].experts - 1)
        predicted = data.draw(st.lists(ids, max_size=4, unique=True))
        stays = {layer: residents.resident(layer).keys() for layer in (visit.layer, following)}
        loads = residents.prefetch(following, predicted)
        assert len(loads) <= 2
        assert {expert for expert, _ in loads} <= set(predicted) - stays[following]
        memory.load(following, loads)
        memory.check()
        assert stays[visit.layer] & set(visit.experts) <= residents.resident(visit.layer).keys()
        assert stays[following] & set(predicted) <= residents.resident(following).keys()
        if loads and data.draw(st.booleans()):
            expert, slot = loads[0]
            residents.forget(following, [expert])
            del memory.content[residents.pool_of[following], slot]
            memory.check()
    counts = residents.total
    assert counts.useful <= counts.early
    assert counts.hits + counts.loads == counts.lookups


def layers_of(count: int, experts: int = 8, top_k: int = 2) -> list[LayerSize]:
    return [LayerSize(experts, top_k, 10)] * count


def test_the_least_budget() -> None:
    layers = [LayerSize(8, 2, 10), LayerSize(4, 3, 10), LayerSize(8, 1, 7), LayerSize(1, 1, 10, "other")]
    assert least_budget(layers) == 3 * 10 + 2 * 7 + 1 * 10
    assert cycle_bytes(layers) == 2 * 10 + 3 * 10 + 7 + 10
    residents = Residents(layers, least_budget(layers), POLICIES["lru"])
    assert [pool.slots for pool in residents.pools] == [3, 2, 1]
    assert residents.pool_of == [0, 0, 1, 2]
    with pytest.raises(InvalidInputError, match=r"at least 54 bytes.*67 bytes"):
        Residents(layers, least_budget(layers) - 1, POLICIES["lru"])
    with pytest.raises(InvalidInputError, match="at least one layer"):
        Residents([], 100, POLICIES["lru"])


def test_a_budget_is_shared_by_what_pools_lack() -> None:
    layers = [LayerSize(8, 2, 10), LayerSize(8, 2, 20)]
    for budget in range(least_budget(layers), total_bytes(layers) + 10):
        pools = Residents(layers, budget, POLICIES["lru"]).pools
        used = sum(pool.slots * pool.expert_bytes for pool in pools)
        assert used <= budget
        assert all(pool.slots == pool.experts or pool.expert_bytes > budget - used for pool in pools)
    assert [pool.slots for pool in Residents(layers, 150, POLICIES["lru"]).pools] == [5, 5]


def test_hits_come_first_then_the_largest_groups() -> None:
    residents = Residents(layers_of(1), 60, POLICIES["lru"])
    residents.visit(0, {1: 1, 2: 1})
    hits, misses = residents.visit(0, {1: 1, 5: 2, 2: 3, 6: 4})
    assert (hits.experts, hits.loads) == ((2, 1), ())
    assert [expert for expert, _ in misses.loads] == list(misses.experts) == [6, 5]


def test_a_prompt_takes_few_slots() -> None:
    """What decoding has stays, but for the slots of the prompt's last token and of those that others pass through."""
    residents = Residents(layers_of(2, experts=32), 200, POLICIES["lru"])
    for token in range(5):
        for layer in range(2):
            residents.visit(layer, {2 * token: 1, 2 * token + 1: 1})
    before = [set(residents.resident(layer)) for layer in range(2)]
    for layer in range(2):
        residents.visit(layer, dict.fromkeys(range(10, 32), 3), last=(12, 13))
    after = [set(residents.resident(layer)) for layer in range(2)]
    assert all({12, 13} <= there for there in after)
    lost = sum(len(there - now) for there, now in zip(before, after, strict=True))
    assert lost == 2 * 2 + 4  # for each layer's last token, and four slots to pass through
    # Those four go first.
    passed = {(layer, expert) for layer in range(2) for expert in after[layer] - before[layer] - {12, 13}}
    residents.visit(0, {30: 1, 29: 1, 28: 1, 27: 1})
    now = {(layer, expert) for layer in range(2) for expert in residents.resident(layer)}
    assert passed - now == {key for key in passed if key not in {(0, 30), (0, 29), (0, 28), (0, 27)}}
    assert all(before[layer] & after[layer] <= residents.resident(layer).keys() for layer in range(2))


def test_a_prompt_fills_empty_slots() -> None:
    residents = Residents(layers_of(2), 160, POLICIES["expected"])
    for layer in range(2):
        residents.visit(layer, dict.fromkeys(range(8), 1), last=(0,))
    assert [len(residents.resident(layer)) for layer in range(2)] == [8, 8]
    residents.visit(0, dict.fromkeys(range(8), 1), last=(0,))
    assert residents.total.hits == 8


def test_pins_stay_and_leave_room() -> None:
    pins = frozenset({(0, 7), (1, 3)})
    residents = Residents(layers_of(2), 40, Pinned(pins, POLICIES["lru"]))
    residents.visit(0, {7: 1, 0: 1})
    residents.visit(1, {3: 1, 0: 1})
    where = residents.slot_of(0, 7), residents.slot_of(1, 3)
    assert None not in where
    for token in range(1, 6):
        for layer in range(2):
            residents.visit(layer, dict.fromkeys(range(8), token), last=() if token % 2 else None)
            residents.visit(layer, {token: 1, (token + 1) % 7: 1})
    assert (residents.slot_of(0, 7), residents.slot_of(1, 3)) == where
    with pytest.raises(InvalidInputError, match=r"2 pinned experts in 3 slots.*at least 2"):
        Residents(layers_of(2), 30, Pinned(pins))
    with pytest.raises(InvalidInputError, match="expert 8 of layer 1"):
        Residents(layers_of(2), 40, Pinned(frozenset({(1, 8)})))


@pytest.mark.parametrize(
    ("visit", "got"),
    [
        (Visit(2, {0: 1}), "layer 2"),
        (Visit(-1, {0: 1}), "layer -1"),
        (Visit(0, {8: 1}), "experts {8: 1} of layer 0"),
        (Visit(0, {-1: 1}), "experts {-1: 1}"),
        (Visit(0, {1: 0}), "experts {1: 0}"),
        (Visit(0, {1: 1}, (2,)), "last [2] with experts [1]"),
    ],
)
def test_visits_of_another_model(visit: Visit, got: str) -> None:
    residents = Residents(layers_of(2), 100, POLICIES["expected"])
    with pytest.raises(InvalidInputError) as caught:
        residents.visit(visit.layer, visit.experts, visit.last)
    assert got in str(caught.value)
    assert residents.total.visits == 0


def test_a_prompt_leaves_empty_slots_to_later_layers():
    layers = [LayerSize(8, 2, 1)] * 4
    residents = Residents(layers, 16, POLICIES["expected"])
    for layer in range(4):
        residents.visit(layer, dict.fromkeys(range(8), 9), last={0, 1})
    held = [len(residents.resident(layer)) for layer in range(4)]
    assert sum(held) == 16
    assert min(held) >= 2
    assert all({0, 1} <= residents.resident(layer).keys() for layer in range(4))
