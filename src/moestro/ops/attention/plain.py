"""Attention of one query in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moestro.ops.dispatch import Prepared
from moestro.ops.tensors import without_autocast


def prepare(query: Tensor, *others: Any) -> Prepared:
    """Two products of matrices for each group, with logits in float32 at least."""
    return Prepared("torch", without_autocast(query, _attend))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    (batch, heads, columns), groups = query.shape, key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = (query.view(batch, groups, heads // groups, columns) @ key.transpose(2, 3)).to(wide) * scale
    if mask is not None:
        logits = logits + mask.to(wide)[:, None, None, :]
    if sinks is None:
        shares = torch.softmax(logits, -1)
    else:
        sink = sinks.to(wide).view(1, groups, heads // groups, 1).expand(batch, -1, -1, 1)
        shares = torch.softmax(torch.cat([logits, sink], -1), -1)[..., : key.shape[2]]
    return (shares.to(value.dtype) @ value).reshape(batch, heads, value.shape[3])
