"""What quantising writes, item by item: tensors that are copied, and projections that change their format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.checkpoint.header import TensorSpec
from moestro.checkpoint.read import Checkpoint
from moestro.checkpoint.sources import ExpertSource
from moestro.formats import PackedTensor, WeightFormat, dequantize, quantize
from moestro.formats.encode import Search

CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Copied:
    """A tensor that stays as it is, byte for byte."""

    spec: TensorSpec

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return (self.spec,)

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensors of the source that it is made of."""
        return (self.spec.name,)

    def pieces(self, checkpoint: Checkpoint, search: Search) -> Iterator[tuple[str, Tensor]]:
        """Names and next bytes of tensors, in order; a few MiB at a time."""
        flat = checkpoint.tensor(self.spec.name).reshape(-1)
        step = CHUNK_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            yield self.spec.name, flat[start : start + step]


@dataclass(frozen=True, eq=False)
class Projection:
    """The experts of one projection, and the format they get: a stack for each part of the format."""

    source: ExpertSource
    format: WeightFormat

    @property
    def kept(self) -> bool:
        """Whether the experts are packed in this very format already, so that no value is rounded again."""
        return not self.format.is_dense and self.source.stored.format == self.format

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(f"{self.source.target}_{p}", *kind) for p, kind in self._parts().items())

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensors of the source that it is made of."""
        return self.source.names

    def _parts(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each part, by its name in a `PackedTensor`, from the shape of the experts alone."""
        stored = self.source.stored
        e, n, k = stored.shape
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        found["data"] = (self.format.storage, (e, n, k // self.format.per_item))
        scaling = self.format.scaling
        if scaling is None:
            return found
        grid = (e, *scaling.blocks(n, k))
        first = stored.blocks(0)[0].scales if self.kept else None
        found["scales"] = (scaling.dtypes[0] if first is None else first.dtype, grid)
        if scaling.zeros:
            found["zeros"] = (torch.uint8, grid)
        if scaling.global_scales:
            found["global_scales"] = (torch.float32, (e,))
        return found

    @property
    def joins(self) -> bool:
        """Whether an expert's blocks of rows, one below the other, are one matrix of their format."""
        *upper, _ = self.source.stored.blocks(0)
        scaling = self.format.scaling
        if not upper or scaling is None:
            return True
        return scaling.rows > 0 and not scaling.global_scales and all(b.shape[0] % scaling.rows == 0 for b in upper)

    def pieces(self, checkpoint: Checkpoint, search: Search) -> Iterator[tuple[str, Tensor]]:
        """Names and next bytes of tensors; an expert at a time, every part of it before the next."""
        parts = self._parts()
        for e in range(self.source.stored.shape[0]):
            expert = self._expert(e, search)
            for part in parts:
                yield f"{self.source.target}_{part}", getattr(expert, part)

    def _expert(self, e: int, search: Search) -> PackedTensor:
        blocks = self.source.stored.blocks(e)
        if self.kept:
            return _joined(blocks)
        matrices = [b.data if b.format.is_dense else dequantize(b) for b in blocks]
        matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        return quantize(matrix, self.format, search, f"{self.source.target}[{e}]")


Item = Copied | Projection


def _joined(blocks: tuple[PackedTensor, ...]) -> PackedTensor:
    """Blocks of rows, one below the other, as one matrix."""
    if len(blocks) == 1:
        return blocks[0]
    columns = ([getattr(b, part) for b in blocks] for part in ("data", "scales", "zeros"))
    data, scales, zeros = (None if found[0] is None else torch.cat(found) for found in columns)
    assert data is not None
    return PackedTensor(data, blocks[0].format, scales, zeros)
