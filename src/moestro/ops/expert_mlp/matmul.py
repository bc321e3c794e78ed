"""Rows times expert matrices, in whichever of torch's ways is fastest for the number of rows.

Names: rows x [n, K], one expert's matrix w [N, K], the stack of all experts [E, N, K].
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Span(NamedTuple):
    """Rows start to stop belong to one expert."""

    expert: int
    start: int
    stop: int


class Way(Enum):
    """How torch is asked for x @ w.T.

    ROWS: one matrix product, the output row by row.
    COLUMNS: w @ x.T, the output transposed; the matrix is streamed once past few columns.
    VECTOR: a matrix-vector product, for a single row.
    WIDEN: w is converted to float32 a panel at a time, small enough to stay in cache, and multiplied there.
    WIDEN_COLUMNS: the same with the output transposed.
    """

    ROWS = "rows"
    COLUMNS = "columns"
    VECTOR = "vector"
    WIDEN = "widen"
    WIDEN_COLUMNS = "widen-columns"

    @property
    def widens(self) -> bool:
        return self in (Way.WIDEN, Way.WIDEN_COLUMNS)


def matmul(x: Tensor, w: Tensor, way: Way) -> Tensor:
    """x [n, K] @ w [N, K].T -> [n, N], possibly a transposed view.

    In float32 (float64 if x is) for the ways that widen, in the dtype of w for a vector, else in the dtype that both
    promote to.
    """
    if way.widens:
        return _widened(x if x.dtype == torch.float64 else x.float(), w, columns=way is Way.WIDEN_COLUMNS)
    if way is Way.VECTOR:
        return torch.mv(w, x[0].to(w.dtype))[None]
    if x.dtype != w.dtype:
        wide = torch.promote_types(x.dtype, w.dtype)
        x, w = x.to(wide), w.to(wide)
    return torch.mm(w, x.t()).t() if way is Way.COLUMNS else F.linear(x, w)


def matmul_spans(
    x: Tensor, stack: Tensor, spans: Sequence[Span], ways: Sequence[Way], dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """Each span's rows times its expert's matrix -> [n, N] of `dtype`; the spans cover x in order.

    The result may be a transposed view; with `out` it is written there.
    """
    if len(spans) > 1 and x.dtype == dtype and _fits_grouped_mm(x, stack) and all(way is Way.ROWS for way in ways):
        y = F.grouped_mm(x, stack.transpose(1, 2), offs=_ends(spans, stack.shape[0]))
        return y if out is None else out.copy_(y)
    if out is None and len(spans) == 1:
        return matmul(x, stack[spans[0].expert], ways[0]).to(dtype)
    if out is None:
        out = torch.empty(x.shape[0], stack.shape[1], dtype=dtype, device=x.device)
    sizes = [stop - start for _, start, stop in spans]
    for (e, _, _), way, rows, target in zip(spans, ways, torch.split(x, sizes), torch.split(out, sizes), strict=True):
        matmul_into(rows, stack[e], way, target)
    return out


def matmul_into(x: Tensor, w: Tensor, way: Way, target: Tensor) -> None:
    """Write x [n, K] @ w [N, K].T to target [n, N], without a copy where the dtypes and the way allow."""
    in_place = x.dtype == w.dtype == target.dtype
    if way is Way.ROWS and in_place:
        torch.mm(x, w.t(), out=target)
    elif way is Way.VECTOR and in_place:
        torch.mv(w, x[0], out=target[0])
    else:
        target.copy_(matmul(x, w, way))


def _fits_grouped_mm(x: Tensor, stack: Tensor) -> bool:
    """Whether one torch call may loop over the experts: on the CPU, every row on a 16-byte boundary."""
    return (
        x.device.type == "cpu"
        and x.dtype == stack.dtype
        and x.dtype in (torch.float32, torch.bfloat16)
        and stack.is_contiguous()
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and stack.shape[1] % 8 == stack.shape[2] % 8 == 0
        and (x.data_ptr() | stack.data_ptr()) % 16 == 0
    )


def _ends(spans: Sequence[Span], num_experts: int) -> Tensor:
    """Cumulative rows of all experts, int32 [E]; the spans are in order of experts."""
    ends: list[int] = []
    last = 0
    for e, _, stop in spans:
        ends += [last] * (e - len(ends))
        ends.append(stop)
        last = stop
    return torch.tensor(ends + [last] * (num_experts - len(ends)), dtype=torch.int32)


def _widened(x: Tensor, w: Tensor, columns: bool) -> Tensor:
    num_rows, size = w.shape
    height = panel_height(x.shape[0], size)
    panel = torch.empty(min(height, num_rows), size, dtype=x.dtype, device=x.device)
    shape = (num_rows, x.shape[0]) if columns else (x.shape[0], num_rows)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    for start in range(0, num_rows, height):
        stop = min(start + height, num_rows)
        wide = panel[: stop - start].copy_(w[start:stop])
        if columns:
            torch.mm(wide, x.t(), out=out[start:stop])
        else:
            torch.mm(x, wide.t(), out=out[:, start:stop])
    return out.t() if columns else out


def panel_height(num_rows: int, size: int) -> int:
    """Rows of a float32 panel: 1 MiB for few rows of x, 2 MiB for more (measured; see docs/log.md)."""
    return max(16, (1 << 18 if num_rows <= 8 else 1 << 19) // max(size, 1))
