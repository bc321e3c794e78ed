"""topk: the k largest scores of each token, with a total order."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro import settings
from moestro.errors import invalid_input
from moestro.ops import dispatch, gpu
from moestro.ops.inputs import check_tensor
from moestro.ops.tensors import call_key
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
    check_tensor("topk", "scores", scores)
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
    indices = run(scores, k)
    return scores.gather(-1, indices), indices


def run(scores: Tensor, k: int) -> Tensor:
    """The indices of `topk` without the checks of sizes; NaN is refused all the same."""
    found: Tensor = dispatch.run(TOPK, scores, k)
    return found


def _look(scores: Tensor, k: int) -> dispatch.Looked | None:
    tensors = call_key(scores)
    if tensors is None:
        return None
    forced = settings.current().implementation
    aligned = scores.is_cpu or gpu.alignment(scores)
    return ("topk", forced, torch.get_num_threads(), k, aligned, tensors), ()


def _branchless(scores: Tensor, k: int) -> dispatch.Prepared | str:
    if scores.dtype == torch.float64:
        return tuning.NO_WORD
    if torch.compiler.is_compiling() or tuning.rank_fits(*scores.shape):
        # A traced graph holds for every num_tokens, so the limit is the caller's there.
        return plain.checked("branchless", plain.topk_by_rank)
    return f"T * E * E comparisons exceed {tuning.RANK_LIMIT} for scores {list(scores.shape)}"


TOPK = dispatch.register(
    dispatch.Operation(
        "topk",
        (
            dispatch.Implementation("cpu-native", cpu.prepare),
            dispatch.Implementation("triton", triton.prepare),
            dispatch.Implementation("torch", lambda scores, k: plain.checked("torch", plain.topk_by_sort)),
            dispatch.Implementation("branchless", _branchless),
            dispatch.Implementation("reference", lambda scores, k: plain.checked("reference", reference.topk)),
        ),
        look=_look,
    )
)
