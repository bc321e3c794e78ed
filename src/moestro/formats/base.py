"""What every weight format says of itself, and weights stored in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.types import unchecked


@dataclass(frozen=True)
class Scaling:
    """Which weights share a scale, and how scales are stored.

    Attributes:
        rows, columns: weights of a block that share one scale; 0 for all rows, or all columns, of a matrix.
        dtypes: the scale dtypes that are read; the first is the one that `quantize` writes.
        zeros: whether each block also has a zero point (uint8).
        global_scales: whether each matrix also has a float32 factor for all of its scales.
    """

    rows: int
    columns: int
    dtypes: tuple[torch.dtype, ...]
    zeros: bool = False
    global_scales: bool = False

    def blocks(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Blocks down and across a matrix of this size; the last of either may be cut off."""
        down = -(-num_rows // self.rows) if self.rows else 1
        across = -(-num_columns // self.columns) if self.columns else 1
        return down, across


@dataclass(frozen=True)
class WeightFormat:
    """A stored number system.

    Attributes:
        name: what users write ("bfloat16", "mxfp4").
        element: the encoding of one weight ("bfloat16", "e4m3", "e2m1", "int8", "int4", "uint4").
        bits: bits per stored weight, scales included (scales of whole rows or matrices, a vanishing part, are not).
        storage: dtype of the tensor that holds the data.
        per_item: weights in one item of the data.
        scaling: which weights share a scale; None where a weight is its own value.
    """

    name: str
    element: str
    bits: float
    storage: torch.dtype
    per_item: int = 1
    scaling: Scaling | None = None

    @property
    def is_dense(self) -> bool:
        """Whether the data is an ordinary floating-point tensor."""
        return self.scaling is None

    @property
    def row_unit(self) -> int:
        """What the length of a row is a multiple of: groups, and bytes, are not cut off."""
        group = self.scaling.columns if self.scaling is not None and self.scaling.rows == 1 else 0
        return group or self.per_item

    def parts(self, shape: Sequence[int]) -> dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]]:
        """The tensors that store weights [N, K] or [E, N, K]: by field of `PackedTensor`, the dtypes and the shape.

        Of several dtypes, which are those that are read, the first is the one that `quantize` writes.
        """
        *lead, n, k = shape
        found: dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]] = {}
        found["data"] = ((self.storage,), (*lead, n, k // self.per_item))
        scaling = self.scaling
        if scaling is not None:
            grid = (*lead, *scaling.blocks(n, k))
            found["scales"] = (scaling.dtypes, grid)
            if scaling.zeros:
                found["zeros"] = ((torch.uint8,), grid)
            if scaling.global_scales:
                found["global_scales"] = ((torch.float32,), tuple(lead))
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of `PackedTensor` that the format fills."""
        return tuple(self.parts((0, 0)))


class _Stored:
    """What follows from the shape and the tensors of stored weights."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    @property
    def num_experts(self) -> int:
        """E, of stacked and of unstacked experts."""
        return self.shape[0]

    @property
    def num_columns(self) -> int:
        """K, what a product sums over."""
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes as stored, scales included."""
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True, eq=False)
class PackedTensor(_Stored):
    """Weights as stored: the data, what goes with it, and the format that says how to read both.

    A stack of experts [E, N, K], or one matrix [N, K]; K is the dimension that a product sums over. Sizes below are
    those of a matrix; a stack has E in front of each.

    Attributes:
        data: [N, K / per_item] of the format's storage dtype. Dense formats take any strides; a transposed
            checkpoint is passed as a transposed view.
        format: the `WeightFormat`.
        scales: [blocks down, blocks across], for formats with a scaling.
        zeros: like scales, uint8, for formats with zero points.
        global_scales: one float32 a matrix ([] for a matrix, [E] for a stack), for formats that have it.

    Raises:
        InvalidInputError: the tensors are not of the dtypes and shapes the format says, or the last group of a row
            is cut off. Only blocks of several rows may be.
    """

    data: Tensor
    format: WeightFormat
    scales: Tensor | None = None
    zeros: Tensor | None = None
    global_scales: Tensor | None = None

    def __post_init__(self) -> None:
        if self.data.dim() not in (2, 3) or self.data.dtype != self.format.storage:
            raise invalid_input(
                "PackedTensor",
                got=f"{self.data.dtype} data of shape {list(self.data.shape)} for format {self.format.name}",
                needs=f"{self.format.storage} data of shape [num_experts, rows, columns], or [rows, columns]",
                fix="Stack the experts along dimension 0 and name the format the data is stored in.",
            )
        if self.num_columns % self.format.row_unit:
            raise invalid_input(
                "PackedTensor",
                got=f"rows of {self.num_columns} weights for format {self.format.name}",
                needs=f"rows whose length is a multiple of its group, {self.format.row_unit}",
                fix="Pad the columns with zeros, or name a format whose groups divide them.",
            )
        parts = self.format.parts(self.shape)
        for name in ("scales", "zeros", "global_scales"):
            tensor = getattr(self, name)
            dtypes, shape = parts.get(name, ((), None))
            found = None if tensor is None else tuple(tensor.shape)
            if found == shape and (tensor is None or tensor.dtype in dtypes):
                continue
            got = f"no {name}" if tensor is None else f"{name} {list(tensor.shape)} of {tensor.dtype}"
            needs = f"no {name}" if shape is None else f"{list(shape)} of {' or '.join(map(str, dtypes))}"
            raise invalid_input(
                "PackedTensor",
                got=f"{got} for {self.format.name} data {list(self.data.shape)}",
                needs=needs,
                fix="Pass what the format's page in docs/reference/formats.md lists.",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [E, N, K] or [N, K], whatever the packing."""
        return (*self.data.shape[:-1], self.data.shape[-1] * self.format.per_item)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor it is made of: data, scales, zeros, global_scales."""
        return tuple(getattr(self, name) for name in self.format.names)

    @property
    def device(self) -> torch.device:
        return self.data.device

    def __getitem__(self, expert: int) -> PackedTensor:
        """One expert's matrix of a stack; nothing is copied."""
        parts = {name: getattr(self, name).select(0, expert) for name in self.format.names}
        return unchecked(PackedTensor, format=self.format, **parts)

    def blocks(self, expert: int) -> tuple[PackedTensor, ...]:
        """The matrices that make up one expert's rows, top to bottom: here a single one."""
        return (self[expert],)

    def rows(self, start: int, stop: int) -> PackedTensor:
        """Rows start to stop of a matrix; nothing is copied. `start` is a multiple of the scaling's rows.

        Where `stop` is none either, the last scales are those of blocks that the cut leaves in part.
        """
        scaling = self.format.scaling
        cut = {"data": self.data[start:stop]}
        if scaling is not None and scaling.rows:
            assert start % scaling.rows == 0
            blocks = slice(start // scaling.rows, -(-stop // scaling.rows))
            cut |= {name: getattr(self, name)[blocks] for name in self.format.names if name in ("scales", "zeros")}
        return unchecked(PackedTensor, **{**self.__dict__, **cut})


@dataclass(frozen=True, eq=False)
class SplitTensor(_Stored):
    """Unstacked experts, as checkpoints with one tensor a projection store them.

    Attributes:
        matrices: for each expert, the matrices whose rows, one after the other, are its [N, K]: one for down, gate and
            then up for a gated first projection. All of one format and, over the experts, of the same shapes.

    Raises:
        InvalidInputError: no experts, or matrices that differ in format, shape or device.
    """

    matrices: tuple[tuple[PackedTensor, ...], ...]

    def __post_init__(self) -> None:
        kinds = {tuple((m.format, m.shape, m.device) for m in expert) for expert in self.matrices}
        first = self.matrices[0] if self.matrices else ()
        same = len({(m.format, m.shape[-1], m.device) for m in first}) == 1 and all(m.data.dim() == 2 for m in first)
        if len(kinds) != 1 or not same:
            raise invalid_input(
                "SplitTensor",
                got=f"{len(self.matrices)} experts of {len(kinds)} different kinds of matrices",
                needs="at least one expert, and for each the same matrices: one format, one device, equal widths",
                fix="Read the experts of one layer from one checkpoint.",
            )

    @property
    def format(self) -> WeightFormat:
        return self.matrices[0][0].format

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [E, N, K]."""
        first = self.matrices[0]
        return (len(self.matrices), sum(m.shape[0] for m in first), first[0].shape[1])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor it is made of, expert by expert."""
        return tuple(t for expert in self.matrices for m in expert for t in m.tensors)

    @property
    def device(self) -> torch.device:
        return self.matrices[0][0].device

    def blocks(self, expert: int) -> tuple[PackedTensor, ...]:
        """The matrices that make up one expert's rows, top to bottom."""
        return self.matrices[expert]


StoredExperts = PackedTensor | SplitTensor
"""The weights of E experts in one projection, stacked or unstacked."""
