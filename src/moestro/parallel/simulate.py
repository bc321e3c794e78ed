"""Run a routing over a mesh that is not there: what every rank computes, what every link carries, how long it takes.

The flow is that of a mesh of (rows, columns). A row's tokens are gathered over its columns. Each column then carries
its tokens to the rows that hold their experts, and one result for each (token, rank) back. The results are
reduce-scattered over the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro.errors import invalid_input
from moestro.parallel.placement import Placement
from moestro.parallel.simulate_costs import ComputeCost, DispatchCost
from moestro.parallel.simulate_links import Ints, Mesh, traffic, traffic_to_all

Dispatch = Literal["dense", "unicast", "sparse"]


@dataclass(frozen=True)
class Simulation:
    """What one batch does on a mesh with one placement and one dispatch.

    Attributes:
        pairs: (token, expert) pairs that each rank computes, [ranks].
        buffer_rows: rows that each rank holds of its own and others' tokens, [ranks].
        sent_rows: (token, rank) that are not on the token's own rank; as many rows come back.
        dispatch_bytes, combine_bytes: that each link carries, [columns, rows, 2]: to the next row and to the one
            before; on a switch out of the rank and into it.
        column_bytes: that a link between columns carries for the all-gather; as many for the reduce-scatter.
        mean_hops, max_hops: of a (token, rank); one that stays has none.
        compute_microseconds: of each rank, [ranks].
        dispatch_microseconds, combine_microseconds, columns_microseconds: the busiest link's bytes over its rate, and
            the hops; the third is for both collectives over the columns.
        published_microseconds: of a multicast dispatch by `DispatchCost`; None for other dispatches and for a switch.
    """

    pairs: Ints
    buffer_rows: Ints
    sent_rows: int
    dispatch_bytes: Ints
    combine_bytes: Ints
    column_bytes: int
    mean_hops: float
    max_hops: int
    compute_microseconds: NDArray[np.float64]
    dispatch_microseconds: float
    combine_microseconds: float
    columns_microseconds: float
    published_microseconds: float | None

    @property
    def imbalance(self) -> float:
        """The most pairs of a rank over the mean; 1.0 without any."""
        mean = float(self.pairs.mean())
        return float(self.pairs.max()) / mean if mean else 1.0

    @property
    def makespan(self) -> float:
        """Microseconds of the rank that computes longest."""
        return float(self.compute_microseconds.max())

    @property
    def total_microseconds(self) -> float:
        """Collectives over columns, dispatch, the slowest rank's experts, combine, one after the other."""
        moved = self.columns_microseconds + self.dispatch_microseconds + self.combine_microseconds
        return moved + self.makespan


