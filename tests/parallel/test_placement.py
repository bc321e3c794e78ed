from __future__ import annotations

import json

import pytest
import torch

from moestro import Routing
from moestro.errors import InvalidInputError
from moestro.parallel import Placement

REPLICATED = Placement(4, ((0, 1), (2, 0), (3, 0)))


def test_contiguous_is_keep_locals_ranges() -> None:
    assert Placement.contiguous(8, 4).experts == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert Placement.contiguous(10, 4).experts == ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
    assert Placement.contiguous(2, 3).experts == ((0,), (1,), ())
    assert [len(row) for row in Placement.contiguous(256, 320).experts] == [1] * 256 + [0] * 64


def test_plain_numbers() -> None:
    assert REPLICATED.counts == (3, 1, 1, 1)
    assert (REPLICATED.num_ranks, REPLICATED.num_slots) == (3, 6)
    same = Placement(4, json.loads(json.dumps(REPLICATED.experts)))
    assert same == REPLICATED
    assert hash(same) == hash(REPLICATED)
    assert Placement.from_slots([0, 1, 2, 0, 3, -1], 4, 2).experts == ((0, 1, 2), (0, 3))


def test_locate_is_its_definition_in_loops() -> None:
    torch.manual_seed(0)
    ids = torch.randint(-1, 5, (50, 3), dtype=torch.int32)
    ranks, local = REPLICATED.locate(ids, first_token=7)
    replicas = {e: [(r, row.index(e)) for r, row in enumerate(REPLICATED.experts) if e in row] for e in range(4)}
    for t in range(50):
        for k in range(3):
            e = int(ids[t, k])
            expected = replicas[e][(7 + t + e) % len(replicas[e])] if 0 <= e < 4 else (-1, -1)
            assert (int(ranks[t, k]), int(local[t, k])) == expected
    assert ranks.dtype == local.dtype == torch.int64


def test_the_choice_is_the_tokens_own() -> None:
    ids = torch.randint(0, 4, (20, 2))
    whole = REPLICATED.locate(ids)
    for first in (0, 3, 11):
        part = REPLICATED.locate(ids[first : first + 5], first_token=first)
        assert all(torch.equal(a[first : first + 5], b) for a, b in zip(whole, part, strict=True))


def test_replicas_share_an_expert_evenly() -> None:
    ranks, _ = REPLICATED.locate(torch.zeros(300, 1, dtype=torch.int64))
    assert torch.bincount(ranks.flatten()).tolist() == [100, 100, 100]


def test_ranks_share_every_pair() -> None:
    torch.manual_seed(0)
    ids = torch.randint(-1, 4, (40, 3))
    routing = Routing(ids, torch.rand(40, 3), weight_on="input")
    parts = [REPLICATED.local_routing(routing, rank) for rank in range(3)]
    assert sum((part.expert_ids >= 0).long() for part in parts).equal((ids >= 0).long())
    for rank, part in enumerate(parts):
        back = torch.tensor([*REPLICATED.experts[rank], -1])[part.expert_ids]
        assert back[part.expert_ids >= 0].equal(ids[part.expert_ids >= 0])
        assert part.weight_on == "input"
        assert part.expert_ids.dtype == ids.dtype


def test_a_batch_without_tokens() -> None:
    ranks, local = REPLICATED.locate(torch.zeros(0, 2, dtype=torch.int64))
    assert ranks.shape == local.shape == (0, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Placement(3, ((0, 1),)),
        lambda: Placement(2, ((0, 1, 2),)),
        lambda: Placement(2, ((0, 1, -1),)),
        lambda: Placement(0, ((),)),
        lambda: Placement(2, ()),
        lambda: Placement.contiguous(0, 2),
        lambda: Placement.contiguous(2, 0),
        lambda: Placement.from_slots([0, 1, 2], 3, 2),
        lambda: REPLICATED.local_routing(Routing(torch.zeros(1, 1).long(), torch.ones(1, 1)), 3),
    ],
)
def test_what_is_refused(make) -> None:
    with pytest.raises(InvalidInputError, match=r"\[Placement[.\w]*\] got .*; needs .*"):
        make()
