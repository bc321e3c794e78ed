"""What grouping returns, and what can be read off it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.types import EMPTY, register_pytree


@dataclass(frozen=True, eq=False)
class Grouping:
    """(token, slot) pairs in expert order. R = T * K; the rows of empty slots stand last.

    Attributes:
        token_ids: [R], the token of each row.
        slots: [R], its slot.
        offsets: [E + 1]; rows offsets[e] to offsets[e + 1] belong to expert e, rows from offsets[E] on to nobody.
        inverse: [R]; pair t * K + k stands at row inverse[t * K + k].
    """

    token_ids: Tensor
    slots: Tensor
    offsets: Tensor
    inverse: Tensor

    @property
    def counts(self) -> Tensor:
        """[E], rows of each expert."""
        return self.offsets[1:] - self.offsets[:-1]


@dataclass(frozen=True, eq=False)
class BlockSchedule:
    """Rows laid into G blocks of B cells; each block belongs to one expert, unused cells are -1.

    Attributes:
        block_experts: [G], the expert of each block, -1 for blocks nobody needs (they stand last).
        pair_ids: [G, B], the pair t * K + k in each cell, or -1.
        scatter_index: [T, K], the cell (block * B + place) of each pair, or -1 for an empty slot.
        counts: [E], rows of each expert.
    """

    block_experts: Tensor
    pair_ids: Tensor
    scatter_index: Tensor
    counts: Tensor

    @property
    def num_blocks(self) -> int:
        return self.pair_ids.shape[0]

    @property
    def block_size(self) -> int:
        return self.pair_ids.shape[1]

    @property
    def token_ids(self) -> Tensor:
        """[G, B], the token in each cell, or -1."""
        top_k = max(self.scatter_index.shape[1], 1)
        return torch.where(self.pair_ids < 0, EMPTY, self.pair_ids // top_k)


@dataclass(frozen=True)
class PaddingReport:
    """How much of a block schedule is padding.

    Attributes:
        rows: pairs to compute.
        needed_blocks, provisioned_blocks: blocks with a row in them; blocks laid out.
        provisioned_overhead: cells laid out over cells of needed blocks, minus 1.
        algorithmic_overhead: cells of needed blocks over rows, minus 1.
    """

    rows: int
    needed_blocks: int
    provisioned_blocks: int
    provisioned_overhead: float
    algorithmic_overhead: float

    def __str__(self) -> str:
        return (
            f"{self.rows} rows in {self.needed_blocks} blocks ({self.algorithmic_overhead:.1%} padding), "
            f"{self.provisioned_blocks} provisioned ({self.provisioned_overhead:.1%} more)"
        )


@dataclass(frozen=True)
class LoadReport:
    """What a walk over the blocks loads when it skips what it can.

    Attributes:
        weight_loads: expert weights read: consecutive blocks of one expert read them once.
        weight_loads_saved: needed blocks minus weight_loads.
        row_loads, row_loads_saved: rows read; padded cells not read.
        blocks_skipped: blocks without a row, which cost nothing.
    """

    weight_loads: int
    weight_loads_saved: int
    row_loads: int
    row_loads_saved: int
    blocks_skipped: int

    def __str__(self) -> str:
        return (
            f"{self.weight_loads} weight loads ({self.weight_loads_saved} saved), {self.row_loads} rows read "
            f"({self.row_loads_saved} padded rows not), {self.blocks_skipped} empty blocks skipped"
        )


register_pytree(Grouping)
register_pytree(BlockSchedule)
