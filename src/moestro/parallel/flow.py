"""The flow of a mesh of rows and columns: tokens along rows, hidden states cut along columns, experts on every rank.

A row's ranks gather the hidden states of its tokens, and route them. Each column carries its tokens to the rows that
hold their experts in that column, where each token's experts are added up, and one result for each (token, rank) back
to the token's place. The sums of all columns are reduce-scattered along the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moestro.errors import invalid_input, unsupported
from moestro.experts import Experts
from moestro.moe import Dispatcher, MoE
from moestro.ops.grouping import group_by_expert
from moestro.ops.inputs import no_rows, no_tensor
from moestro.parallel.dispatchers import AllToAllDispatcher, Place, wide
from moestro.parallel.exchange import gather_rows
from moestro.parallel.guard import DEFAULT_TIMEOUT, Peers
from moestro.parallel.parallelize import describe, describe_shared
from moestro.parallel.placement import Placement
from moestro.parallel.same_tokens import routing_digest, scatter_same
from moestro.parallel.shard import take_experts
from moestro.parallel.shared_slice import SharedSlice
from moestro.types import EMPTY, Routing

OPERATION = "MeshFlow"
ROWS, COLUMNS = "rows", "columns"


@dataclass(frozen=True)
class FlowMetadata:
    """What a rank has to compute, packed by expert, and where each of it belongs.

    Attributes:
        x: rows of tokens in the order of the rank's experts, [P, H].
        expert_offsets, token_counts: where the block of each of its experts begins in x, and its rows, [E_local].
        sources: the row of the mesh that each came from, [P].
        positions: its place among the tokens of that row, [P].
        routing_weights: [P].
    """

    x: Tensor
    expert_offsets: Tensor
    token_counts: Tensor
    sources: Tensor
    positions: Tensor
    routing_weights: Tensor


@dataclass(frozen=True)
class ColumnDispatcher(Dispatcher):
    """Brings tokens that all columns of a row have to the rows whose ranks in this column hold their experts.

    Attributes:
        inner: over the ranks of this column, for the experts of the column.
        placement: over all ranks of the mesh, row by row.
        column, columns: this one, and how many there are.
        row: this rank's.
    """

    inner: AllToAllDispatcher
    placement: Placement
    column: int
    columns: int
    row: int

    def own(self, routing: Routing) -> Routing:
        """The pairs that this column computes, by its own ids: those of its experts, rising."""
        ids = routing.expert_ids
        ranks, _ = self.placement.locate(ids, self.row)
        table = self._table.to(ids.device)
        mine = (ranks >= 0) & (ranks % self.columns == self.column)
        return routing.with_ids(torch.where(mine, table[ids.clamp(min=0).long()], EMPTY).to(ids.dtype))

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing, Any]:
        """x [T, H] of this row -> rows of all ranks of the column, and their local routing."""
        return self.inner.dispatch(x, self.own(routing))

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        """Outputs of the rows computed here -> [T, H]: what this column adds to the tokens of this row."""
        return self.inner.combine(y, handle)

    @property
    def _table(self) -> Tensor:
        """The column's id of each expert, [E]."""
        held = column_experts(self.placement, self.column, self.columns)
        table = torch.full((self.placement.num_experts,), EMPTY)
        table[list(held)] = torch.arange(len(held))
        return table


def column_experts(placement: Placement, column: int, columns: int) -> tuple[int, ...]:
    """The experts that ranks of a column hold, rising."""
    return tuple(sorted({expert for row in placement.experts[column::columns] for expert in row}))


