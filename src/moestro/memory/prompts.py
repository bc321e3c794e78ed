"""What a prompt is to the slots of a budget: one rule for a live run and for the record of one."""

from __future__ import annotations

from collections.abc import Sequence

MOST_DECODED = 32
"""Rows of a call up to which each is taken for the next token of a sequence."""


def last_experts(expert_ids: Sequence[Sequence[int]], num_experts: int) -> frozenset[int] | None:
    """The experts of a prompt's last token, from the ids of all; None where the call decodes.

    Args:
        expert_ids: [T][K]; ids outside 0..num_experts - 1 are empty slots.
    """
    if len(expert_ids) <= MOST_DECODED:
        return None
    return frozenset(e for e in expert_ids[-1] if 0 <= e < num_experts)
