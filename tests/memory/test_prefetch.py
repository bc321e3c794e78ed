"""Experts read early: when it is worth it, how often it is right, and slots that are taken by nobody meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memory.test_residents import Memory
from moestro.memory.policy import POLICIES, Visit
from moestro.memory.prefetch import BLOCK, BLOCKS, STEPS, Gain, Prefetcher
from moestro.memory.residents import MOST_PREFETCHED, Residents
from moestro.memory.sizes import LayerSize


class Clock:
    """Goes on by what the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(gain: Gain, clock: Clock, without: float, with_it: float, steps: int) -> Iterator[bool]:
    for _ in range(steps):
        gain.begin(True)
        clock.now += with_it if gain.on else without
        yield gain.on
        gain.end()
        clock.now += 100.0  # what the user does between two steps


@pytest.mark.parametrize(("with_it", "stays"), [(0.8, True), (1.25, False), (1.0, False)])
def test_it_is_on_where_steps_are_shorter(with_it: float, stays: bool) -> None:
    clock = Clock()
    gain = Gain(clock)
    compared = list(run(gain, clock, 1.0, with_it, BLOCK * BLOCKS))
    assert compared == ([False] * BLOCK + [True] * BLOCK) * (BLOCKS // 2)
    assert gain.gain == pytest.approx(1 / with_it)
    assert list(run(gain, clock, 1.0, with_it, STEPS)) == [stays] * STEPS
    assert gain.compares
    assert list(run(gain, clock, 1.0, 1 / with_it, BLOCK * BLOCKS)) == compared
    assert gain.on == (with_it > 1)


def test_what_breaks_off_does_not_count() -> None:
    clock = Clock()
    gain = Gain(clock)
    for _ in range(BLOCK * BLOCKS):
        gain.begin(False)  # a prompt
        clock.now += 1
        gain.end()
        gain.end()
    assert gain.gain is None
    assert not gain.on
    gain.begin(True)
    gain.begin(True)
    clock.now += 1
    gain.end()
    assert next(run(gain, clock, 1.0, 1.0, 1)) is False


def test_a_few_long_steps_decide_nothing() -> None:
    clock = Clock()
    gain = Gain(clock)
    for number, _ in enumerate(run(gain, clock, 1.0, 0.9, BLOCK * BLOCKS)):
        clock.now += 1000.0 * (number % BLOCK == 0)
    assert gain.on


def test_predictions_and_recall() -> None:
    weight = torch.eye(4)
    prefetcher = Prefetcher([None, lambda rows: rows @ weight, None], [2, 2, 2])
    assert prefetcher.layers == 1
    assert prefetcher.predict(2, torch.ones(1, 4)) == []
    assert prefetcher.predict(3, torch.ones(1, 4)) == []
    assert prefetcher.recall is None
    rows = torch.tensor([[0.0, 3.0, 2.0, 1.0], [9.0, 8.0, 0.0, 0.0]])
    assert prefetcher.predict(1, rows) == [1, 0, 2]  # the likeliest of each row first
    prefetcher.meet(1, [1, 2, 3])
    prefetcher.meet(1, [1, 2, 3])  # nothing was predicted for this one
    assert prefetcher.recall == pytest.approx(2 / 3)
    prefetcher.predict(1, rows)
    prefetcher.meet(0, [1])
    prefetcher.meet(1, [0])
    assert (prefetcher.asked, prefetcher.found) == (3, 2)


@pytest.mark.parametrize("policy", sorted(set(POLICIES)))
@pytest.mark.parametrize("slots", [4, 5, 6, 9, 16])
def test_what_is_being_read_is_nobodys_victim(policy: str, slots: int) -> None:
    """Reads that take long: every visit finds them where they were, and has room beside them."""
    layers = [LayerSize(8, 4, 10)] * 3
    residents = Residents(layers, slots * 10, POLICIES[policy])
    memory = Memory(residents)
    numbers = torch.Generator().manual_seed(slots)
    coming: dict[tuple[int, int], int] = {}
    early = 0
    for step in range(200):
        layer = step % 3
        experts = torch.randperm(8, generator=numbers)[:4].tolist()
        for (owner, expert), slot in list(coming.items()):
            assert residents.slot_of(owner, expert) == slot
            if torch.rand((), generator=numbers) < 0.3 or (owner == layer and expert in experts):
                residents.arrived(owner, expert)
                del coming[owner, expert]
        memory.visit(Visit(layer, dict.fromkeys(experts, 1)))
        following = (layer + 1) % 3
        predicted = torch.randperm(8, generator=numbers)[:4].tolist()
        loads = residents.prefetch(following, predicted)
        memory.load(following, loads)
        assert len(loads) <= MOST_PREFETCHED
        coming.update({(following, expert): slot for expert, slot in loads})
        early += len(loads)
        assert len(coming) <= slots - residents.pools[0].least
        memory.check()
    assert (early > 0) == (slots > 4)
    assert residents.total.early == early
