"""grouping: bring tokens into expert order, as rows or as a schedule of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moestro import settings
from moestro.errors import invalid_input
from moestro.ops import dispatch, gpu
from moestro.ops.grouping import cpu, plain, triton
from moestro.ops.grouping.checks import check_form, check_range
from moestro.ops.grouping.plain import block_bound
from moestro.ops.grouping.records import BlockSchedule, Grouping, LoadReport, PaddingReport
from moestro.ops.grouping.tuning import choose_block_size, largest_first, makespan
from moestro.ops.tensors import call_key
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
    check_form("group_by_expert", expert_ids, num_experts)
    check_range("group_by_expert", expert_ids, num_experts)
    return run(expert_ids, num_experts)


def run(expert_ids: Tensor, num_experts: int) -> Grouping:
    """`group_by_expert` below the public edge: an id outside 0..E-1 is an empty slot."""
    grouping: Grouping = dispatch.run(GROUPING, expert_ids, num_experts)
    return grouping


def block_schedule(expert_ids: Tensor, num_experts: int, block_size: int) -> BlockSchedule:
    """Lay the pairs into ceil(T * K / B) + E - 1 blocks, one expert a block, padded with -1.

    The shapes depend on T, K, E and B only. Traced, it is one-hot, cumsum and compare alone, without control flow on
    data, so it passes torch.compile(fullgraph=True) and torch.export with dynamic T; where the native engine or a GPU's
    kernel runs the grouping, it lays out the blocks too.

    Args:
        expert_ids: integer [T, K], -1 for empty slots.
        num_experts: E >= 1.
        block_size: B >= 1.

    Raises:
        InvalidInputError: as for `group_by_expert`, or block_size < 1, or more cells than int32 can index.
    """
    check_form("block_schedule", expert_ids, num_experts)
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
    check_range("block_schedule", expert_ids, num_experts)
    return run_blocks(expert_ids, num_experts, block_size)


def run_blocks(expert_ids: Tensor, num_experts: int, block_size: int) -> BlockSchedule:
    """`block_schedule` below the public edge: an id outside 0..E-1 is an empty slot."""
    schedule: BlockSchedule = dispatch.run(GROUPING, expert_ids, num_experts, block_size)
    return schedule


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


def _look(expert_ids: Tensor, num_experts: int, block_size: int | None = None) -> dispatch.Looked | None:
    tensors = call_key(expert_ids)
    if tensors is None:
        return None
    aligned = expert_ids.is_cpu or gpu.alignment(expert_ids)
    forced = settings.current().implementation
    return ("grouping", forced, torch.get_num_threads(), num_experts, block_size, aligned, tensors), ()


GROUPING = dispatch.register(
    dispatch.Operation(
        "grouping",
        (
            dispatch.Implementation("cpu-native", cpu.prepare),
            dispatch.Implementation("triton", triton.prepare),
            dispatch.Implementation("torch", plain.prepare),
        ),
        look=_look,
    )
)
"""Rows in the order of experts or, where a block size is given, blocks of one expert each."""