class MeshFlow(nn.Module):
    """A layer over a mesh of rows and columns; `MeshFlow.of` makes it.

    Attributes:
        layer: the router, whole; the experts of this rank; of shared experts the slice of this column.
        columns: the ranks of this row.
        name: the layer's, for errors.
    """

    def __init__(self, layer: MoE, columns: Peers, name: str = "") -> None:
        super().__init__()
        self.layer, self.columns, self.name = layer, columns, name
        columns.join(self._dispatcher.inner.place.peers)

    @classmethod
    def of(
        cls,
        layer: MoE,
        mesh: DeviceMesh,
        placement: Placement | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        name: str = "",
    ) -> MeshFlow:
        """Cut a layer's experts over all ranks of a mesh; collective. The layer itself stays as it is.

        Args:
            layer: on one device; all ranks pass the same weights.
            mesh: with the dimensions "rows" and "columns": ``init_device_mesh("cpu", (2, 4), mesh_dim_names=("rows",
                "columns"))``.
            placement: over all ranks, row by row; contiguous ranges if None.
            timeout: seconds that a collective may take.
            name: the layer's, for errors.

        Raises:
            InvalidInputError: another mesh, a layer with a dispatcher, a hidden size that the columns do not divide, a
                placement of other experts or on other ranks, a rank without experts.
            UnsupportedError: shared experts of another class than `moestro.SharedExperts`.
            CollectiveError: ranks differ in sizes, formats or placement, or one does not come.
        """
        rows, columns = _sizes(mesh)
        experts, ranks = layer.experts, mesh.mesh.tolist()
        placed = Placement.contiguous(experts.num_experts, rows * columns) if placement is None else placement
        fits = (placed.num_experts, placed.num_ranks) == (experts.num_experts, rows * columns) and all(placed.experts)
        if not fits or layer.dispatcher is not None or experts.hidden_size % columns:
            raise invalid_input(
                OPERATION,
                got=f"{experts.num_experts} experts of hidden_size {experts.hidden_size}"
                + (", with a dispatcher," if layer.dispatcher is not None else "")
                + f" on {rows} rows and {columns} columns; {placed.num_experts} placed on {placed.num_ranks} ranks",
                needs="a layer on one device, columns that divide H, at least one expert on each rank of the mesh",
                fix="Use fewer columns or ranks, or place experts with replicas.",
            )
        row, column = mesh.get_local_rank(ROWS), mesh.get_local_rank(COLUMNS)
        everyone = Peers.of([rank for each in ranks for rank in each], timeout)
        said = {**describe(experts.weights), **describe_shared(layer), "placement": placed.experts, "mesh": ranks}
        everyone.agree(said, OPERATION, name)
        along_row = Peers.of(ranks[row], timeout)
        along_column = Peers.of([each[column] for each in ranks], timeout)
        held = column_experts(placed, column, columns)
        by_row = [tuple(held.index(e) for e in placed.experts[r * columns + column]) for r in range(rows)]
        inner = AllToAllDispatcher(Place(Placement(len(held), tuple(by_row)), along_column, name=name))
        dispatcher = ColumnDispatcher(inner, placed, column, columns, row)
        own = take_experts(experts.weights, placed.experts[row * columns + column])
        shared = None if layer.shared_experts is None else SharedSlice.of(layer.shared_experts, column, columns)
        kept = Experts.from_weights(own, experts.strategy)
        given = layer.rewrite, dispatcher, layer.balance
        made = MoE(layer.router, kept, shared, *given).train(layer.training)
        return cls(made, along_row, name)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H / columns] -> the same part of the layer's output. Ranks of a row pass parts of the same tokens.

        Raises:
            InvalidInputError: the last dimension is another.
            CollectiveError: the ranks of a row have other numbers of tokens, or chose other experts.
        """
        y, digest = self._summed(self.layer, self.gather(x))
        size = self.columns.size
        parts = y.to(wide(y.dtype)).view(len(y), size, y.shape[1] // size).transpose(0, 1)
        sums = scatter_same(self.columns, parts, digest, "hidden states", (OPERATION, self.name))
        return sums.to(x.dtype).view(x.shape)

    def gather(self, x: Tensor) -> Tensor:
        """Parts [..., H / columns] -> whole hidden states [T, H]; collective over the row."""
        size, hidden = self.columns.size, self.layer.experts.hidden_size
        if not isinstance(x, Tensor):
            raise no_tensor(OPERATION, "x", x)
        if x.dim() < 1 or x.shape[-1] * size != hidden or not x.is_floating_point():
            raise no_rows(OPERATION, x, hidden // size)
        flat = x.flatten(0, -2) if x.dim() > 1 else x[None]
        self.columns.agree_on_tokens(flat, OPERATION, self.name)
        found = gather_rows(self.columns, flat, "hidden states", self.name)
        return found.view(size, len(flat), hidden // size).transpose(0, 1).reshape(len(flat), hidden)

    def metadata(self, x: Tensor) -> FlowMetadata:
        """What this rank would compute for parts x, packed by expert; collective over the whole mesh.

        `forward` does not ask for it: the primitive groups rows by expert itself, and a token's own rank keeps its
        place, so that positions need not travel. It is for other kernels, and for a look.
        """
        layer, dispatcher, peers = self.layer, self._dispatcher, self._dispatcher.inner.place.peers
        whole = self.gather(x)
        rows, local, handle = dispatcher.dispatch(whole, layer.route(whole))
        received, sent = handle.back
        places = handle.tokens.to(torch.int32)[:, None]
        positions = peers.all_to_all(places, sent, received, "positions", self.name)[:, 0].long()
        sources = torch.arange(peers.size, device=x.device).repeat_interleave(
            torch.tensor(list(received), device=x.device)
        )
        packed = group_by_expert(local.expert_ids, layer.experts.num_experts)
        offsets = packed.offsets.long()
        used = slice(0, int(offsets[-1]))
        row, slot = packed.token_ids[used].long(), packed.slots[used].long()
        return FlowMetadata(
            x=rows[row],
            expert_offsets=offsets[:-1],
            token_counts=offsets.diff(),
            sources=sources[row],
            positions=positions[row],
            routing_weights=local.routing_weights[row, slot],
        )

    def _summed(self, layer: MoE, x: Tensor) -> tuple[Tensor, int | None]:
        """What this column adds, [T, H], and the digest of what it chose, which is to be that of all columns."""
        routing = layer.route(x)
        digest = routing_digest(self.columns, routing.expert_ids)
        rows, local, handle = self._dispatcher.dispatch(x, routing)
        y: Tensor = self._dispatcher.combine(layer.experts(rows, local), handle)
        return (y if layer.shared_experts is None else y + layer.shared_experts(x)), digest

    @property
    def _dispatcher(self) -> ColumnDispatcher:
        found = self.layer.dispatcher
        assert isinstance(found, ColumnDispatcher)
        return found


def _sizes(mesh: DeviceMesh) -> tuple[int, int]:
    if mesh.mesh_dim_names != (ROWS, COLUMNS) or mesh.get_coordinate() is None:
        raise invalid_input(
            OPERATION,
            got=f"a mesh with dimensions {', '.join(mesh.mesh_dim_names or ()) or 'without names'}",
            needs="the dimensions rows and columns, in this order, and this rank in it",
            fix='init_device_mesh("cpu", (2, 4), mesh_dim_names=("rows", "columns")) makes one.',
        )
    if any(sorted(each) != each for each in (*mesh.mesh.tolist(), *mesh.mesh.t().tolist())):
        raise unsupported(
            OPERATION,
            got=f"a mesh of ranks {mesh.mesh.tolist()}",
            needs="ranks that rise along rows and columns: groups of torch.distributed are in that order",
            fix="Number the ranks row by row.",
        )
    return mesh.size(0), mesh.size(1)
