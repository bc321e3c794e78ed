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
    logits = (query.to(wide) * scale).view(batch, groups, heads // groups, columns) @ key.to(wide).transpose(2, 3)
    if mask is not None:
        logits = logits + mask.to(wide)[:, None, None, :]
    if sinks is not None:
        sink = sinks.to(wide).view(1, groups, heads // groups, 1).expand(batch, -1, -1, 1)
        logits = torch.cat([logits, sink], -1)
    unseen = logits.amax(-1, keepdim=True) == -torch.inf
    shares = torch.softmax(logits.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0)[..., : key.shape[2]]
    return (shares.to(value.dtype) @ value).reshape(batch, heads, value.shape[3])
