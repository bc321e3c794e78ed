"""Rewrites: functions from routing to routing. A dropped slot gets the id -1; nobody downstream needs to know why.

A routing is [T, K]. All are differentiable in routing_weights and, unless said otherwise, free of control flow on data.
None renormalises on its own: `rescale` does that where it is wanted.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from moestro.errors import invalid_input, several_devices
from moestro.ops import grouping
from moestro.ops.grouping.checks import check_ids
from moestro.routing.reports import DropReport
from moestro.types import EMPTY, Routing


def expert_counts(routing: Routing, num_experts: int) -> Tensor:
    """Rows of each expert, int64 [E]; empty slots and ids outside 0..E-1 do not count."""
    ids = routing.expert_ids.reshape(-1)
    inside = (ids >= 0) & (ids < num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(0, torch.where(inside, ids, num_experts).long(), inside.long())[:num_experts]


def token_weight(routing: Routing) -> Tensor:
    """The sum of the weights of each token's used slots, [T]."""
    return routing.routing_weights.masked_fill(routing.expert_ids < 0, 0.0).sum(-1)


def rescale(routing: Routing, total: float | Tensor = 1.0) -> Routing:
    """Scale each token's weights so that those of its used slots sum to `total`; a sum of zero stays zero.

    Args:
        total: one value, or [T]: `token_weight` of the routing before a rewrite restores what the rewrite took.
    """
    weights = routing.routing_weights.masked_fill(routing.expert_ids < 0, 0.0)
    now = weights.sum(-1, keepdim=True)
    goal = total.unsqueeze(-1) if isinstance(total, Tensor) else total
    return replace(routing, routing_weights=weights * (goal / now.masked_fill(now == 0, 1.0)))


def scale_experts(routing: Routing, scale: Tensor) -> Routing:
    """Multiply each weight by its expert's factor (Gemma 4's per-expert scale).

    Args:
        scale: [E].

    Raises:
        InvalidInputError: scale is not one-dimensional floating point.
    """
    if scale.dim() != 1 or not scale.is_floating_point():
        raise invalid_input(
            "scale_experts",
            got=f"scale {list(scale.shape)} of {scale.dtype}",
            needs="floating-point [num_experts]",
            fix="Use scale.expand(num_experts) for one factor.",
        )
    weights = routing.routing_weights
    return replace(routing, routing_weights=weights * _look_up(scale.to(weights.dtype), routing.expert_ids))


def remap(routing: Routing, mapping: Tensor) -> Routing:
    """Rename experts: id e becomes mapping[e]; a mapping of -1 empties the slot.

    Two experts may get one name: a token that uses both then counts the one with the sum of both weights.

    Args:
        mapping: integer [E], on the same device.

    Raises:
        InvalidInputError: mapping is not integer [E].
    """
    if mapping.dim() != 1 or mapping.dtype not in (torch.int32, torch.int64):
        raise invalid_input(
            "remap",
            got=f"mapping {list(mapping.shape)} of {mapping.dtype}",
            needs="int32 or int64 [num_experts]",
            fix="merge_experts returns one.",
        )
    ids = routing.expert_ids
    renamed = _look_up(mapping.to(ids.dtype), ids)
    return routing.with_ids(renamed.masked_fill(ids < 0, EMPTY))


def _look_up(table: Tensor, ids: Tensor) -> Tensor:
    """table[ids], with entry 0 for empty slots; the table has to lie beside the ids and have an entry for each."""
    if table.device != ids.device:
        raise several_devices("rewrite", table=table.device, expert_ids=ids.device)
    if not torch.compiler.is_compiling() and ids.device.type == "cpu" and ids.numel() and int(ids.max()) >= len(table):
        raise invalid_input(
            "rewrite",
            got=f"an id of {int(ids.max())} and a table of {len(table)} experts",
            needs="an entry for every expert that is routed to",
            fix="Build the table with the router's num_experts.",
        )
    return table[ids.clamp(min=0).long()]


def prune_experts(routing: Routing, keep: Tensor) -> Routing:
    """Empty every slot whose expert is not kept.

    Args:
        keep: bool [E]; `most_used` makes one from counts.

    Raises:
        InvalidInputError: keep is not bool [E], or (on the CPU) keeps no expert.
    """
    if keep.dim() != 1 or keep.dtype != torch.bool:
        raise invalid_input(
            "prune_experts",
            got=f"keep {list(keep.shape)} of {keep.dtype}",
            needs="bool [num_experts]",
            fix="See most_used.",
        )
    if not torch.compiler.is_compiling() and keep.device.type == "cpu" and not keep.any():
        raise invalid_input(
            "prune_experts", got="a mask that keeps no expert", needs="at least one True", fix="True means keep."
        )
    ids = routing.expert_ids
    return routing.with_ids(ids.masked_fill(~_look_up(keep, ids), EMPTY))


