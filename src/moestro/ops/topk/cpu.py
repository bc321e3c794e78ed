"""Top-k in the native engine: one pass over a row, which also meets what is NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.ops import native, tensors
from moestro.ops.topk.plain import MAX_EXPERTS, nan_error

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
"""What the engine calls the dtypes of scores."""


def supports(scores: Tensor, k: int) -> str | None:
    """None, or the sentence why the engine cannot rank these scores."""
    reason = native.unreadable(scores)
    if reason is None and scores.shape[-1] > MAX_EXPERTS:
        return f"it ranks at most {MAX_EXPERTS} scores a token, not {scores.shape[-1]}"
    return reason


def find(scores: Tensor, k: int) -> Tensor | None:
    """Indices [T, k], int64, of scores that `supports` has passed; None if one of them is NaN."""
    engine = native.module
    assert engine is not None
    scores = tensors.contiguous_rows(scores)
    num_tokens, num_experts = scores.shape
    found = tensors.empty(num_tokens, k, torch.int64)
    lie = (scores.data_ptr(), DTYPES[scores.dtype], num_tokens, num_experts, scores.stride(0))
    return found if engine.topk(lie, k, found.data_ptr(), torch.get_num_threads()) else None


def topk(scores: Tensor, k: int) -> Tensor:
    """`find`, with NaN as an error."""
    found = find(scores, k)
    if found is None:
        raise nan_error(scores)
    return found
