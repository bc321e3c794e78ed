"""`route` in one call of the native engine, where no gradient is asked for and the scoring is one that it has.

What it chooses and weighs is what plain PyTorch computes, up to the rounding of float32: where scores that round to the
same number are tied, the two may choose differently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from moestro.ops import native
from moestro.ops.dispatch import Prepared
from moestro.ops.tensors import empty, no_gradient, rows
from moestro.routing.groups import GroupLimit
from moestro.routing.scoring import Scoring, why_unscored
from moestro.types import Routing


def prepare(
    plain: Callable[..., Routing],
    logits: Tensor,
    top_k: int,
    scoring: Scoring,
    correction: Tensor | None,
    groups: GroupLimit | None,
) -> Prepared | str:
    """The call, or the reason why the engine has none; it leaves some values to `plain`: masked experts, and NaN."""
    reason = why_unsupported(logits, scoring, correction)
    if reason is not None:
        return reason
    engine, threads, router = native.engine(), torch.get_num_threads(), _router(scoring)
    limit = None if groups is None else _limit(groups)

    def compute(
        logits: Tensor, top_k: int, scoring: Scoring, correction: Tensor | None, groups: GroupLimit | None
    ) -> Routing:
        given, bias = rows(logits), None if correction is None else correction.to(torch.float32).contiguous()
        num_tokens, num_experts = given.shape
        ids = empty(num_tokens, top_k, torch.int64)
        weights = empty(num_tokens, top_k, torch.float32)
        size, address = (num_tokens, num_experts, given.stride(0), top_k), 0 if bias is None else bias.data_ptr()
        out = ids.data_ptr(), weights.data_ptr()
        if engine.route(router, limit, given.data_ptr(), *size, address, *out, threads):
            return Routing.unchecked(ids, weights, scoring.weight_on)
        return plain(logits, top_k, scoring, correction, groups)

    return Prepared("cpu-native", compute, threads=threads)


def why_unsupported(logits: Tensor, scoring: Scoring, correction: Tensor | None) -> str | None:
    """Why the engine cannot route these logits; None if it can."""
    reason = native.unreadable(logits) or no_gradient(logits)
    if reason is None and correction is not None:
        reason = native.unreadable(correction)
    reason = reason or why_unscored(logits, scoring, native.SCORES)
    if reason is not None:
        return reason
    if scoring.logit_softcap is not None or scoring.shared_experts:
        return f"it knows no scoring with {'shared experts' if scoring.logit_softcap is None else 'a soft-cap'}"
    if not isinstance(scoring.renormalize, bool):
        return f"it divides weights by their sum, and not by their {scoring.renormalize}-norm"
    return None


def _router(scoring: Scoring) -> Any:
    """The scoring as the engine takes it."""
    return native.engine().Router(
        score=native.SCORES[scoring.score],
        select_on_logits=scoring.select_on == "logits",
        renormalize=scoring.renormalize,
        epsilon=scoring.epsilon,
        floor=scoring.floor,
        scale=scoring.scale,
        logit_scale=scoring.logit_scale,
    )


def _limit(groups: GroupLimit) -> Any:
    return native.engine().Groups(**asdict(groups))
