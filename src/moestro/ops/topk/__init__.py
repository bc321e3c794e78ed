"""topk: the k largest scores of each token, with a total order."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.ops import _select
from moestro.ops.topk import cpu, plain, reference, triton, tuning

__all__ = ["topk"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each token's scores, largest first.

    The order is total: of equal scores the larger index wins, -0.0 equals 0.0, infinities are ordinary. Nothing
    depends on data but values, so the operation passes torch.compile(fullgraph=True) and torch.export.

    Args:
        scores: [T, E], floating point. E is at most 65536.
        k: 1 <= k <= E.

    Returns:
        values [T, k] in the dtype of scores, and indices [T, k], int64.

    Raises:
        InvalidInputError: wrong shape, dtype or k, or a NaN among the scores. (On an accelerator and under
            torch.compile the NaN check is an assertion on the device.)
    """
    if scores.dim() != 2 or scores.dtype not in _DTYPES:
        raise invalid_input(
            "topk",
            got=f"scores {list(scores.shape)} of {scores.dtype}",
            needs="[num_tokens, num_experts] of float32, bfloat16, float16 or float64",
            fix="Flatten the batch, or convert with scores.float().",
        )
    if not 1 <= k <= scores.shape[-1] <= plain.MAX_EXPERTS:
        raise invalid_input(
            "topk",
            got=f"k={k} with {scores.shape[-1]} experts",
            needs=f"1 <= k <= num_experts <= {plain.MAX_EXPERTS}",
            fix="Lower top_k, or check that experts lie along the last dimension.",
        )
    chosen = _select.select("topk", scores, k)
    indices = cpu.find(scores, k) if chosen.call is cpu.topk else None
    if indices is None:
        if chosen.call is not triton.topk or scores.is_cpu:  # on a GPU that kernel asserts it
            _refuse_nan(scores)
        indices = chosen.call(scores, k)
    return scores.gather(-1, indices), indices


def run(scores: Tensor, k: int) -> Tensor:
    """The indices of `topk` without the checks."""
    found: Tensor = _select.select("topk", scores, k).call(scores, k)
    return found


def _refuse_nan(scores: Tensor) -> None:
    if torch.compiler.is_compiling() or scores.device.type != "cpu":
        torch._assert_async((scores == scores).all(), "[topk] scores must not be NaN")
    else:
        plain.refuse_nan(scores)


def _rank_supports(scores: Tensor, k: int) -> str | None:
    if scores.dtype == torch.float64:
        return plain.TOO_WIDE
    if torch.compiler.is_compiling() or tuning.rank_fits(*scores.shape):
        return None  # a traced graph holds for every num_tokens, so the limit is the caller's there
    return f"T * E * E comparisons exceed {tuning.RANK_LIMIT} for scores {list(scores.shape)}"


_select.register(
    "topk",
    [
        _select.Implementation("cpu-native", cpu.supports, cpu.topk),
        _select.Implementation("triton", triton.supports, triton.topk),
        _select.Implementation("torch", lambda scores, k: None, plain.topk_by_sort),
        _select.Implementation("branchless", _rank_supports, plain.topk_by_rank),
        _select.Implementation("reference", lambda scores, k: None, reference.topk),
    ],
)
