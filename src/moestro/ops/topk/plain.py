"""Branchless top-k: a score and its index share one integer word, so that words are distinct and their order total.

Negative scores have their magnitude bits inverted, which makes the order of signed integers the order of the scores.
A 16-bit score and its index fill 32 bits, a 32-bit score and its index 64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moestro import reference
from moestro.errors import invalid_input
from moestro.ops.dispatch import Prepared

MAX_EXPERTS = 1 << 16


def pack(scores: Tensor) -> Tensor:
    """Words [T, E] whose signed order is the order by (score, index): int32 for 16-bit scores, int64 for 32-bit."""
    index = torch.arange(scores.shape[-1], device=scores.device)
    canonical = scores.masked_fill(scores == 0, 0.0)  # equal scores must have equal bits: -0.0 becomes 0.0
    if scores.element_size() == 2:
        bits = canonical.view(torch.int16).to(torch.int32)
        ordered = torch.where(bits < 0, bits ^ 0x7FFF, bits)
        return (ordered << 16) | index.to(torch.int32)
    bits = canonical.view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) | index


def unpack_index(words: Tensor) -> Tensor:
    """The index half of words, as int64."""
    return (words & (0xFFFF if words.dtype == torch.int32 else 0xFFFFFFFF)).long()


def topk_by_sort(scores: Tensor, k: int) -> Tensor:
    """Indices [T, k] by torch.topk over the words.

    Called eagerly on the CPU, torch.topk over the scores themselves is several times faster; only the rows in which
    it met equal values, where its own order is not defined, are ranked by words.
    """
    if scores.device.type != "cpu" or torch.compiler.is_compiling():
        return _by_words(scores, k)
    values, indices = scores.topk(min(k + 1, scores.shape[-1]), dim=-1)
    tied = ~(values[:, 1:] < values[:, :-1])  # true for NaN as well
    indices = indices[:, :k]
    if not tied.any():
        return indices
    rows = tied.any(-1).nonzero()[:, 0]
    return indices.index_copy(0, rows, _by_words(scores[rows], k))


def checked(name: str, indices: Callable[[Tensor, int], Tensor]) -> Prepared:
    """A way of plain torch to find the indices, behind a check of the values."""

    def compute(scores: Tensor, k: int) -> Tensor:
        refuse_nan(scores)
        return indices(scores, k)

    return Prepared(name, compute)


def refuse_nan(scores: Tensor) -> None:
    """Raises InvalidInputError if one of the scores is NaN; where reading is not free, an assertion on the device."""
    if torch.compiler.is_compiling() or scores.device.type != "cpu":
        torch._assert_async((scores == scores).all(), "[topk] scores must not be NaN")
    elif torch.isnan(scores).any():
        raise invalid_input(
            "topk",
            got=f"NaN among scores {list(scores.shape)}",
            needs="scores that are not NaN",
            fix="Look for NaN in the router's input, weights or correction bias.",
        )


def _by_words(scores: Tensor, k: int) -> Tensor:
    if scores.dtype == torch.float64:
        return reference.topk(scores, k)
    return unpack_index(pack(scores).topk(k, dim=-1).values)


def topk_by_rank(scores: Tensor, k: int) -> Tensor:
    """Indices [T, k] by counting, for each word, the words above it. T * E * E comparisons, no branch, no sort."""
    words = pack(scores)
    rank = (words[..., None, :] > words[..., :, None]).sum(-1)
    place = torch.where(rank < k, rank, k)
    out = words.new_zeros(*words.shape[:-1], k + 1)
    return unpack_index(out.scatter(-1, place, words)[..., :k])
