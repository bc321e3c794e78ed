"""Counts of a layer against loops over the same ids."""

from __future__ import annotations

import math

import pytest
import torch

from moestro.profiling import loads
from moestro.profiling.loads import LayerCounts, LayerLoad, entropies
from moestro.routing import drop_over_capacity, route
from tolerances import assert_close

E = 7


def counted(parts: list[torch.Tensor]) -> LayerLoad:
    made = LayerCounts("layer")
    for ids in parts:
        made.add(ids, E)
    found = made.load()
    assert found is not None
    return found


@pytest.mark.parametrize("most", [1, 10, 2**18])
def test_counts_are_exact(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Ids of no expert are empty slots; an expert that is named twice has two rows and is used by one token."""
    monkeypatch.setattr(loads, "MOST_KEPT", most)
    parts = [torch.randint(-2, E + 2, (tokens, 3)) for tokens in (5, 1, 1, 40)]
    found = counted(parts)
    rows = [[e for e in row if 0 <= e < E] for ids in parts for row in ids.tolist()]
    assert found.loads == tuple(sum(row.count(e) for row in rows) for e in range(E))
    assert found.dropped == sum(3 - len(row) for row in rows)
    assert found.tokens == len(rows) == 47
    for a in range(E):
        assert found.together[a] == tuple(sum(a in row and b in row for row in rows) for b in range(E))
    best = max((sum(a in r and b in r for r in rows), b, a) for b in range(E) for a in range(b))
    assert found.pairs()[0] == (best[2], best[1], best[0])
    assert found.imbalance == max(found.loads) / (sum(found.loads) / E)
    assert found.least_used(2) == tuple(sorted(range(E), key=found.loads.__getitem__)[:2])


def test_ids_are_those_of_the_time_they_came() -> None:
    """Who writes into the tensor afterwards changes nothing."""
    ids = torch.zeros(4, 2, dtype=torch.int32)
    made = LayerCounts("layer")
    made.add(ids, E)
    ids.fill_(3)
    found = made.load()
    assert found is not None
    assert found.loads[0] == 8


def test_slots_of_several_widths() -> None:
    found = counted([torch.zeros(2, 2, dtype=torch.int64), torch.ones(3, 1, dtype=torch.int64)])
    assert found.loads[:2] == (4, 3)
    assert found.dropped_share == 0


def test_a_layer_that_never_ran() -> None:
    assert LayerCounts("layer", E).load() is None


def test_dropped_slots_are_those_of_the_rewrite() -> None:
    kept, report = drop_over_capacity(route(torch.randn(64, E) * 3, 2), E, 1.0)
    found = counted([kept.expert_ids])
    assert found.dropped == report.total > 0
    assert found.dropped_share == report.total / 128


def test_entropies() -> None:
    logits = torch.randn(9, E)
    shares = logits.softmax(-1)
    expected = torch.tensor([-sum(p * math.log2(p) for p in row) for row in shares.tolist()])
    assert_close(entropies(logits), expected)
    assert_close(entropies(shares), expected)  # routers of some families return these
    flat, sure = entropies(torch.zeros(1, 8)), entropies(torch.tensor([[0.0, -torch.inf]]))
    assert (float(flat), float(sure)) == (pytest.approx(3), 0)