def simulate(
    expert_ids: Tensor,
    mesh: Mesh,
    placement: Placement,
    row_bytes: int = 2 * 7168,
    dispatch: Dispatch = "dense",
    compute: ComputeCost = ComputeCost(),  # noqa: B008 (frozen)
) -> Simulation:
    """Run a routing over a mesh.

    Args:
        expert_ids: integer [T, K], T >= 1; -1 is an empty slot. Token t begins on row ``t * rows // T``.
        mesh: rows, columns and links.
        placement: over as many ranks as the mesh has.
        row_bytes: of one token's row. Ids and weights that travel with it are not counted.
        dispatch: "dense" sends a token once to each rank that holds one of its experts, along the links in both
            directions, and every rank on the way passes it on; "unicast" sends a row to each such rank from the
            token's own; "sparse" sends buffers of a fixed size: every token to every row. What comes back is one row
            for each (token, rank); for "sparse" every row, added up on the way.
        compute: of a rank's experts.

    Raises:
        InvalidInputError: ids that are no [T, K] or lie outside the placement's experts, another number of ranks, or
            another dispatch.
    """
    _check(expert_ids, mesh, placement, dispatch)
    num_tokens = len(expert_ids)
    home = np.arange(num_tokens) * mesh.rows // num_tokens
    numbers = np.arange(num_tokens) - np.searchsorted(home, home) + home  # as its rank's dispatcher counts them
    ranks, local = (table.numpy() for table in placement.locate(expert_ids.cpu(), torch.from_numpy(numbers)))
    sends = _sends(ranks, mesh.num_ranks)
    width, used = max(map(len, placement.experts)), ranks >= 0
    counts = np.bincount(ranks[used] * width + local[used], minlength=mesh.num_ranks * width).reshape(-1, width)
    sparse = dispatch == "sparse"
    rows = traffic_to_all(home, mesh) if sparse else traffic(home, sends, mesh, multicast=dispatch == "dense")
    out, back = (halves * row_bytes // 2 for halves in (rows.out, rows.back))
    ring = mesh.links == "ring"
    gathered = int(np.bincount(home).max()) * row_bytes * (mesh.columns - 1) // mesh.columns
    across = -(-gathered // 2) if ring else gathered  # a ring of columns is filled from both sides
    return Simulation(
        pairs=counts.sum(1),
        buffer_rows=rows.held,
        sent_rows=rows.sent,
        dispatch_bytes=out,
        combine_bytes=back,
        column_bytes=across,
        mean_hops=rows.mean_hops,
        max_hops=rows.max_hops,
        compute_microseconds=compute.microseconds(counts),
        dispatch_microseconds=_microseconds(mesh, int(out.max()), rows.max_hops),
        combine_microseconds=_microseconds(mesh, int(back.max()), rows.max_hops),
        columns_microseconds=2 * _microseconds(mesh, across, mesh.columns // 2 if ring else mesh.columns - 1),
        published_microseconds=_published(mesh, sends, rows.mean_hops) if dispatch == "dense" else None,
    )


def _sends(ranks: Ints, num_ranks: int) -> tuple[Ints, Ints]:
    """Token and rank of every row that travels: each token once to each of its ranks, [T, K] -> two of [sends]."""
    rising = np.sort(ranks, axis=1)
    first = np.ones(rising.shape, bool)
    first[:, 1:] = rising[:, 1:] != rising[:, :-1]
    token, slot = np.nonzero(first & (rising >= 0))
    return token, rising[token, slot]


def _microseconds(mesh: Mesh, busiest: int, hops: int) -> float:
    return (busiest / mesh.bytes_per_second + hops * mesh.hop_seconds) * 1e6


def _published(mesh: Mesh, sends: tuple[Ints, Ints], mean_hops: float) -> float | None:
    """By `DispatchCost`, for the token with the most rows in one column."""
    if mesh.links == "switch" or not len(sends[0]):
        return None
    most = int(np.bincount(sends[0] * mesh.columns + sends[1] % mesh.columns).max())
    return DispatchCost().at(most, mean_hops, mesh.distances())


def _check(expert_ids: Tensor, mesh: Mesh, placement: Placement, dispatch: str) -> None:
    if placement.num_ranks != mesh.num_ranks or dispatch not in get_args(Dispatch):
        raise invalid_input(
            "simulate",
            got=f"a placement on {placement.num_ranks} ranks, a mesh of {mesh.num_ranks}, dispatch={dispatch!r}",
            needs="as many ranks, and one of dense, unicast, sparse",
            fix="Placement.contiguous(num_experts, mesh.num_ranks) is the plain one.",
        )
    fits = expert_ids.dim() == 2 and len(expert_ids) > 0 and expert_ids.dtype in (torch.int32, torch.int64)
    if not fits or int(expert_ids.min()) < -1 or int(expert_ids.max()) >= placement.num_experts:
        raise invalid_input(
            "simulate",
            got=f"expert_ids {list(expert_ids.shape)} of {expert_ids.dtype}" + (", some outside" if fits else ""),
            needs=f"int32 or int64 [num_tokens, top_k] of at least one token, ids in -1..{placement.num_experts - 1}",
            fix="A Routing's expert_ids are one.",
        )
