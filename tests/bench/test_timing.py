from __future__ import annotations

import itertools
from functools import partial

import pytest

from moestro.bench import timing
from moestro.bench.timing import Ratio, alternate, ratio, warm_up


def trace(costs: dict[str, float], num_inputs: int, seconds: float):
    """Run `alternate` on a fake clock; returns the calls in order as (variant, input), and the times."""
    called: list[tuple[str, int]] = []

    def timer(call):
        return call()

    def make(name, i):
        return lambda: called.append((name, i)) or costs[name]

    times = alternate({n: [make(n, i) for i in range(num_inputs)] for n in costs}, seconds, timer)
    return called, times


def test_rounds_alternate_and_turn_around() -> None:
    called, times = trace({"a": 1.0, "b": 1.0, "c": 1.0}, 8, seconds=6.0)
    assert "".join(name for name, _ in called) == "abccba" * 3
    assert times == {"a": [1.0] * 6, "b": [1.0] * 6, "c": [1.0] * 6}


@pytest.mark.parametrize(("slow", "fewest"), [(19.875, 5), (20.0, 3)])
def test_a_slow_variant_leaves_early(slow: float, fewest: int) -> None:
    called, times = trace({"fast": 0.125, "slow": slow}, 4, seconds=1.0)
    assert len(times["slow"]) == fewest
    assert len(times["fast"]) == 8
    assert [name for name, _ in called[2 * fewest :]] == ["fast"] * (8 - fewest)


def test_samples_are_bounded() -> None:
    _, times = trace({"a": 1e-9}, 1, seconds=1.0)
    assert len(times["a"]) == timing.MOST_SAMPLES


@pytest.mark.parametrize(("num_variants", "num_inputs"), list(itertools.product(range(1, 7), range(1, 17))))
def test_every_variant_meets_every_input(num_variants: int, num_inputs: int) -> None:
    names = [f"v{i}" for i in range(num_variants)]
    called, _ = trace(dict.fromkeys(names, 1.0), num_inputs, seconds=float(2 * num_inputs))
    for name in names:
        assert {i for n, i in called if n == name} == set(range(num_inputs))
    if num_inputs > num_variants:
        for (_, first), (_, second) in itertools.pairwise(called):
            assert first != second


def test_what_calls_take_beside_their_samples_counts() -> None:
    calls = {"a": [lambda: 0.0625]}
    assert len(alternate(calls, 1.0, lambda call: call())["a"]) == 16
    assert len(alternate(calls, 1.0, lambda call: call(), {"a": 0.5})["a"]) == 8


def test_nothing_to_time() -> None:
    assert alternate({}, 1.0, lambda call: 1.0) == {}


def test_ratio_pairs_rounds() -> None:
    # The machine slowed down threefold after the second round; the paired ratio does not see it.
    assert ratio([2.0, 2.0, 6.0], [1.0, 1.0, 3.0, 3.0, 3.0]) == Ratio(2.0, 2.0, 2.0)


def test_quartiles_by_hand() -> None:
    assert ratio([1.0, 5.0, 2.0, 4.0, 3.0], [1.0] * 5) == Ratio(2.0, 3.0, 4.0)


@pytest.mark.parametrize(("num_calls", "expected"), [(1, [0]), (2, [0]), (4, [0, 3, 2])])
def test_calls_warm_up_by_the_others(monkeypatch: pytest.MonkeyPatch, num_calls: int, expected: list[int]) -> None:
    called: list[int] = []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: len(called) * timing.TURN_SECONDS / 4)
    i = min(1, num_calls - 1)
    warm_up([partial(called.append, n) for n in range(num_calls)], i)
    assert called == (expected * 4)[:4]
    assert num_calls == 1 or i not in called
    called.clear()
    monkeypatch.setattr(timing, "TURN_SECONDS", 0.0)
    warm_up([partial(called.append, n) for n in range(num_calls)], i)
    assert len(called) == 1
