"""What attention of one query must compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moestro.ops.dispatch import Prepared


def prepare(*arguments: Any) -> Prepared:
    """The call of the reference."""
    return Prepared("reference", attention)


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """By its formula, in float32 at least, rounded once to the dtype of the query."""
    wide = torch.promote_types(query.dtype, torch.float32)
    per_group = query.shape[1] // key.shape[1]
    keys, values = (t.to(wide).repeat_interleave(per_group, 1) for t in (key, value))
    logits = scale * (keys * query.to(wide)[:, :, None, :]).sum(-1)
    if mask is not None:
        logits = logits + mask.to(wide)[:, None, :]
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(wide)[None, :, None].expand(len(query), -1, 1)], -1)
    unseen = logits.amax(-1, keepdim=True) == -torch.inf
    shares = torch.softmax(logits.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0)[..., : key.shape[2]]
    return (shares[..., None] * values).sum(2).to(query.dtype)
