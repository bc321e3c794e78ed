"""Grouping on a GPU: one launch (two for many pairs), static shapes, nothing read back."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.ops import gpu
from moestro.ops.dispatch import Prepared
from moestro.ops.grouping import tuning
from moestro.ops.grouping.plain import block_bound
from moestro.ops.grouping.records import BlockSchedule, Grouping

_INT32_MAX = 2**31 - 1
_ALIGNED = 4  # int32 values in 16 bytes: kernels are compiled for pointers that are multiples of 16


@dataclass(frozen=True, eq=False)
class Rows:
    """(token, slot) pairs in expert order and their blocks, as int32 tensors on the device; G is `most_blocks`.

    Attributes:
        pairs: [T * K], t * K + k of every row, in expert order and stable; from offsets[E] on it is undefined.
        offsets: [E + 1]; rows offsets[e] to offsets[e + 1] belong to expert e.
        block_expert: [G], in expert order, -1 for blocks without rows, which stand last.
        block_start: [G], the first row of each block: a block has rows
            block_start[g] to min(block_start[g] + B, offsets[block_expert[g] + 1]).
        num_blocks: [1], how many blocks have rows.
    """

    pairs: Tensor
    offsets: Tensor
    block_expert: Tensor
    block_start: Tensor
    num_blocks: Tensor


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module("moestro.ops.grouping.triton_kernels")


def most_blocks(num_rows: int, num_experts: int, block_size: int) -> int:
    """Blocks that hold rows, at most: min(ceil(R / B) + E - 1, R)."""
    return min(-(-num_rows // block_size) + num_experts - 1, num_rows)


def group_rows(expert_ids: Tensor, num_experts: int, block_size: int) -> Rows:
    """Order the pairs of expert_ids [T, K] by expert and cut each expert's rows into blocks, in one or two launches.

    Ids outside 0..E-1 are empty slots. The order, and so every bit of the result, depends on the ids alone.

    Raises:
        InvalidInputError: 2^31 pairs or more.
    """
    ids = expert_ids.contiguous()
    num_pairs = ids.numel()
    if num_pairs > _INT32_MAX - tuning.MOST_TILE:
        raise invalid_input(
            "group_rows",
            got=f"{num_pairs} (token, slot) pairs",
            needs=f"at most {_INT32_MAX - tuning.MOST_TILE}, which 32-bit kernels can count",
            fix="Run the tokens in chunks.",
        )
    rows = _allocate(sizes(num_pairs, num_experts, block_size), ids.device)
    out = (rows.pairs, rows.offsets, rows.block_expert, rows.block_start, rows.num_blocks)
    with gpu.on(ids):
        launch = rows_launch(ids, num_experts, block_size)
        bound = rows.block_start.shape[0]
        if launch is None:
            in_chunks(ids, out, num_experts, (block_size, bound))
        else:
            launch(num_experts, ids, *out, num_pairs, num_experts, bound)
    return rows


def sizes(num_pairs: int, num_experts: int, block_size: int) -> tuple[int, int, int, int, int]:
    """Of the tensors of `Rows`, in their order."""
    bound = most_blocks(num_pairs, num_experts, block_size)
    return num_pairs, num_experts + 1, bound, bound, 1


def rows_launch(ids: Tensor, num_experts: int, block_size: int) -> gpu.Launch | None:
    """The launch that makes `Rows` of such contiguous ids, of a program for each expert; None where it takes two."""
    if ids.numel() > tuning.MANY_PAIRS and num_experts < tuning.MANY_EXPERTS:
        return None
    return _launch("rows_kernel", ids, num_experts, (("BLOCK", block_size),))


def in_chunks(ids: Tensor, out: Sequence[Tensor], num_experts: int, blocks: tuple[int, int]) -> None:
    """`Rows` in two launches, for so many pairs that not every expert's program should look at all of them.

    Args:
        ids: [T, K], contiguous.
        out: the fields of `Rows`, to write.
        num_experts: E.
        blocks: rows of a block, and blocks.
    """
    block_size, bound = blocks
    num_pairs = ids.numel()
    chunk, chunks, bins, warps = tuning.chunks(num_pairs, num_experts)
    counts = torch.empty(chunks * bins, dtype=torch.int32, device=ids.device)
    values, resources = (("BINS", bins), ("TILE", tuning.CHUNK_TILE)), (("num_warps", warps),)
    more = (("BLOCK", block_size), *values, ("ROWS", max(tuning.CHUNK_CELLS // bins, 1)))
    count = gpu.kept(_kernels().count_kernel, values, resources, gpu.aligned(ids))
    place = gpu.kept(_kernels().place_kernel, more, resources, gpu.aligned(ids))
    count(chunks, ids, counts, num_pairs, num_experts, chunk)
    place(chunks, ids, counts, *out, num_pairs, num_experts, bound, chunk, chunks)


def prepare(expert_ids: Tensor, num_experts: int, block_size: int | None = None) -> Prepared | str:
    """The call on a GPU, or the reason why there is none."""
    reason = why_unsupported(expert_ids, num_experts)
    return reason or Prepared("triton", group_by_expert if block_size is None else block_schedule)


def why_unsupported(expert_ids: Tensor, num_experts: int) -> str | None:
    """Why these ids cannot be ordered on a GPU; None if they can."""
    reason = gpu.unreadable(expert_ids)
    if reason is not None:
        return reason
    if num_experts > tuning.MOST_EXPERTS:
        return f"it orders by at most {tuning.MOST_EXPERTS} experts, not {num_experts}"
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
    return gpu.kept(getattr(_kernels(), name), values, (("num_warps", warps),), gpu.aligned(ids))


def _allocate(sizes: tuple[int, ...], device: torch.device) -> Rows:
    """Tensors of these sizes in one allocation, each at a multiple of 16 bytes."""
    padded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    memory = torch.empty(sum(padded), dtype=torch.int32, device=device)
    parts = memory.split_with_sizes(padded)
    return Rows(*(part[:size] for part, size in zip(parts, sizes, strict=True)))
