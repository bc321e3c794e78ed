"""Top-k in the native engine: one pass over a row, which also meets what is NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.ops import native


def supports(scores: Tensor, k: int) -> str | None:
    """None, or the sentence why the engine cannot rank these scores."""
    reason = native.unreadable(scores)
    if reason is not None:
        return reason
    most = native.LIMITS["most_scores"]
    return None if scores.shape[-1] <= most else f"it ranks at most {most} scores a token, not {scores.shape[-1]}"


def find(scores: Tensor, k: int) -> Tensor | None:
    """Indices [T, k], int64, of scores that `supports` has passed; None if one of them is NaN."""
    engine = native.module
    assert engine is not None
    scores = rows(scores)
    num_tokens, num_experts = scores.shape
    found = native.empty(num_tokens, k, torch.int64)
    ranked = engine.topk(
        scores.data_ptr(),
        native.FLOATS[scores.dtype],
        num_tokens,
        num_experts,
        scores.stride(0),
        k,
        found.data_ptr(),
        torch.get_num_threads(),
    )
    return found if ranked else None


def rows(scores: Tensor) -> Tensor:
    """Scores [T, E], copied only if a row of them is not contiguous; rows may be apart."""
    return scores if scores.stride(1) == 1 else scores.contiguous()


def topk(scores: Tensor, k: int) -> Tensor:
    """`find`, with NaN as an error."""
    found = find(scores, k)
    if found is None:
        raise invalid_input(
            "topk",
            got=f"NaN among scores {list(scores.shape)}",
            needs="scores that are not NaN",
            fix="Look for NaN in the router's input, weights or correction bias.",
        )
    return found
