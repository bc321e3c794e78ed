"""rows [n, K] times one expert's matrix [N, K], in whichever of torch's ways is fastest for the number of rows."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional as F


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


def matmul(x: Tensor, w: Tensor, way: Way) -> Tensor:
    """x [n, K] @ w [N, K].T -> [n, N], possibly a transposed view.

    The output has the dtype of x, which is float32 for the WIDEN ways whatever the dtype of w.
    """
    if way is Way.ROWS:
        return F.linear(x, w)
    if way is Way.VECTOR:
        return torch.mv(w, x[0])[None]
    if way is Way.COLUMNS:
        return torch.mm(w, x.t()).t()
    return _widened(x, w, columns=way is Way.WIDEN_COLUMNS)


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
