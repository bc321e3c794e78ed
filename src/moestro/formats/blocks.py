"""A panel of rows [n, K] as blocks [B, M], one row for the weights that share a scale, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from moestro.formats.base import Scaling

_AT_ONCE = 4096


def to_blocks(panel: Tensor, scaling: Scaling) -> Tensor:
    """[n, K] -> [B, M], blocks from left to right and top to bottom; what a cut-off block lacks is zero.

    Where all rows share a scale, each row stands for itself.
    """
    if scaling.rows <= 1:
        return panel.view(-1, scaling.columns) if scaling.columns else panel
    rows, columns = scaling.rows, scaling.columns
    n, k = panel.shape
    down, across = scaling.blocks(n, k)
    full = F.pad(panel, (0, across * columns - k, 0, down * rows - n))
    return full.view(down, rows, across, columns).transpose(1, 2).reshape(down * across, rows * columns)


def from_blocks(blocks: Tensor, shape: Sequence[int], scaling: Scaling) -> Tensor:
    """[B, M] -> [n, K], what `to_blocks` was given."""
    n, k = shape
    if scaling.rows <= 1:
        return blocks.view(n, k)
    rows, columns = scaling.rows, scaling.columns
    down, across = scaling.blocks(n, k)
    full = blocks.view(down, across, rows, columns).transpose(1, 2).reshape(down * rows, across * columns)
    return full[:n, :k]


def row_sums(x: Tensor) -> Tensor:
    """[B, M] -> [B, 1], each row summed in an order that depends on M alone, not on B or the number of threads."""
    # torch divides a sum among threads when it has a single result and more than 32768 terms.
    total = x[:, :_AT_ONCE].sum(1, keepdim=True)
    for start in range(_AT_ONCE, x.shape[1], _AT_ONCE):
        total += x[:, start : start + _AT_ONCE].sum(1, keepdim=True)
    return total
