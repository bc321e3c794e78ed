"""Rows rounded to 8 bits times experts stored in as many or fewer.

Integers times integers: every sum of a scale's group is exact. 8-bit floats: summed up in float32, group by group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moestro.formats import PackedTensor, StoredExperts, floats, integers
from moestro.ops.expert_mlp.matmul import Span
from moestro.ops.expert_mlp.tuning import panel_rows
from moestro.reference import round_rows, round_rows_e4m3
from moestro.types import InputFormat

_EXACT_COLUMNS = 1024
"""So many products of two signed bytes add up to less than 2 ** 24, below which float32 holds every integer."""

_SUMS = 1 << 20
"""Float32 sums of single groups that are held at a time."""


def low_precision_spans(
    x: Tensor, stored: StoredExperts, spans: Sequence[Span], rows: InputFormat, out: Tensor | None = None
) -> Tensor:
    """Each span's rows of x [n, K], rounded to `rows`, times its expert's matrix -> [n, N] in the dtype of x; written
    to `out` if given. The spans cover x in order."""
    y = x.new_empty(x.shape[0], stored.shape[1]) if out is None else out
    scaling = stored.format.scaling
    assert scaling is not None
    q, s = round_rows(x) if rows == "int8" else round_rows_e4m3(x, scaling.columns or max(x.shape[1], 1))
    of_panel = _sums if rows == "int8" else _float_sums
    unit = max(scaling.rows, 1)
    for e, start, stop in spans:
        top = 0
        for block in stored.blocks(e):
            height = max(panel_rows(block.shape[1], q) // unit, 1) * unit
            for first in range(0, block.shape[0], height):
                panel = block.rows(first, min(first + height, block.shape[0]))
                y[start:stop, top : top + panel.shape[0]] = of_panel(q[start:stop], s[start:stop], panel, y.dtype)
                top += panel.shape[0]
    return y


def _float_sums(q: Tensor, s: Tensor, panel: PackedTensor, dtype: torch.dtype) -> Tensor:
    """8-bit floats q [n, K] with scales s [n, C] times a panel [N, K] of a matrix -> [n, N]."""
    values, steps, columns = floats(panel)
    total = torch.zeros(q.shape[0], panel.shape[0], dtype=dtype, device=q.device)
    for g in range(steps.shape[1]):
        of_group = slice(g * columns, (g + 1) * columns)
        sums = torch.mm(q[:, of_group].to(dtype), values[:, of_group].to(dtype).t())
        total += sums.mul_(steps[:, g]).mul_(s[:, g, None])
    return total


def _sums(q: Tensor, s: Tensor, panel: PackedTensor, dtype: torch.dtype) -> Tensor:
    """Integers q [n, K] with scales s [n, 1] times a panel [N, K] of a matrix -> [n, N]."""
    values, steps = integers(panel)
    (n, k), (rows, groups) = q.shape, steps.shape
    total = torch.zeros(n, rows, dtype=dtype, device=q.device)
    if groups == 1:
        whole = torch.zeros(n, rows, dtype=torch.float64, device=q.device)
        for start in range(0, k, _EXACT_COLUMNS):
            columns = slice(start, start + _EXACT_COLUMNS)
            whole += torch.mm(q[:, columns], values[:, columns].t())
        return total.copy_(whole).mul_(steps.t()).mul_(s)
    if k == 0:
        return total
    by_group, of_group = (t.reshape(len(t), groups, k // groups).transpose(0, 1) for t in (q, values))
    few = max(_SUMS // max(n * rows, 1), 1)
    for start in range(0, groups, few):
        at = slice(start, start + few)
        exact = torch.bmm(by_group[at], of_group[at].transpose(1, 2))
        total += exact.to(dtype).mul_(steps[:, at].t()[:, None]).sum(0)
    return total.mul_(s)
