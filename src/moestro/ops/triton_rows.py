"""Rows rounded to 8 bits on a GPU, as `moestro.reference.round_rows` and `round_rows_e4m3` define it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moestro.ops import gpu
from moestro.ops.gpu import Launch
from moestro.ops.triton_nibbles import INTERPRETED
from moestro.types import InputFormat

_TILE, _LANE = 1024, 64
"""Numbers that a program rounds at least, and those of a thread where a row is longer."""
_SMALL, _LIFT = tl.constexpr(2.0**-60), tl.constexpr(2.0**90)
"""Scales below the one, which may have no normal reciprocal, are multiplied by the other."""
_CODES = {"int8": torch.int8, "fp8-e4m3": torch.uint8}


class Rounding:
    """How rows of `size` columns are rounded: codes [R, size] and float32 scales [R, count], `columns` sharing one.

    0 `columns` are all of a row. `launch`, for the device of `x`, has `parts` programs for each row; every number is
    loaded once.
    """

    def __init__(self, to: InputFormat, size: int, columns: int, x: Tensor) -> None:
        self._dtype, self.size = _CODES[to], size
        self.count = -(-size // columns) if columns else 1
        width = _power_of_two(columns or size)
        blocks = min(max(_TILE // width, 1), _power_of_two(self.count))
        self.parts = -(-self.count // blocks)
        values: dict[str, Any] = {"E4M3": to == "fp8-e4m3", "COLUMNS": columns or width}
        values.update(BLOCKS=blocks, BLOCK=width, CONVERTS=gpu.device_of(x).capability >= gpu.LEAST_FP8)
        self.launch = Launch(round_rows_kernel, values, {"num_warps": min(max(width // (32 * _LANE), 4), 16)})

    def sizes(self, num_rows: int) -> tuple[tuple[int, torch.dtype], ...]:
        """Numbers in codes and scales of so many rows, and their dtypes."""
        return (num_rows * self.size, self._dtype), (num_rows * self.count, torch.float32)


def _power_of_two(number: int) -> int:
    """The least that is no less."""
    return 1 << max(number - 1, 0).bit_length()


@triton.jit
def round_rows_kernel(
    x, x_stride, codes, scales, K, count, parts,
    E4M3: tl.constexpr, CONVERTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks of a row a program: codes [R, K] and scales [R, count]."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    blocks = tl.program_id(0) % parts * BLOCKS + tl.arange(0, BLOCKS)
    place = tl.arange(0, BLOCK)
    columns = blocks[:, None] * COLUMNS + place[None, :]
    mask = (columns < K) & (place < COLUMNS)[None, :]
    part = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    rounded, scale = round_blocks(part, E4M3, CONVERTS)
    tl.store(scales + row * count + blocks, scale, mask=blocks < count)
    tl.store(codes + row * K + columns, rounded, mask=mask)


@triton.jit
def round_blocks(part, E4M3: tl.constexpr, CONVERTS: tl.constexpr):
    """float32 [R, C] -> the codes, and a scale for each row."""
    # Magnitudes as the bits of their float32, which are in their order, with NaN above all.
    largest = tl.max(part.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    scale = tl.div_rn(
        largest.to(tl.float32, bitcast=True), tl.full(largest.shape, 448.0 if E4M3 else 127.0, tl.float32)
    )
    scale = tl.where(largest >= 0x7F800000, float("nan"), scale)
    units = _quotients(tl.where(scale[:, None] > 0, part, 0.0), tl.where(scale > 0, scale, 1.0))
    if not E4M3:
        return _int8(units), scale
    elif CONVERTS and not INTERPRETED:
        return units.to(tl.float8e4nv).to(tl.uint8, bitcast=True), scale
    else:
        return _e4m3(units), scale


@triton.jit
def _quotients(part, scale):
    """part [R, C] / scale [R], no more than 448 times its scale, rounded once.

    A product with the reciprocal, and what it is off by divided in its turn: that is the nearest number if the
    reciprocal is (Markstein, 1990). It takes a scale and a reciprocal that are normal numbers. -0 becomes 0.
    """
    if INTERPRETED:  # whose fma rounds twice
        return tl.div_rn(part, tl.broadcast_to(scale[:, None], part.shape))
    else:
        lift = tl.where(scale < _SMALL, _LIFT, 1.0)
        scale = scale * lift
        part = part * lift[:, None]
        inverse = tl.broadcast_to(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None], part.shape)
        near = part * inverse
        rest = tl.fma(-near, tl.broadcast_to(scale[:, None], part.shape), part)
        return tl.fma(rest, inverse, near)


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
