"""Rows rounded to 8 bits on a GPU, as `moestro.reference.round_rows` and `round_rows_e4m3` define it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from moestro.ops.gpu import Launch
from moestro.types import InputFormat

_BLOCK = 1024
_CODES = {"int8": torch.int8, "fp8-e4m3": torch.uint8}


class Rounding:
    """How rows of `size` columns are rounded: codes [R, size] and float32 scales [R, count], `columns` sharing one.

    0 `columns` are all of a row. `launch` has a program for each row.
    """

    def __init__(self, to: InputFormat, size: int, columns: int) -> None:
        self._dtype, self.size = _CODES[to], size
        self.count = -(-size // columns) if columns else 1
        values: dict[str, Any] = {"E4M3": to == "fp8-e4m3", "COLUMNS": columns, "BLOCK": columns or _BLOCK}
        self.launch = Launch(round_rows_kernel, values, {"num_warps": 4})

    def sizes(self, num_rows: int) -> tuple[tuple[int, torch.dtype], ...]:
        """Numbers in codes and scales of so many rows, and their dtypes."""
        return (num_rows * self.size, self._dtype), (num_rows * self.count, torch.float32)


@triton.jit
def round_rows_kernel(
    x, x_stride, codes, scales, K, count, E4M3: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """A row a program: codes [R, K] and scales [R, count]."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    codes += row * K
    scales += row * count
    if COLUMNS == 0:
        largest = tl.zeros((1,), tl.int32)
        for start in tl.range(0, K, BLOCK):
            largest = tl.maximum(largest, _magnitude(_part(x, start, K, BLOCK)))
        scale = _scale(largest, E4M3)
        tl.store(scales + tl.arange(0, 1), scale)
        for start in tl.range(0, K, BLOCK):
            _write(codes, _part(x, start, K, BLOCK), scale, start, K, BLOCK, E4M3)
    else:
        for start in tl.range(0, K, COLUMNS):
            part = _part(x, start, K, BLOCK)
            scale = _scale(_magnitude(part), E4M3)
            tl.store(scales + start // COLUMNS + tl.arange(0, 1), scale)
            _write(codes, part, scale, start, K, BLOCK, E4M3)


@triton.jit
def _part(x, start, K, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    return tl.load(x + columns, mask=columns < K, other=0.0).to(tl.float32)


@triton.jit
def _magnitude(part):
    """[1]: the largest magnitude as the bits of its float32, which are in its order, with NaN above all."""
    return tl.max(part.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0, keep_dims=True)


@triton.jit
def _scale(largest, E4M3: tl.constexpr):
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full((1,), 448.0 if E4M3 else 127.0, tl.float32))
    return tl.where(largest >= 0x7F800000, float("nan"), scale)


@triton.jit
def _write(codes, part, scale, start, K, BLOCK: tl.constexpr, E4M3: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    usable = tl.broadcast_to(scale > 0, (BLOCK,))
    units = tl.div_rn(tl.where(usable, part, 0.0), tl.where(usable, tl.broadcast_to(scale, (BLOCK,)), 1.0))
    rounded = _e4m3(units) if E4M3 else _int8(units)
    tl.store(codes + columns, rounded, mask=columns < K)


@triton.jit
def _int8(units):
    """The nearest integers, ties to even, within +-127: what is added leaves a float32 no bits for less than one."""
    nearest = (units + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(nearest, -127.0), 127.0).to(tl.int32).to(tl.int8)


@triton.jit
def _e4m3(units):
    """The codes of the nearest e4m3 values, ties to the even code, within +-448.

    Values are an eighth of the power of two at or below them apart, from 2 ** -6 down a constant 2 ** -9. 2 ** -8 of
    one is a float16 with the code in the bits above its seventh.
    """
    size = tl.minimum(tl.abs(units), 448.0)
    power = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.maximum(power, 0.015625) * 1572864.0
    half = (((size + power) - power) * 0.00390625).to(tl.float16)
    sign = (units.to(tl.int32, bitcast=True) >> 24) & 0x80
    return ((half.to(tl.int16, bitcast=True) >> 7).to(tl.int32) | sign).to(tl.uint8)
