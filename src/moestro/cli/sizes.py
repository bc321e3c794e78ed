"""Sizes as options are given them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moestro.errors import invalid_input
from moestro.memory.amounts import parse_bytes

if TYPE_CHECKING:
    from moestro.memory import MemoryBudget

__all__ = ["memory_budget", "parse_bytes"]


def memory_budget(operation: str, memory: str | None, prefetch: bool, device_memory: str | None) -> MemoryBudget | None:
    """What --memory, --prefetch and --device-memory say together; None without a budget."""
    from moestro.memory import DeviceMemory, MemoryBudget

    if memory is None:
        if prefetch or device_memory is not None:
            raise invalid_input(
                operation,
                got=f"--{'prefetch' if prefetch else 'device-memory'} without --memory",
                needs="a budget: without one every expert is mapped",
                fix="Add --memory, as in --memory 8GB.",
            )
        return None
    own = None if device_memory is None else DeviceMemory.of(device_memory)
    return MemoryBudget(MemoryBudget.of(memory).nbytes, prefetch=prefetch, device_memory=own)
