"""Stored experts in Triton's kernels: described on the host as one argument, decoded in registers a tile at a time.

A tile is [BN, BK]: BN rows of one expert's matrix [N, K], BK of its columns. What it is multiplied by are rows x
[BM, BK]. Where a scale is applied is decided by what it costs and what it rounds:

- a scale a matrix or a row, and nvfp4's global one: once, on the sum over K (`finish`);
- of a group or block of at least BK columns: on the partial sum of BK columns (`add_product`);
- of a smaller group: on the tile (`weight_tile`). e8m0 scales and nvfp4's e4m3 ones leave bfloat16 codes exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moestro import formats
from moestro.formats import PackedTensor
from moestro.ops import gpu

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

_SCALES = {torch.uint8: "e8m0", torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3"}

_NIBBLES = ("e2m1", "int4", "uint4")


class Weights(NamedTuple):
    """A stack of packed matrices as one argument of a kernel; what the format lacks is None.

    Attributes:
        data, scales, zeros, factors: the tensors of `PackedTensor`; bytes where Triton has no such dtype.
        data_strides, scale_strides, zero_strides: of experts, rows and columns, in items.
        factor_stride: of experts.
        num_rows: N.
        element: "dense", or that of the format.
        scale: how scales are stored: "none", "float", "e8m0" or "e4m3".
        rows, columns: weights of a block that share a scale; 0 for all.
        converts: whether the processor converts e4m3.
    """

    data: Any
    scales: Any
    zeros: Any
    factors: Any
    data_strides: Any
    scale_strides: Any
    zero_strides: Any
    factor_stride: Any
    num_rows: Any
    element: Any
    scale: Any
    rows: Any
    columns: Any
    converts: Any


def unreadable(stored: formats.StoredExperts) -> str | None:
    """Why kernels cannot read these experts, with {name} for the projection's; None if they can."""
    form = stored.format
    if formats.FORMATS.get(form.name) != form or form.storage == torch.float64:
        return f"it does not read {form.name}, in which {{name}} is stored"
    if not isinstance(stored, PackedTensor):
        return "it reads experts that are one stack, and the matrices of {name} lie apart"
    if stored.data.dtype != form.storage:  # `.data =` and Module.to(dtype) exchange what a parameter holds
        return f"{{name}} is described as {form.name} and has come to hold numbers of another dtype"
    return None


def describe(stored: PackedTensor) -> Weights:
    """What a kernel takes for a stack [E, N, K] that is not `unreadable`. Nothing is copied."""
    form, scales, factors = stored.format, stored.scales, stored.global_scales
    scaling = form.scaling
    return Weights(
        data=_bytes(stored.data),
        scales=None if scales is None else _bytes(scales),
        zeros=stored.zeros,
        factors=factors,
        data_strides=stored.data.stride(),
        scale_strides=None if scales is None else scales.stride(),
        zero_strides=None if stored.zeros is None else stored.zeros.stride(),
        factor_stride=None if factors is None else factors.stride(0),
        num_rows=stored.shape[1],
        element=tl.constexpr("dense" if form.is_dense else form.element),
        scale=tl.constexpr("none" if scales is None else _SCALES.get(scales.dtype, "float")),
        rows=tl.constexpr(0 if scaling is None else scaling.rows),
        columns=tl.constexpr(0 if scaling is None else scaling.columns),
        converts=tl.constexpr(gpu.device_of(stored.data).capability >= (8, 9)),
    )


def _bytes(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) else t


@triton.jit
def weight_tile(w, expert, rows, k0, K, BK: tl.constexpr, DTYPE: tl.constexpr):
    """Rows `rows` [BN] of the expert's matrix, columns k0 to k0 + BK -> [BN, BK] of DTYPE, 0 beyond N and K.

    Of packed formats with the scales that belong inside. `rows` are any integers; k0 is a multiple of BK.
    """
    if w.element == "dense":
        return round_to(_codes(w, expert, rows, k0, K, BK), DTYPE)
    if w.element == "e2m1" or w.element == "int4" or w.element == "uint4":
        codes = _codes(w, expert, rows, k0 // 2, K // 2, BK // 2)
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), (codes.shape[0], BK))
    else:
        codes = _codes(w, expert, rows, k0, K, BK)
    tile = _values(codes, w.element, w.converts, DTYPE)
    if w.element == "uint4":
        tile = tile.to(tl.float32) - _of_groups(_zeros(w, expert, rows, k0, K, BK), BK, tl.float32)
        tile = tile.to(DTYPE)
    if w.scale != "none" and w.columns > 0 and w.columns < BK:
        scales = _scales(w, expert, rows, k0, K, BK)
        tile = tile.to(tl.float32) * _of_groups(scales, BK, tl.float32)
    return round_to(tile, DTYPE)


@triton.jit
def round_to(value, DTYPE: tl.constexpr):
    """The value in DTYPE, rounded to nearest even: the interpreter cuts bfloat16 off instead."""
    if _INTERPRETED and value.dtype == tl.float32 and tl.bfloat16 == DTYPE:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        value = tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
    return value.to(DTYPE)


