"""Stored experts as one argument of Triton's kernels; nothing is copied but addresses."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from moestro.formats import SplitTensor, StoredExperts
from moestro.ops import gpu

_SCALES = {torch.uint8: "e8m0", torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3"}

_WIDEST = 16
"""Items: no hint on addresses says more to the compiler."""

_LONGEST = 256
"""Columns: no step has more, one that a search tries neither."""


class Weights(NamedTuple):
    """The experts of a projection as one argument of a kernel; what the format lacks is None.

    Attributes:
        data, scales, zeros, factors: the tensors of `PackedTensor`; nibbles as int16, 8-bit floats as uint8. Of
            unstacked experts, those of the first matrix.
        data_strides, scale_strides, zero_strides: of experts, rows and columns, in items.
        factor_stride: of experts.
        table: int64 [4, E, parts], how far each matrix's data, scales, zeros and factors lie from the first one's, in
            items; None for a stack.
        num_experts: E.
        height: rows of a matrix where an expert has two, one above the other.
        parts: matrices of an expert.
        data_unit, scale_unit: of what all entries for data are multiples, and all for scales and zero points.
        num_rows: N.
        by_rows: whether the items of a row follow one another in memory.
        element: "dense", or that of the format.
        scale: how scales are stored: "none", "float", "e8m0" or "e4m3".
        rows, columns: weights of a block that share a scale; 0 for all.
        converts: whether the processor converts e4m3.
        warpgroups: whether its tensor cores are those of Hopper.
        pairs: whether tiles lie in blocks of rows: every other row of a tile in the same one.
        per_item: columns in an item of data.
        step: of what the row strides of scales and zero points are multiples. Triton asks for 16 only, and loads what a
            thread holds of a row one by one where it knows of no other.
        unit: of what the number of columns is a multiple, 256 at most. Triton knows of 16 only. A mask might then
            change after 16 weights, which for those of four bits allows loads of 8 bytes; these go through the first
            cache.
    """

    data: Any
    scales: Any
    zeros: Any
    factors: Any
    data_strides: Any
    scale_strides: Any
    zero_strides: Any
    factor_stride: Any
    table: Any
    num_experts: Any
    height: Any
    parts: Any
    data_unit: Any
    scale_unit: Any
    num_rows: Any
    by_rows: Any
    element: Any
    scale: Any
    rows: Any
    columns: Any
    converts: Any
    warpgroups: Any
    pairs: Any
    per_item: Any
    step: Any
    unit: Any


def describe(stored: StoredExperts) -> Weights:
    """What a kernel takes for experts [E, N, K] that the engine reads. Nothing is copied but addresses."""
    form = stored.format
    first = stored.matrices[0][0] if isinstance(stored, SplitTensor) else stored
    scales, factors = first.scales, first.global_scales
    scaling, capability = form.scaling, gpu.device_of(first.data).capability
    data = first.data.view(torch.int16) if form.per_item == 2 else _bytes(first.data)
    table, parts = (_table(stored), len(stored.matrices[0])) if isinstance(stored, SplitTensor) else (None, 1)
    return Weights(
        data=data,
        scales=None if scales is None else _bytes(scales),
        zeros=first.zeros,
        factors=factors,
        data_strides=_strides(data),
        scale_strides=None if scales is None else _strides(scales),
        zero_strides=None if first.zeros is None else _strides(first.zeros),
        factor_stride=None if factors is None or table is not None else factors.stride(0),
        table=None if table is None else torch.tensor(table, device=data.device),
        num_experts=stored.shape[0],
        height=stored.shape[1] // parts,
        parts=tl.constexpr(parts),
        data_unit=tl.constexpr(_unit_of([] if table is None else table[:1])),
        scale_unit=tl.constexpr(_unit_of([] if table is None else table[1:3])),
        num_rows=stored.shape[1],
        by_rows=tl.constexpr(data.stride(-1) == 1),
        element=tl.constexpr("dense" if form.is_dense else form.element),
        scale=tl.constexpr("none" if scales is None else _SCALES.get(scales.dtype, "float")),
        rows=tl.constexpr(0 if scaling is None else scaling.rows),
        columns=tl.constexpr(0 if scaling is None else scaling.columns),
        converts=tl.constexpr(capability >= (8, 9)),
        warpgroups=tl.constexpr(capability[0] == 9),
        per_item=tl.constexpr(4 if form.per_item == 2 else 1),
        step=tl.constexpr(_row_unit(scales, first.zeros)),
        unit=tl.constexpr(math.gcd(_LONGEST, stored.num_columns)),
        pairs=tl.constexpr(
            parts == 1 and scaling is not None and scaling.rows > 1 and stored.shape[1] % (2 * scaling.rows) == 0
        ),
    )


def _strides(t: Tensor) -> tuple[int, ...]:
    """Of experts, rows and columns; 0 of experts where there is one matrix."""
    return (0,) * (3 - t.dim()) + t.stride()


def _row_unit(*tensors: Tensor | None) -> int:
    return math.gcd(_WIDEST, *[t.stride(-2) for t in tensors if t is not None])


def _unit_of(entries: list[list[list[int]]]) -> int:
    return math.gcd(_WIDEST, *[n for kind in entries for of in kind for n in of])


def _table(stored: SplitTensor) -> list[list[list[int]]]:
    """`Weights.table` of unstacked experts; 0 for what the format lacks."""
    first = stored.matrices[0][0]

    def far(name: str) -> list[list[int]]:
        base: Tensor | None = getattr(first, name)
        if base is None:
            return [[0] * len(parts) for parts in stored.matrices]
        size = 2 if name == "data" and stored.format.per_item == 2 else base.element_size()
        return [[(getattr(m, name).data_ptr() - base.data_ptr()) // size for m in parts] for parts in stored.matrices]

    return [far(name) for name in ("data", "scales", "zeros", "global_scales")]


def _bytes(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) else t
