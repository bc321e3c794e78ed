"""grouping: bring tokens into expert order, as rows or as a schedule of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.ops import _select
from moestro.ops.grouping import plain
from moestro.ops.grouping.plain import block_bound
from moestro.ops.grouping.records import BlockSchedule, Grouping, LoadReport, PaddingReport
from moestro.ops.grouping.tuning import choose_block_size, largest_first, makespan
from moestro.types import EMPTY

__all__ = [
    "BlockSchedule",
    "Grouping",
    "LoadReport",
    "PaddingReport",
    "block_bound",
    "block_schedule",
    "choose_block_size",
    "group_by_expert",
    "largest_first",
    "load_report",
    "makespan",
    "padding_report",
]

INT32_MAX = 2**31 - 1


def group_by_expert(expert_ids: Tensor, num_experts: int) -> Grouping:
    """Order the (token, slot) pairs by expert; pairs of one expert keep their order (the sort is stable).

    Args:
        expert_ids: integer [T, K], -1 for empty slots, which are placed behind all rows.
        num_experts: E >= 1.

    Returns:
        A `Grouping` of static shape R = T * K. For [[2, 0], [1, 2], [0, 1]] and E = 3: tokens 0 2 1 2 0 1,
        slots 1 0 0 1 0 1, offsets 0 2 4 6, inverse 4 0 2 5 1 3.

    Raises:
        InvalidInputError: wrong shape or dtype, num_experts < 1, or (on the CPU) an id outside -1..E-1.
    """
    check_ids("group_by_expert", expert_ids, num_experts)
    grouping: Grouping = _select.select("grouping", expert_ids, num_experts).call(expert_ids, num_experts)
    return grouping


def block_schedule(expert_ids: Tensor, num_experts: int, block_size: int) -> BlockSchedule:
    """Lay the pairs into ceil(T * K / B) + E - 1 blocks, one expert a block, padded with -1.

    Built from one-hot, cumsum and compare alone: the shapes depend on T, K, E and B only, and no control flow on
    data, so it passes torch.compile(fullgraph=True) and torch.export with dynamic T.

    Args:
        expert_ids: integer [T, K], -1 for empty slots.
        num_experts: E >= 1.
        block_size: B >= 1.

    Raises:
        InvalidInputError: as for `group_by_expert`, or block_size < 1, or more cells than int32 can index.
    """
    check_ids("block_schedule", expert_ids, num_experts)
    if block_size < 1:
        raise invalid_input(
            "block_schedule",
            got=f"block_size={block_size}",
            needs="at least 1",
            fix="choose_block_size picks one from the machine's roof.",
        )
    if not torch.compiler.is_compiling():
        cells = block_bound(expert_ids.numel(), num_experts, block_size) * block_size
        if cells > INT32_MAX:
            raise invalid_input(
                "block_schedule",
                got=f"{cells} cells for {expert_ids.numel()} pairs, {num_experts} experts, blocks of {block_size}",
                needs=f"at most {INT32_MAX}, so that 32-bit kernels can index them",
                fix="Use smaller blocks, or run the tokens in chunks.",
            )
    return plain.block_schedule(expert_ids, num_experts, block_size)


def check_ids(operation: str, expert_ids: Tensor, num_experts: int) -> None:
    """Refuse ids that are not an integer [T, K] in -1..num_experts-1 (the range only where reading is free)."""
    if expert_ids.dim() != 2 or expert_ids.dtype not in (torch.int32, torch.int64) or num_experts < 1:
        raise invalid_input(
            operation,
            got=f"expert_ids {list(expert_ids.shape)} of {expert_ids.dtype}, num_experts={num_experts}",
            needs="int32 or int64 [num_tokens, top_k] and num_experts >= 1",
            fix="Flatten the batch, or use expert_ids.long().",
        )
    if torch.compiler.is_compiling() or expert_ids.device.type != "cpu":
        in_range = ((expert_ids >= EMPTY) & (expert_ids < num_experts)).all()
        torch._assert_async(in_range, f"[{operation}] expert_ids must lie in -1..{num_experts - 1}")
        return
    if expert_ids.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(expert_ids))
    if low < EMPTY or high >= num_experts:
        raise invalid_input(
            operation,
            got=f"expert_ids from {low} to {high}",
            needs=f"ids in -1..{num_experts - 1} (-1 is an empty slot)",
            fix="Check the router's num_experts.",
        )


def padding_report(counts: Sequence[int], block_size: int) -> PaddingReport:
    """Padding of a block schedule for experts with these row counts (a list, or `BlockSchedule.counts.tolist()`).

    1000 tokens, top 2, 8 experts, B = 256: balanced counts give 87.5 % provisioned and 2.4 % algorithmic overhead.

    Raises:
        InvalidInputError: block_size < 1 or no counts.
    """
    if block_size < 1 or not len(counts):
        raise invalid_input(
            "padding_report",
            got=f"block_size={block_size}, {len(counts)} counts",
            needs="block_size >= 1 and one count per expert",
            fix="Pass BlockSchedule.counts.tolist().",
        )
    rows = sum(counts)
    needed = sum(-(-count // block_size) for count in counts)
    provisioned = block_bound(rows, len(counts), block_size)
    return PaddingReport(
        rows=rows,
        needed_blocks=needed,
        provisioned_blocks=provisioned,
        provisioned_overhead=provisioned / needed - 1 if needed else 0.0,
        algorithmic_overhead=needed * block_size / rows - 1 if rows else 0.0,
    )


def load_report(schedule: BlockSchedule) -> LoadReport:
    """What walking the schedule's blocks in order loads, and what skipping saves. Experts 0 0 1 2 2: 3 loads, not 5."""
    experts = [e for e in schedule.block_experts.tolist() if e != EMPTY]
    loads = sum(1 for i, e in enumerate(experts) if i == 0 or experts[i - 1] != e)
    rows = int((schedule.pair_ids >= 0).sum())
    return LoadReport(
        weight_loads=loads,
        weight_loads_saved=len(experts) - loads,
        row_loads=rows,
        row_loads_saved=len(experts) * schedule.block_size - rows,
        blocks_skipped=schedule.num_blocks - len(experts),
    )


_select.register("grouping", [_select.Implementation("torch", lambda ids, n: None, plain.group_by_expert)])
