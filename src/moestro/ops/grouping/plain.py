"""Grouping in plain torch: a stable sort for the row order, one-hot and cumsum for the block schedule."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.ops.dispatch import Prepared
from moestro.ops.grouping.records import BlockSchedule, Grouping
from moestro.types import EMPTY


def prepare(expert_ids: Tensor, num_experts: int, block_size: int | None = None) -> Prepared:
    """The call in plain torch; it takes any ids."""
    return Prepared("torch", group_by_expert if block_size is None else block_schedule)


def group_by_expert(expert_ids: Tensor, num_experts: int) -> Grouping:
    """Order (token, slot) pairs by expert; see `moestro.group_by_expert`."""
    top_k = max(expert_ids.shape[1], 1)
    flat = expert_ids.reshape(-1)
    # Empty slots take the id past the last expert, which sorts them behind every row that is computed.
    placed = torch.where(is_used(flat, num_experts), flat, num_experts)
    order = placed.sort(stable=True).indices
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=order.device))
    edges = torch.arange(num_experts + 1, device=flat.device, dtype=flat.dtype)
    ascending = placed[order]
    offsets = torch.searchsorted(ascending, edges)
    return Grouping(order // top_k, order % top_k, offsets, inverse)


def is_used(ids: Tensor, num_experts: int) -> Tensor:
    """Which ids name an expert; all others are empty slots."""
    return (ids >= 0) & (ids < num_experts)


def block_schedule(expert_ids: Tensor, num_experts: int, block_size: int) -> BlockSchedule:
    """Lay the pairs into blocks of one expert each; see `moestro.block_schedule`."""
    num_tokens, top_k = expert_ids.shape
    num_blocks = block_bound(num_tokens * top_k, num_experts, block_size)
    flat = expert_ids.reshape(-1).long()
    used = is_used(flat, num_experts)
    expert = torch.where(used, flat, 0)[:, None]
    one_hot = flat[:, None] == torch.arange(num_experts, device=flat.device)
    counts = one_hot.sum(0)
    blocks = (counts + block_size - 1) // block_size
    last = blocks.cumsum(0)
    global_offset = last - blocks
    local_offset = one_hot.cumsum(0, dtype=torch.int32).gather(1, expert)[:, 0] - 1
    start = global_offset[expert[:, 0]] * block_size
    scatter_index = torch.where(used, start + local_offset, EMPTY)

    block = torch.arange(num_blocks, device=flat.device)
    owner = (block[:, None] >= last[None, :]).sum(1)
    block_experts = torch.where(block < last[-1], owner, EMPTY)
    # One cell more than the schedule has takes what empty slots write, and is cut off again.
    cells = torch.full((num_blocks * block_size + 1,), EMPTY, device=flat.device, dtype=torch.int64)
    target = torch.where(used, scatter_index, num_blocks * block_size)
    pairs = torch.arange(num_tokens * top_k, device=flat.device)
    pair_ids = cells.scatter(0, target, torch.where(used, pairs, EMPTY))[:-1].reshape(num_blocks, block_size)
    return BlockSchedule(block_experts, pair_ids, scatter_index.reshape(num_tokens, top_k), counts)


def block_bound(num_rows: int, num_experts: int, block_size: int) -> int:
    """ceil(rows / B) + E - 1: enough blocks for any routing, without looking at it."""
    return -(-num_rows // block_size) + num_experts - 1
