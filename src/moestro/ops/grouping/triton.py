"""Grouping on a GPU: one launch (two for many pairs), static shapes, nothing read back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moestro.ops import gpu
from moestro.ops.dispatch import Prepared
from moestro.ops.grouping import tuning
from moestro.ops.grouping.plain import block_bound
from moestro.ops.grouping.records import BlockSchedule, Grouping


def most_blocks(num_rows: int, num_experts: int, block_size: int) -> int:
    """Blocks that hold rows, at most: min(ceil(R / B) + E - 1, R)."""
    return min(-(-num_rows // block_size) + num_experts - 1, num_rows)


def sizes(num_pairs: int, num_experts: int, block_size: int) -> tuple[int, int, int, int, int]:
    """Of the int32 tensors that describe (token, slot) pairs in expert order and their blocks.

    In order: pairs [T * K], t * K + k of every row, stable, from offsets[E] on undefined; offsets [E + 1], where each
    expert's rows begin; block_expert [G], -1 for blocks without rows, which stand last; block_start [G], the first row
    of each block; num_blocks [1], how many have rows. Ids outside 0..E-1 are empty slots.
    """
    bound = most_blocks(num_pairs, num_experts, block_size)
    return num_pairs, num_experts + 1, bound, bound, 1


def rows_launch(ids: Tensor, num_experts: int, block_size: int) -> gpu.Launch | None:
    """The launch that orders such contiguous ids, of a program for each expert; None where it takes two."""
    if ids.numel() > tuning.MANY_PAIRS and num_experts < tuning.MANY_EXPERTS:
        return None
    return _launch("rows_kernel", ids, num_experts, (("BLOCK", block_size),))


def in_chunks(ids: Tensor, out: Sequence[Tensor], num_experts: int, blocks: tuple[int, int]) -> None:
    """The same in two launches, for so many pairs that not every expert's program should look at all of them.

    `ids` are contiguous, `out` the tensors of `sizes`, to write, `blocks` the rows of a block, and the blocks.
    """
    block_size, bound = blocks
    num_pairs = ids.numel()
    chunk, chunks, bins, warps = tuning.chunks(num_pairs, num_experts)
    counts = torch.empty(chunks * bins, dtype=torch.int32, device=ids.device)
    values, resources = (("BINS", bins), ("TILE", tuning.CHUNK_TILE)), (("num_warps", warps),)
    more = (("BLOCK", block_size), *values, ("ROWS", max(tuning.CHUNK_CELLS // bins, 1)))
    count = gpu.kept(gpu.kernels(__package__).count_kernel, values, resources, gpu.aligned(ids))
    place = gpu.kept(gpu.kernels(__package__).place_kernel, more, resources, gpu.aligned(ids))
    count(chunks, ids, counts, num_pairs, num_experts, chunk)
    place(chunks, ids, counts, *out, num_pairs, num_experts, bound, chunk, chunks)


def prepare(expert_ids: Tensor, num_experts: int, block_size: int | None = None) -> Prepared | str:
    """The call on a GPU, or the reason why there is none."""
    reason = why_unsupported(expert_ids, num_experts)
    return reason or Prepared("triton", group_by_expert if block_size is None else block_schedule)


def why_unsupported(expert_ids: Tensor, num_experts: int) -> str | None:
    """Why these ids cannot be ordered on a GPU; None if they can."""
    reason = gpu.unreadable(expert_ids) or tuning.too_many(num_experts, tuning.MOST_EXPERTS)
    if reason is not None:
        return reason
    looks = expert_ids.numel() * num_experts
    if looks > tuning.MOST_LOOKS:
        return f"every expert's program looks at every slot, at most {tuning.MOST_LOOKS} in all, and here are {looks}"
    return None


def group_by_expert(expert_ids: Tensor, num_experts: int) -> Grouping:
    """Order (token, slot) pairs by expert; see `moestro.group_by_expert`."""
    ids = expert_ids.contiguous()
    num_pairs = ids.numel()
    sizes = (num_pairs, num_pairs, num_experts + 1, num_pairs)
    found = Grouping(*(torch.empty(size, dtype=torch.int64, device=ids.device) for size in sizes))
    out = (found.token_ids, found.slots, found.offsets, found.inverse)
    launch = _launch("order_kernel", ids, num_experts)
    with gpu.on(ids):
        launch(num_experts + 1, ids, *out, ids.shape[1], num_pairs, num_experts)
    return found


def block_schedule(expert_ids: Tensor, num_experts: int, block_size: int) -> BlockSchedule:
    """Lay the pairs into blocks of one expert each; see `moestro.block_schedule`."""
    ids = expert_ids.contiguous()
    num_blocks = block_bound(ids.numel(), num_experts, block_size)
    sizes = ((num_blocks,), (num_blocks, block_size), tuple(ids.shape), (num_experts,))
    found = BlockSchedule(*(torch.empty(size, dtype=torch.int64, device=ids.device) for size in sizes))
    out = (found.block_experts, found.pair_ids, found.scatter_index, found.counts)
    launch = _launch("schedule_kernel", ids, num_experts)
    with gpu.on(ids):
        launch(num_experts + 1, ids, *out, ids.numel(), num_experts, num_blocks, block_size)
    return found


def _launch(name: str, ids: Tensor, num_experts: int, more: gpu.Values = ()) -> gpu.Launch:
    """The kernel of this name for as many ids and experts; what it writes lies at multiples of 16 bytes."""
    bins, tile, warps = tuning.launch(ids.numel(), num_experts)
    values = (*more, ("BINS", bins), ("TILE", tile))
    return gpu.kept(getattr(gpu.kernels(__package__), name), values, (("num_warps", warps),), gpu.aligned(ids))
