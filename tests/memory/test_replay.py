"""Replays: the ladder of budgets, and what a row says of a run."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.errors import InvalidInputError
from moestro.memory import (
    POLICIES,
    LayerSize,
    Recorder,
    Residents,
    Trace,
    compare,
    cycle_bytes,
    ladder,
    least_budget,
    replay,
    total_bytes,
)

LAYERS = [LayerSize(16, 2, 10)] * 4


def recorded(tokens: int = 60, prompt: int = 40) -> Trace:
    """A prompt, and tokens after it."""
    rng, recorder = np.random.default_rng(0), Recorder("made")
    for step in range(tokens + 1):
        for layer, size in enumerate(LAYERS):
            rows = prompt if step == 0 else 1
            likely = np.arange(1, 17.0) ** -1
            ids = [rng.choice(16, 2, replace=False, p=likely / likely.sum()) for _ in range(rows)]
            recorder.add(layer, size, np.array(ids))
    return recorder.trace()


def test_the_ladder() -> None:
    assert ladder(LAYERS) == [20, 40, 80, 160, 320, 640]
    assert ladder([LayerSize(2, 2, 10)]) == [20]
    assert ladder([LayerSize(64, 2, 10)])[0] == 20


def test_rows() -> None:
    trace = recorded()
    rows = compare(trace, bytes_per_second=1e6)
    assert [(row.budget, row.policy) for row in rows] == [
        (budget, name) for budget in ladder(LAYERS) for name in (*POLICIES, "belady")
    ]
    for row in rows:
        assert row.decode.lookups == 60 * 4 * 2
        assert row.hit_rate == row.decode.hits / row.decode.lookups
        assert row.token_bytes == row.decode.loads * 10 / 60
        assert row.cycles == row.budget / cycle_bytes(LAYERS)
        assert row.prompt_bytes == row.prompt.loads * 10
        assert row.tokens_per_second == (1e6 / row.token_bytes if row.token_bytes else None)
    by_budget = [rows[i : i + 5] for i in range(0, len(rows), 5)]
    for group in by_budget:
        bound = group[-1].hit_rate
        assert all(row.regret == bound - row.hit_rate for row in group)
    assert by_budget[0][0].hit_rate <= by_budget[2][0].hit_rate <= by_budget[-1][0].hit_rate
    assert by_budget[-1][0].slots == 64


def test_a_row_is_what_residents_count() -> None:
    trace = recorded()
    row = next(r for r in compare(trace, [160], ["lru"]))
    live = Residents(trace.layers, 160, POLICIES["lru"])
    for visit in trace.visits:
        live.visit(visit.layer, visit.experts, visit.last)
    assert row.decode + row.prompt == live.total
    assert live.total == replay(trace.layers, trace.visits, 160, POLICIES["lru"]).total
    assert row.tokens_per_second is None


def test_a_prompt_does_not_flush_what_decoding_needs() -> None:
    """Prompts of other tokens between the same few experts cost the hits of decoding little."""
    rng = np.random.default_rng(0)
    rates = {}
    for name in ("without", "with"):
        recorder = Recorder(name)
        for step in range(80):
            rows = [[0, 1]] if step % 2 else [[2, 3]]
            for layer, size in enumerate(LAYERS):
                recorder.add(layer, size, np.array(rows))
            if name == "with" and step % 10 == 5:
                for layer, size in enumerate(LAYERS):
                    recorder.add(layer, size, np.array([rng.choice(16, 2, replace=False) for _ in range(64)]))
        for policy in POLICIES:
            found = compare(recorder.trace(), [3 * cycle_bytes(LAYERS)], [policy])[0]
            rates[name, policy] = found.hit_rate
    for policy in POLICIES:
        assert rates["without", policy] == pytest.approx(0.975)
        assert rates["with", policy] > 0.85, policy


def test_a_trace_of_a_prompt_alone() -> None:
    rows = compare(recorded(tokens=0), policies=["expected"], bytes_per_second=1e6)
    assert {(row.hit_rate, row.token_bytes, row.tokens_per_second) for row in rows} == {(0.0, None, None)}
    assert rows[-1].prompt_bytes <= total_bytes(LAYERS)


def test_what_cannot_be_replayed() -> None:
    trace = recorded(tokens=1)
    for wrong in (
        {"policies": []},
        {"budgets": []},
        {"bytes_per_second": 0.0},
        {"bytes_per_second": float("nan")},
        {"bytes_per_second": float("inf")},
    ):
        with pytest.raises(InvalidInputError, match="at least one policy, one budget, and a rate above 0"):
            compare(trace, **wrong)
    with pytest.raises(InvalidInputError, match="policy 'pinned'"):
        compare(trace, policies=["pinned"])
    with pytest.raises(InvalidInputError, match="at least 20 bytes"):
        compare(trace, budgets=[least_budget(LAYERS) - 1])
