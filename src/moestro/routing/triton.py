"""`route` in one launch on a GPU, where no gradient is asked for: any scoring, and its assertions on values.

What it chooses is what plain PyTorch does, up to ties of scores that round to the same float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moestro.ops import gpu
from moestro.ops.dispatch import Prepared
from moestro.ops.gpu_checks import ASSERTING
from moestro.ops.tensors import empty, rows
from moestro.ops.topk import tuning
from moestro.routing.groups import GroupLimit
from moestro.routing.scoring import Scoring, why_unscored
from moestro.types import Routing

_SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2, "sparsemixer": 3}
_NO_GROUPS = (1, 1, 1, 0.0)

_Groups = tuple[int, int, int, float]


def _limits(groups: GroupLimit | None) -> tuple[int, int, int, float]:
    if groups is None or groups.num_groups == 1:
        return _NO_GROUPS
    return groups.num_groups, groups.top_groups, groups.best, groups.excluded


def prepare(
    plain: Callable[..., Routing],
    logits: Tensor,
    top_k: int,
    scoring: Scoring,
    correction: Tensor | None,
    groups: GroupLimit | None,
) -> Prepared | str:
    """The launch, or the reason why there is none. A value that no router takes is an assertion on the device.

    In the interpreter, where nothing is asserted, `plain` says what is wrong with values.
    """
    limits = _limits(groups)
    reason = why_unsupported(logits, top_k, scoring, correction, limits)
    if reason is not None:
        return reason
    num_tokens, num_columns = logits.shape
    slots = top_k + scoring.shared_experts
    stride = logits.stride(0) if logits.stride(1) == 1 else num_columns
    launch, block_t, numbers = _launch(scoring, num_columns, top_k, limits, correction is not None)

    def compute(
        logits: Tensor, top_k: int, scoring: Scoring, correction: Tensor | None, groups: GroupLimit | None
    ) -> Routing:
        if logits.is_cpu and not _good(logits, scoring, correction):
            return plain(logits, top_k, scoring, correction, groups)
        logits = rows(logits)
        correction = None if correction is None else correction.contiguous()
        ids = empty(num_tokens, slots, torch.int64, logits.device)
        weights = empty(num_tokens, slots, torch.float32, logits.device)
        if num_tokens:
            with gpu.on(logits):
                launch(-(-num_tokens // block_t), logits, correction, ids, weights, num_tokens, stride, *numbers)
        return Routing.unchecked(ids, weights, scoring.weight_on)

    return Prepared("triton", compute)


def why_unsupported(
    logits: Tensor, top_k: int, scoring: Scoring, correction: Tensor | None, limits: _Groups
) -> str | None:
    """Why the kernel cannot route these logits; None if it can."""
    reason = gpu.unreadable(logits)
    if reason is None and correction is not None:
        reason = gpu.unreadable(correction)
        if correction.device != logits.device:
            reason = f"it reads one device, and the correction bias is on {correction.device}"
    if reason is not None:
        return reason
    reason = why_unscored(logits, scoring, _SCORES)
    reason = reason or tuning.why_no_program(logits.shape[-1], top_k + scoring.shared_experts)
    if reason is not None:
        return reason
    if scoring.shared_experts and (limits[0] > 1 or scoring.score == "sparsemixer"):
        return "it knows shared experts neither in groups nor with the score 'sparsemixer'"
    return None


def _launch(
    scoring: Scoring, num_columns: int, top_k: int, limits: _Groups, corrected: bool
) -> tuple[gpu.Launch, int, tuple[float, ...]]:
    """The launch for such arguments, the tokens of a program, and the numbers that it is given last."""
    values, block_t, warps = _values(scoring, num_columns, top_k, limits, corrected)
    resources = {"num_warps": warps, **dict(ASSERTING)}
    return gpu.Launch(gpu.kernels(__package__).route_kernel, values, resources), block_t, _numbers(scoring, limits[3])


def _numbers(scoring: Scoring, excluded: float) -> tuple[float, ...]:
    """What the kernel is given, in its order."""
    power = float(scoring.renormalize)
    numbers = (
        scoring.logit_scale,
        scoring.logit_softcap or 1.0,
        scoring.tolerance,
        excluded,
        power,
        scoring.epsilon,
        scoring.floor,
        scoring.scale,
    )
    return tuple(map(float, numbers))  # an integer would be compiled for its value


def _values(
    scoring: Scoring, num_columns: int, top_k: int, groups: _Groups, corrected: bool
) -> tuple[dict[str, Any], int, int]:
    """What the kernel is compiled for, the tokens of a program, and its warps."""
    num_groups, top_groups, best, _ = groups
    size = num_columns // num_groups
    block_g = tuning.power_of_two(size)
    block_t, block_e, warps = tuning.tile(block_g * tuning.power_of_two(num_groups))
    order = 0 if scoring.renormalize is False else 1 if float(scoring.renormalize) == 1.0 else 2
    values = {
        "E": num_columns - scoring.shared_experts,
        "TOP_K": top_k,
        "SHARED": scoring.shared_experts,
        "SCORE": _SCORES[scoring.score],
        "ON_LOGITS": scoring.select_on == "logits",
        "NORM": order,
        "HAS_CAP": scoring.logit_softcap is not None,
        "HAS_CORRECTION": corrected,
        "TAKES_INFINITY": scoring.takes_infinity,
        "GROUPS": num_groups,
        "TOP_GROUPS": top_groups,
        "BEST": min(best, size),
        "BLOCK_T": block_t,
        "BLOCK_E": block_e,
        "BLOCK_G": block_g,
        "BLOCK_K": tuning.power_of_two(top_k + scoring.shared_experts),
    }
    return values, block_t, warps


def _good(logits: Tensor, scoring: Scoring, correction: Tensor | None) -> bool:
    """Whether a router takes these values; in the interpreter, where a kernel asserts nothing."""
    scaled = (logits * scoring.logit_scale).masked_fill(logits == -torch.inf, 0.0).abs()
    allowed = scaled <= torch.inf if scoring.takes_infinity else scaled < torch.inf
    return bool(allowed.all()) and (correction is None or bool(torch.isfinite(correction).all()))
