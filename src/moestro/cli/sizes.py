"""Sizes as options are given them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moestro.errors import invalid_input
from moestro.memory.amounts import parse_bytes

if TYPE_CHECKING:
    from moestro.memory import MemoryBudget

__all__ = ["memory_budget", "parse_bytes"]


def memory_budget(operation: str, memory: str | None, prefetch: bool) -> MemoryBudget | None:
    """What --memory and --prefetch say together; None without a budget."""
    from moestro.memory import MemoryBudget

    if memory is None:
        if prefetch:
            raise invalid_input(
                operation,
                got="--prefetch without --memory",
                needs="a budget: without one every expert is mapped",
                fix="Add --memory, as in --memory 8GB.",
            )
        return None
    return MemoryBudget(MemoryBudget.of(memory).nbytes, prefetch=prefetch)
