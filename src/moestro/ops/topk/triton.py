"""Top-k on a GPU in one launch, which also asserts that no score is NaN."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Hashable
from types import ModuleType

import torch
from torch import Tensor

from moestro.ops import gpu, tensors
from moestro.ops.gpu_checks import ASSERTING
from moestro.ops.topk import plain, tuning

_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
"""For each dtype of scores: integers of its width, and the bits of infinity."""


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module("moestro.ops.topk.triton_kernels")


def supports(scores: Tensor, k: int) -> str | None:
    """None, or the sentence why kernels cannot rank these scores."""
    reason = gpu.unreadable(scores.detach() if scores.requires_grad else scores)  # indices have no gradient
    if reason is not None:
        return reason
    if scores.dtype not in _BITS:
        return plain.TOO_WIDE
    if scores.shape[-1] > tuning.MOST_EXPERTS:
        return f"a program holds at most {tuning.MOST_EXPERTS} scores of a token, not {scores.shape[-1]}"
    if k > tuning.MOST_TAKEN:
        return f"it takes one score after another, at most {tuning.MOST_TAKEN}, not {k}"
    return None


def topk(scores: Tensor, k: int) -> Tensor:
    """Indices [T, k], int64, of scores that `supports` has passed.

    A NaN among them is an assertion on the device; the interpreter, which has none, raises InvalidInputError.
    """
    if scores.is_cpu:
        plain.refuse_nan(scores)
    scores = scores.detach() if scores.stride(1) == 1 else scores.detach().contiguous()
    num_tokens, num_experts = scores.shape
    indices = tensors.empty(num_tokens, k, torch.int64, scores.device)
    if num_tokens == 0:
        return indices
    stride = scores.stride(0)
    launch, block_t = _launch(num_experts, k, scores.dtype, (*gpu.aligned(scores), stride == 1, stride % 16 == 0))
    with gpu.on(scores):
        launch(-(-num_tokens // block_t), scores.view(_BITS[scores.dtype][0]), indices, num_tokens, stride)
    return indices


@functools.lru_cache(maxsize=256)
def _launch(num_experts: int, k: int, dtype: torch.dtype, given: tuple[Hashable, ...]) -> tuple[gpu.Launch, int]:
    """The launch for scores [T, E] of a dtype, and the tokens of a program; `given` is what Triton would look for."""
    integers, infinity = _BITS[dtype]
    block_t, block_e, warps = tuning.tile(num_experts)
    values = (
        ("E", num_experts),
        ("TOP_K", k),
        ("WIDE", integers == torch.int32),
        ("INFINITY", infinity),
        ("BLOCK_T", block_t),
        ("BLOCK_E", block_e),
        ("BLOCK_K", tuning.power_of_two(k)),
    )
    return gpu.kept(_kernels().topk_kernel, values, (("num_warps", warps), *ASSERTING), given), block_t
