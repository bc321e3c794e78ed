"""Rows rounded to 8-bit integers times experts stored as integers: every sum of a scale's group is exact."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moestro.formats import PackedTensor, StoredExperts, integers
from moestro.ops.expert_mlp.matmul import Span
from moestro.ops.expert_mlp.tuning import panel_rows
from moestro.reference import round_rows

_EXACT_COLUMNS = 1024
"""So many products of two signed bytes add up to less than 2 ** 24, below which float32 holds every integer."""

_SUMS = 1 << 20
"""Float32 sums of single groups that are held at a time."""


def rounded_spans(x: Tensor, stored: StoredExperts, spans: Sequence[Span], out: Tensor | None = None) -> Tensor:
    """Each span's rows of x [n, K], rounded, times its expert's matrix -> [n, N] in the dtype of x; written to `out`
    if given. The spans cover x in order."""
    y = x.new_empty(x.shape[0], stored.shape[1]) if out is None else out
    q, s = round_rows(x)
    for e, start, stop in spans:
        top = 0
        for block in stored.blocks(e):
            height = max(panel_rows(block.shape[1], q), 1)
            for first in range(0, block.shape[0], height):
                panel = block.rows(first, min(first + height, block.shape[0]))
                sums = _sums(q[start:stop], panel, y.dtype)
                y[start:stop, top : top + panel.shape[0]] = sums.mul_(s[start:stop])
                top += panel.shape[0]
    return y


def _sums(q: Tensor, panel: PackedTensor, dtype: torch.dtype) -> Tensor:
    """Integers q [n, K] times a panel [N, K] of a matrix -> [n, N], the scales of the panel taken in."""
    values, steps = integers(panel)
    (n, k), (rows, groups) = q.shape, steps.shape
    total = torch.zeros(n, rows, dtype=dtype, device=q.device)
    if groups == 1:
        whole = torch.zeros(n, rows, dtype=torch.float64, device=q.device)
        for start in range(0, k, _EXACT_COLUMNS):
            columns = slice(start, start + _EXACT_COLUMNS)
            whole += torch.mm(q[:, columns], values[:, columns].t())
        return total.copy_(whole).mul_(steps.t())
    if k == 0:
        return total
    by_group, of_group = (t.reshape(len(t), groups, k // groups).transpose(0, 1) for t in (q, values))
    few = max(_SUMS // max(n * rows, 1), 1)
    for start in range(0, groups, few):
        at = slice(start, start + few)
        exact = torch.bmm(by_group[at], of_group[at].transpose(1, 2))
        total += exact.to(dtype).mul_(steps[:, at].t()[:, None]).sum(0)
    return total
