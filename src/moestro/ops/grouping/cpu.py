"""Grouping in the native engine: a counting sort, which also meets ids that are out of range."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.ops import native
from moestro.ops.dispatch import Prepared
from moestro.ops.grouping import tuning
from moestro.ops.grouping.plain import block_bound
from moestro.ops.grouping.records import BlockSchedule, Grouping


def prepare(expert_ids: Tensor, num_experts: int, block_size: int | None = None) -> Prepared | str:
    """The call, or the reason why the engine cannot order these ids."""
    reason = native.unreadable(expert_ids) or tuning.too_many(num_experts, native.LIMITS["most_experts"])
    call = group_by_expert if block_size is None else block_schedule
    return reason or Prepared("cpu-native", call, threads=torch.get_num_threads())


def group_by_expert(expert_ids: Tensor, num_experts: int) -> Grouping:
    """Order (token, slot) pairs by expert; see `moestro.group_by_expert`."""
    ids = expert_ids.contiguous()
    sizes = (ids.numel(), ids.numel(), num_experts + 1, ids.numel())
    found = Grouping(*(torch.empty(size, dtype=torch.int64, device="cpu") for size in sizes))
    addresses = tuple(t.data_ptr() for t in (found.token_ids, found.slots, found.offsets, found.inverse))
    native.engine().group(*_slots(ids, num_experts), *addresses, torch.get_num_threads())
    return found


def block_schedule(expert_ids: Tensor, num_experts: int, block_size: int) -> BlockSchedule:
    """Lay the pairs into blocks of one expert each; see `moestro.block_schedule`."""
    ids = expert_ids.contiguous()
    num_blocks = block_bound(ids.numel(), num_experts, block_size)
    sizes = ((num_blocks,), (num_blocks, block_size), tuple(ids.shape), (num_experts,))
    found = BlockSchedule(*(torch.empty(size, dtype=torch.int64, device="cpu") for size in sizes))
    addresses = tuple(t.data_ptr() for t in (found.block_experts, found.pair_ids, found.scatter_index, found.counts))
    native.engine().schedule(*_slots(ids, num_experts), num_blocks, block_size, *addresses)
    return found


def _slots(ids: Tensor, num_experts: int) -> tuple[int, bool, int, int, int]:
    return ids.data_ptr(), ids.dtype == torch.int64, ids.shape[0], ids.shape[1], num_experts
