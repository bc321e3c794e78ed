"""The digest by which ranks tell whether they have the same tokens."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from moestro.parallel import same_tokens
from moestro.parallel.same_tokens import routing_digest


def digest(ids):
    return routing_digest(SimpleNamespace(waits=True, size=2, shared_calls=0), ids)


def test_sums_of_other_ids_that_are_alike_differ():
    assert digest(torch.tensor([[0, 3], [1, 2]])) != digest(torch.tensor([[3, 2], [1, 2]]))


def test_different_ids_have_different_digests():
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(-1, 8, (4000, 2, 8), generator=generator).unique(dim=0)
    found = {digest(ids) for ids in batches}
    assert len(found) == len(batches) > 3900
    assert len({value >> 32 for value in found}) > len(batches) - 10  # narrow rows carry the upper bits alone


def test_the_digest_is_of_the_cpu_whatever_the_default_device(monkeypatch):
    ids = torch.tensor([[0, 3], [1, 2]])
    expected = digest(ids)
    monkeypatch.setattr(same_tokens, "_FACTORS", {})
    with torch.device("meta"):
        assert digest(ids) == expected
