"""The one place that says how close two results must be.

Two bounds, both on the error over the largest magnitude of the expected tensor, so that neither a few small entries nor
a scale of 1e-6 decide: the worst entry, and the root mean square. Each is a small multiple of the unit roundoff of the
dtype in which the result was computed or stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Bounds on |actual - expected|: `worst` over max |expected|, `rms` over rms of expected."""

    worst: float
    rms: float


# In multiples of eps(dtype). Storing a rounded result costs half an eps; the inputs of the second matmul are stored
# too, and the sum over slots adds a handful more. float32 and float64 are computed as they are stored, so they also
# carry the growth of a dot product's rounding with its length.
_MULTIPLES = {
    torch.float64: Tolerance(worst=64, rms=32),
    torch.float32: Tolerance(worst=64, rms=32),
    torch.bfloat16: Tolerance(worst=4, rms=2),
    torch.float16: Tolerance(worst=8, rms=4),
}


def tolerance(dtype: torch.dtype) -> Tolerance:
    """How far a result computed with this dtype's weights may be from the float64 reference."""
    eps = torch.finfo(dtype).eps
    multiple = _MULTIPLES[dtype]
    return Tolerance(multiple.worst * eps, multiple.rms * eps)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Fail unless `actual` equals `expected` within `tolerance(dtype)`; by default the coarser of their dtypes.

    Shapes must be equal, and so must the places of NaN and infinity. Where all of `expected` is zero, so must be
    `actual`.
    """
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    if dtype is None:
        dtype = max(actual.dtype, expected.dtype, key=lambda d: torch.finfo(d).eps)
    if expected.numel() == 0:
        return
    a, e = actual.detach().double(), expected.detach().double()
    finite = torch.isfinite(e)
    assert torch.equal(torch.isfinite(a), finite), "not finite in different places"
    assert torch.equal(a[~finite].nan_to_num(nan=0.5), e[~finite].nan_to_num(nan=0.5)), "different NaN or infinities"
    if not finite.any():
        return
    a, e = a[finite], e[finite]
    bound = tolerance(dtype)
    error = (a - e).abs()
    worst = float(error.max()), float(e.abs().max()) * bound.worst
    rms = float(error.square().mean().sqrt()), float(e.square().mean().sqrt()) * bound.rms
    assert worst[0] <= worst[1], f"worst error {worst[0]:.3g} over {worst[1]:.3g} ({dtype})"
    assert rms[0] <= rms[1], f"rms error {rms[0]:.3g} over {rms[1]:.3g} ({dtype})"


def bit_equal(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits (-0.0 differs from 0.0, a NaN equals itself)."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    return torch.equal(actual.contiguous().view(integer), expected.contiguous().view(integer))
