"""Which way of ranking: a function of shape."""

from __future__ import annotations

RANK_LIMIT = 1 << 26
MOST_EXPERTS = 4096
"""Whose scores a program on a GPU holds."""
MOST_TAKEN = 64
"""Scores that it takes one after another."""
_TILE = 512
NO_WORD = "a float64 score and its index do not fit one 64-bit word"


def rank_fits(num_tokens: int, num_experts: int) -> bool:
    """Whether the T * E * E comparisons of ranking stay within 64 Mi entries."""
    return num_tokens * num_experts * num_experts <= RANK_LIMIT


def why_no_program(num_experts: int, taken: int) -> str | None:
    """Why a GPU's program cannot rank so many scores of a token and take so many; None if it can."""
    if num_experts > MOST_EXPERTS:
        return f"a program holds at most {MOST_EXPERTS} scores of a token, not {num_experts}"
    if taken > MOST_TAKEN:
        return f"it takes one score after another, at most {MOST_TAKEN}, not {taken}"
    return None


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def tile(num_columns: int) -> tuple[int, int, int]:
    """Tokens, columns and warps of a GPU's program.

    It does not depend on the number of tokens, so that neither does the order in which a token's scores are summed.
    """
    columns = power_of_two(num_columns)
    tokens = max(_TILE // columns, 1)
    return tokens, columns, min(max(tokens * columns // 128, 1), 8)