@triton.jit
def add_product(acc, x, tile, w, expert, rows, k0, SWAP: tl.constexpr):
    """acc + x @ tile^T with the scale of this step: acc float32 [BM, BN], or its transpose where SWAP, x [BM, BK]."""
    if _INTERPRETED:
        x = x.to(tl.float32)
        tile = tile.to(tl.float32)
    BK: tl.constexpr = x.shape[1]
    if w.scale != "none" and w.columns >= BK:
        scale = tl.reshape(_scales(w, expert, rows, k0, k0 + BK, BK), (rows.shape[0],))
        part = tl.zeros(acc.shape, tl.float32)
        if SWAP:
            return acc + tl.dot(tile, tl.trans(x), part, input_precision="ieee") * scale[:, None]
        else:
            return acc + tl.dot(x, tl.trans(tile), part, input_precision="ieee") * scale[None, :]
    else:
        if SWAP:
            return tl.dot(tile, tl.trans(x), acc, input_precision="ieee")
        else:
            return tl.dot(x, tl.trans(tile), acc, input_precision="ieee")


@triton.jit
def finish(acc, w, expert, rows, SWAP: tl.constexpr):
    """The sum over K with what stands once before it: the scale of a row or a matrix, and nvfp4's global one."""
    if w.factors is not None:
        acc = acc * tl.load(w.factors + expert.to(tl.int64) * w.factor_stride)
    if w.scale != "none" and w.columns == 0:
        row = tl.where((rows >= 0) & (rows < w.num_rows), rows, 0) if w.rows == 1 else tl.zeros_like(rows)
        at = w.scales + expert.to(tl.int64) * w.scale_strides[0] + row.to(tl.int64) * w.scale_strides[1]
        scale = _scale_value(tl.load(at), w.scale, w.converts)
        acc = acc * (scale[:, None] if SWAP else scale[None, :])
    return acc


@triton.jit
def _codes(w, expert, rows, start, stop, COUNT: tl.constexpr):
    """Items start to start + COUNT of the rows, as stored; 0 beyond the matrix."""
    items = start + tl.arange(0, COUNT)
    at = w.data + expert.to(tl.int64) * w.data_strides[0]
    if w.data_strides[2] == 1:
        # A row beyond the matrix is another one instead of a mask: what it gives is not stored.
        inside = tl.where((rows >= 0) & (rows < w.num_rows), rows, 0)
        at += inside.to(tl.int64)[:, None] * w.data_strides[1] + items[None, :]
        return tl.load(at, mask=items[None, :] < stop, other=0)
    else:
        at += rows.to(tl.int64)[:, None] * w.data_strides[1] + items.to(tl.int64)[None, :] * w.data_strides[2]
        mask = ((rows >= 0) & (rows < w.num_rows))[:, None] & (items[None, :] < stop)
        return tl.load(at, mask=mask, other=0)


@triton.jit
def _blocks(base, strides, w, expert, rows, k0, K, BK: tl.constexpr):
    """What is stored once a block, for the rows and the blocks of BK columns -> [BN, max(BK / columns, 1)]."""
    COUNT: tl.constexpr = BK // w.columns if w.columns < BK else 1
    blocks = k0 // w.columns + tl.arange(0, COUNT)
    inside = tl.where((rows >= 0) & (rows < w.num_rows), rows, 0) // w.rows
    at = base + expert.to(tl.int64) * strides[0] + inside.to(tl.int64)[:, None] * strides[1]
    return tl.load(at + blocks[None, :] * strides[2], mask=(blocks * w.columns < K)[None, :], other=0)


@triton.jit
def _scales(w, expert, rows, k0, K, BK: tl.constexpr):
    stored = _blocks(w.scales, w.scale_strides, w, expert, rows, k0, K, BK)
    return _scale_value(stored, w.scale, w.converts)


@triton.jit
def _zeros(w, expert, rows, k0, K, BK: tl.constexpr):
    return _blocks(w.zeros, w.zero_strides, w, expert, rows, k0, K, BK).to(tl.float32)


@triton.jit
def _scale_value(stored, SCALE: tl.constexpr, CONVERTS: tl.constexpr):
    """Scales as stored -> float32."""
    if SCALE == "e8m0":
        bits = stored.to(tl.int32) << 23
        bits = tl.where(stored == 0, 0x400000, tl.where(stored == 255, 0x7FC00000, bits))
        return bits.to(tl.float32, bitcast=True)
    elif SCALE == "e4m3":
        return _values(stored, "e4m3", CONVERTS, tl.float32)
    else:
        return stored.to(tl.float32)


@triton.jit
def _of_groups(blocks, BK: tl.constexpr, DTYPE: tl.constexpr):
    """One number a group [BN, groups] -> one a column [BN, BK]."""
    BN: tl.constexpr = blocks.shape[0]
    GROUPS: tl.constexpr = blocks.shape[1]
    wide = tl.broadcast_to(blocks.to(DTYPE)[:, :, None], (BN, GROUPS, BK // GROUPS))
    return tl.reshape(wide, (BN, BK))


@triton.jit
def _values(codes, ELEMENT: tl.constexpr, CONVERTS: tl.constexpr, DTYPE: tl.constexpr):
    """The values of codes, in DTYPE; those of e4m3, e2m1 and integers are exact in each."""
    if ELEMENT == "e4m3":
        if CONVERTS and not _INTERPRETED:
            return codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
        else:
            # The fields of e4m3 as those of float16, whose exponent has a bias larger by 8.
            code = codes.to(tl.int16)
            bits = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
            value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
            return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(DTYPE)
    elif ELEMENT == "e2m1":
        # The fields of e2m1 as those of float16, whose exponent has a bias larger by 14.
        code = codes.to(tl.int16)
        bits = ((code & 7) << 9) | ((code & 8) << 12)
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0).to(DTYPE)
    elif ELEMENT == "int4":
        return ((codes ^ 8).to(tl.int32) - 8).to(tl.float32).to(DTYPE)
    else:
        return codes.to(tl.float32).to(DTYPE)
