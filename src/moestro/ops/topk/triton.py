"""Top-k on a GPU in one launch, which also asserts that no score is NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.ops import gpu
from moestro.ops.dispatch import Prepared
from moestro.ops.gpu_checks import ASSERTING
from moestro.ops.tensors import empty, rows
from moestro.ops.topk import plain, tuning

_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
"""For each dtype of scores: integers of its width, and the bits of infinity."""


def prepare(scores: Tensor, k: int) -> Prepared | str:
    """The launch, or the reason why kernels cannot rank these scores.

    A NaN among them is an assertion on the device; the interpreter, which has none, raises InvalidInputError.
    """
    reason = why_unsupported(scores, k)
    if reason is not None:
        return reason
    num_tokens, num_experts = scores.shape
    stride = scores.stride(0) if scores.stride(1) == 1 else num_experts
    launch, block_t = _launch(num_experts, k, scores.dtype)
    integers = _BITS[scores.dtype][0]

    def compute(scores: Tensor, k: int) -> Tensor:
        if scores.is_cpu:
            plain.refuse_nan(scores)
        scores = rows(scores.detach())
        indices = empty(num_tokens, k, torch.int64, scores.device)
        if num_tokens:
            with gpu.on(scores):
                launch(-(-num_tokens // block_t), scores.view(integers), indices, num_tokens, stride)
        return indices

    return Prepared("triton", compute)


def why_unsupported(scores: Tensor, k: int) -> str | None:
    """Why kernels cannot rank these scores; None if they can."""
    reason = gpu.unreadable(scores.detach() if scores.requires_grad else scores)  # indices have no gradient
    if reason is not None:
        return reason
    if scores.dtype not in _BITS:
        return tuning.NO_WORD
    return tuning.why_no_program(scores.shape[-1], k)


def _launch(num_experts: int, k: int, dtype: torch.dtype) -> tuple[gpu.Launch, int]:
    """The launch for scores [T, E] of a dtype, and the tokens of a program."""
    integers, infinity = _BITS[dtype]
    block_t, block_e, warps = tuning.tile(num_experts)
    values = {
        "E": num_experts,
        "TOP_K": k,
        "WIDE": integers == torch.int32,
        "INFINITY": infinity,
        "BLOCK_T": block_t,
        "BLOCK_E": block_e,
        "BLOCK_K": tuning.power_of_two(k),
    }
    resources = {"num_warps": warps, **dict(ASSERTING)}
    return gpu.Launch(gpu.kernels(__package__).topk_kernel, values, resources), block_t
