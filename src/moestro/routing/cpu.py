"""`route` in one call of the native engine, where no gradient is asked for and the scoring is one that it has.

What it chooses and weighs is what `selection.route` computes in plain PyTorch, up to the rounding of float32: where
scores that round to the same number are tied, the two may choose differently.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moestro.ops import _select, native, tensors, topk
from moestro.routing.scoring import Scoring
from moestro.types import Routing

_SCORES = {"softmax": 0, "sigmoid": 1}
_NO_GROUPS = (1, 1, 1, 0.0)

_Numbers = tuple[int, bool, bool, float, float, float, float]
_Groups = tuple[int, int, int, float]


@functools.lru_cache(maxsize=256)
def _numbers(scoring: Scoring) -> _Numbers | None:
    """The scoring as the engine takes it, or None for one that it does not have."""
    plain = scoring.score in _SCORES and scoring.logit_softcap is None and not scoring.shared_experts
    if not plain or not isinstance(scoring.renormalize, bool):
        return None
    logits = scoring.select_on == "logits"
    factors = (scoring.epsilon, scoring.floor, scoring.scale, scoring.logit_scale)
    return (_SCORES[scoring.score], logits, scoring.renormalize, *factors)


def route(
    logits: Tensor, top_k: int, scoring: Scoring, correction: Tensor | None, groups: _Groups | None
) -> Routing | None:
    """The routing of logits [T, E] whose sizes fit, or None: then plain PyTorch computes it, or says what is wrong.

    Args:
        logits: [T, E], float32.
        top_k: K.
        scoring: how to choose and weigh.
        correction: [E] or None.
        groups: num_groups, top_groups, best and excluded of a `GroupLimit`, or None.
    """
    if torch.compiler.is_compiling():
        return None
    numbers = _numbers(scoring)
    if numbers is None or not _readable(logits, top_k, correction):
        return None
    engine = native.module
    assert engine is not None
    logits = tensors.contiguous_rows(logits)
    correction = None if correction is None else correction.to(torch.float32).contiguous()
    num_tokens, num_experts = logits.shape
    ids = tensors.empty(num_tokens, top_k, torch.int64)
    weights = tensors.empty(num_tokens, top_k, torch.float32)
    good = engine.route(
        (logits.data_ptr(), 0, num_tokens, num_experts, logits.stride(0)),
        top_k,
        numbers,
        0 if correction is None else correction.data_ptr(),
        groups or _NO_GROUPS,
        (ids.data_ptr(), weights.data_ptr()),
        torch.get_num_threads(),
    )
    return Routing.unchecked(ids, weights, scoring.weight_on) if good else None


def _readable(logits: Tensor, top_k: int, correction: Tensor | None) -> bool:
    if logits.dtype != torch.float32 or tensors.differentiates(logits):
        return False
    if correction is not None and native.unreadable(correction) is not None:
        return False
    return _select.select("topk", logits, top_k).call is topk.cpu.topk
