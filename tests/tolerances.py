"""Assertions on results. How close they must be is said in `moestro.tolerances`, which the benchmark reads too."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.tolerances import Tolerance, disagreement, tolerance

__all__ = ["Tolerance", "assert_close", "bit_equal", "tolerance"]


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Fail unless `actual` equals `expected` within `tolerance(dtype)`; by default the coarser of their dtypes.

    Shapes must be equal, and so must the places of NaN and infinity. Where all of `expected` is zero, so must be
    `actual`.
    """
    found = disagreement(actual, expected, dtype)
    assert found is None, found


def bit_equal(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits (-0.0 differs from 0.0, a NaN equals itself)."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    return torch.equal(actual.contiguous().view(integer), expected.contiguous().view(integer))
