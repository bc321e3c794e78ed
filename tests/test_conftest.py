"""The conditions every test relies on are themselves in force."""

from __future__ import annotations

import pytest
import torch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_unwritten_memory_is_nan(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 5, dtype=dtype)
    for unwritten in (torch.empty(3, 5, dtype=dtype), torch.empty_like(x), x.new_empty(7)):
        assert torch.isnan(unwritten).all()


def test_unwritten_ids_are_out_of_range() -> None:
    assert (torch.empty(4, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()


@pytest.mark.unpoisoned
def test_poison_can_be_switched_off() -> None:
    assert not torch.are_deterministic_algorithms_enabled()


def test_seeds_are_fixed() -> None:
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
