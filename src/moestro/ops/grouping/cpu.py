"""Grouping in the native engine: a counting sort, which also meets ids that are out of range."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.ops import native
from moestro.ops.grouping.checks import check_range
from moestro.ops.grouping.plain import block_bound
from moestro.ops.grouping.records import BlockSchedule, Grouping


def supports(expert_ids: Tensor, num_experts: int) -> str | None:
    """None, or the sentence why the engine cannot order these ids."""
    reason = native.unreadable(expert_ids)
    if reason is not None:
        return reason
    most = native.LIMITS["most_experts"]
    return None if num_experts <= most else f"it orders by at most {most} experts, not {num_experts}"


def group_by_expert(expert_ids: Tensor, num_experts: int) -> Grouping:
    """Order (token, slot) pairs by expert; see `moestro.group_by_expert`. Ids are checked on the way."""
    ids = expert_ids.contiguous()
    sizes = (ids.numel(), ids.numel(), num_experts + 1, ids.numel())
    found = Grouping(*(torch.empty(size, dtype=torch.int64, device="cpu") for size in sizes))
    addresses = tuple(t.data_ptr() for t in (found.token_ids, found.slots, found.offsets, found.inverse))
    assert native.module is not None
    if not native.module.group(*_slots(ids, num_experts), *addresses, torch.get_num_threads()):
        check_range("group_by_expert", ids, num_experts)
    return found


def block_schedule(expert_ids: Tensor, num_experts: int, block_size: int) -> BlockSchedule:
    """Lay the pairs into blocks of one expert each; see `moestro.block_schedule`. Ids are checked on the way."""
    ids = expert_ids.contiguous()
    num_blocks = block_bound(ids.numel(), num_experts, block_size)
    sizes = ((num_blocks,), (num_blocks, block_size), tuple(ids.shape), (num_experts,))
    found = BlockSchedule(*(torch.empty(size, dtype=torch.int64, device="cpu") for size in sizes))
    addresses = tuple(t.data_ptr() for t in (found.block_experts, found.pair_ids, found.scatter_index, found.counts))
    assert native.module is not None
    if not native.module.schedule(*_slots(ids, num_experts), num_blocks, block_size, *addresses):
        check_range("block_schedule", ids, num_experts)
    return found


def _slots(ids: Tensor, num_experts: int) -> tuple[int, bool, int, int, int]:
    return ids.data_ptr(), ids.dtype == torch.int64, ids.shape[0], ids.shape[1], num_experts
