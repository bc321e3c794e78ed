"""Top-k in the native engine: one pass over a row, which also meets what is NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.ops import native
from moestro.ops.dispatch import Prepared
from moestro.ops.tensors import empty, rows
from moestro.ops.topk.plain import refuse_nan


def prepare(scores: Tensor, k: int) -> Prepared | str:
    """The call, or the reason why the engine cannot rank these scores."""
    reason = native.unreadable(scores)
    if reason is not None:
        return reason
    most = native.LIMITS["most_scores"]
    if scores.shape[-1] > most:
        return f"it ranks at most {most} scores a token, not {scores.shape[-1]}"
    engine, threads, dtype = native.engine(), torch.get_num_threads(), native.FLOATS[scores.dtype]

    def compute(scores: Tensor, k: int) -> Tensor:
        scores = rows(scores)
        num_tokens, num_experts = scores.shape
        found = empty(num_tokens, k, torch.int64)
        size = num_tokens, num_experts, scores.stride(0)
        if not engine.topk(scores.data_ptr(), dtype, *size, k, found.data_ptr(), threads):
            refuse_nan(scores)
        return found

    return Prepared("cpu-native", compute, threads=threads)