def most_used(counts: Tensor, num_kept: int) -> Tensor:
    """Bool [E]: the num_kept experts with the largest counts [E]; of equal counts the smaller id is kept.

    Raises:
        InvalidInputError: num_kept is not in 1..E.
    """
    if counts.dim() != 1 or not 1 <= num_kept <= len(counts):
        raise invalid_input(
            "most_used",
            got=f"num_kept={num_kept} and counts {list(counts.shape)}",
            needs="counts [num_experts] and 1 <= num_kept <= num_experts",
            fix="Sum expert_counts over a calibration set.",
        )
    kept = counts.sort(descending=True, stable=True).indices[:num_kept]
    return torch.zeros_like(counts, dtype=torch.bool).scatter(0, kept, True)


def keep_local(routing: Routing, first: int, count: int) -> Routing:
    """What one of several ranks computes: ids in first..first+count-1 become 0..count-1, all others -1.

    The outputs of all ranks add up to the whole layer's.

    Raises:
        InvalidInputError: first or count is negative.
    """
    if first < 0 or count < 0:
        raise invalid_input(
            "keep_local", got=f"first={first}, count={count}", needs="both at least 0", fix="Ranks hold ranges of ids."
        )
    local = routing.expert_ids - first
    return routing.with_ids(torch.where((local >= 0) & (local < count), local, EMPTY))


def keep_confident(routing: Routing, min_share: float = 0.0, mass: float = 1.0) -> Routing:
    """Adaptive top-k: drop the slots that a token could do without. Its best slot always stays.

    Weights count by magnitude. The defaults drop nothing.

    Args:
        min_share: drop slots below this share of the token's best weight, 0..1.
        mass: keep, from the best down, only as many slots as are needed to reach this share of the token's summed
            weight, above 0 and at most 1.

    Raises:
        InvalidInputError: a share is out of range.
    """
    if not (0 <= min_share <= 1 and 0 < mass <= 1):
        raise invalid_input(
            "keep_confident",
            got=f"min_share={min_share}, mass={mass}",
            needs="0 <= min_share <= 1 and 0 < mass <= 1",
            fix="min_share=0.1 drops slots ten times weaker than the best; mass=0.9 drops the last tenth.",
        )
    weights = routing.routing_weights.detach().abs().masked_fill(routing.expert_ids < 0, 0.0)
    falling, order = weights.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(falling, dtype=torch.bool)
    if min_share > 0.0:
        keep &= falling >= min_share * falling[:, :1]
    if mass < 1.0:
        keep &= falling.cumsum(-1) - falling < mass * falling.sum(-1, keepdim=True)
    rank = torch.arange(routing.top_k, device=keep.device)
    keep = torch.zeros_like(keep).scatter(-1, order, keep | (rank == 0))
    return routing.with_ids(routing.expert_ids.masked_fill(~keep, EMPTY))


def drop_over_capacity(routing: Routing, num_experts: int, capacity_factor: float) -> tuple[Routing, DropReport]:
    """Give each expert at most ceil(capacity_factor * T * K / E) rows and empty the slots of the others.

    Who keeps a place is fixed: all first slots in order of token, then all second slots, and so on (the priority of
    Switch Transformer and GShard). Not calling this function is dropless routing. T, K and E alone decide the
    capacity; capacity_factor is read as the decimal number it prints as, so that 1.1 * 10 is 11.

    Args:
        num_experts: E.
        capacity_factor: above 0; 1.0 is what balanced routing needs.

    Returns:
        The routing, and what was dropped.

    Raises:
        InvalidInputError: capacity_factor is not a finite number above 0, or an id is out of range.
    """
    if not 0 < capacity_factor < float("inf"):
        raise invalid_input(
            "drop_over_capacity",
            got=f"capacity_factor={capacity_factor}",
            needs="a finite factor above 0",
            fix="1.0 fits balanced routing, 1.25 leaves slack; without this call nothing is dropped.",
        )
    ids = routing.expert_ids
    factor = Fraction(repr(float(capacity_factor)))
    pairs = routing.num_tokens * routing.top_k
    check_ids("drop_over_capacity", ids, num_experts)
    capacity = -(-factor.numerator * pairs // (factor.denominator * num_experts))
    by_slot = ids.T.contiguous()
    order = grouping.run(by_slot, num_experts)
    place = order.inverse.reshape(by_slot.shape) - _look_up(order.offsets, by_slot)
    dropped = ((by_slot != EMPTY) & (place >= capacity)).T
    rewritten = routing.with_ids(ids.masked_fill(dropped, EMPTY))
    routed = order.offsets.diff()
    return rewritten, DropReport((routed - capacity).clamp(min=0), routed, capacity)
