"""The one place that says how close two results must be: the tests and the benchmark both read it.

Two bounds, both on the error over the magnitude of the expected tensor, so that neither a few small entries nor a
scale of 1e-6 decide: the worst entry, and the root mean square. Each is a small multiple of the unit roundoff of the
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


LOW_PRECISION_INPUT = 0.08
"""How far a token's output may be off in relative L2 norm where rows are rounded to int8 before both products.

On normal rows and layers of published sizes it costs 0.02 to 0.03, and the worst of 33 tokens up to 0.04; rows rounded
to fp8-e4m3 cost 0.044, and the worst of 33 tokens up to 0.061.
"""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """L2 norm of actual - expected over that of expected."""
    a, e = actual.detach().double(), expected.detach().double()
    return float((a - e).norm() / e.norm())


def too_far(actual: Tensor, expected: Tensor, bound: float) -> str | None:
    """None if each row is within `bound` of that of `expected` in relative L2 norm, else the sentence why not."""
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    a, e = actual.detach().double(), expected.detach().double()
    found, limit = (a - e).norm(dim=-1), bound * e.norm(dim=-1)
    if bool((found <= limit).all()):  # which NaN is not
        return None
    over = torch.where(found <= limit, 0.0, found / limit)  # a row of zeros met by zeros is 0 / 0 otherwise
    row = int(over.nan_to_num(nan=torch.inf).argmax())
    return f"relative error {float(found[row] / e[row].norm()):.3g} in row {row}, over {bound:.3g}"


def tolerance(dtype: torch.dtype) -> Tolerance:
    """How far a result computed with this dtype's weights may be from the reference."""
    eps = torch.finfo(dtype).eps
    multiple = _MULTIPLES[dtype]
    return Tolerance(multiple.worst * eps, multiple.rms * eps)


def disagreement(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> str | None:
    """None if `actual` equals `expected` within `tolerance(dtype)`, else the sentence that says how it does not.

    Shapes must be equal, and so must the places of NaN and infinity. Where all of `expected` is zero, so must be
    `actual`. By default the coarser dtype of the two decides.
    """
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    if dtype is None:
        dtype = max(actual.dtype, expected.dtype, key=lambda d: torch.finfo(d).eps)
    a, e = actual.detach().double(), expected.detach().double()
    finite = torch.isfinite(e)
    if not torch.equal(torch.isfinite(a), finite):
        return "not finite in different places"
    # 0.5 stands for NaN, which never equals itself.
    if not torch.equal(a[~finite].nan_to_num(nan=0.5), e[~finite].nan_to_num(nan=0.5)):
        return "different NaN or infinities"
    if not finite.any():
        return None
    a, e = a[finite], e[finite]
    bound = tolerance(dtype)
    error = (a - e).abs()
    worst, worst_bound = float(error.max()), float(e.abs().max()) * bound.worst
    if worst > worst_bound:
        return f"worst error {worst:.3g} over {worst_bound:.3g} ({dtype})"
    rms, rms_bound = float(error.square().mean().sqrt()), float(e.square().mean().sqrt()) * bound.rms
    if rms > rms_bound:
        return f"rms error {rms:.3g} over {rms_bound:.3g} ({dtype})"
    return None
