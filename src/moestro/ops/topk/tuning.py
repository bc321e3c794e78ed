"""Which way of ranking: a function of shape."""

from __future__ import annotations

RANK_LIMIT = 1 << 26


def rank_fits(num_tokens: int, num_experts: int) -> bool:
    """Whether the T * E * E comparisons of ranking stay within 64 Mi entries."""
    return num_tokens * num_experts * num_experts <= RANK_LIMIT
