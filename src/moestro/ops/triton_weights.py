"""Stored experts in Triton's kernels, one argument made by `triton_stored`, decoded in registers a tile at a time.

A tile is [BN, BK]: BN rows of one expert's matrix [N, K], BK of its columns. What it is multiplied by are rows x
[BM, BK]. Where a scale is applied is decided by what it costs and what it rounds:

- a scale a matrix or a row, and nvfp4's global one: once, on the sum over K (`finish`);
- of a group or block of at least BK columns: on the partial sum of BK columns (`add_product`);
- of a smaller group: on the tile (`weight_tile`). Powers of two and nvfp4's e4m3 scales leave bfloat16 exact; float16
  takes scales over the largest power of two of a row's, which is applied to the partial sum.

Tiles of nibbles have their columns in an order of their own, in which what a thread of a tensor core holds lies in a
row of up to 16 bytes; those of x come in the same (`triton_order`), or `add_product` brings them into it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moestro.ops.triton_bytes import bytes_as
from moestro.ops.triton_nibbles import INTERPRETED, nibbles
from moestro.ops.triton_order import in_order

# How far e2m1's tiles in bfloat16 fall short, so that their largest scale, a factor of 2 ** 126 included, is finite.
_SHORT = tl.constexpr(2.0**-24)


@triton.jit
def begin(w, expert, rows):
    """Where data, scales and zero points of an expert begin, in items: a number each, or one for each of rows [BN]."""
    return _begin(w, 0, expert, rows), _begin(w, 1, expert, rows), _begin(w, 2, expert, rows)


@triton.jit
def _begin(w, KIND: tl.constexpr, expert, rows):
    """`begin` of data (0), scales (1), zero points (2) or factors (3)."""
    expert = expert.to(tl.int64)
    if w.table is not None:
        at = w.table + (KIND * w.num_experts + expert) * w.parts
        start = tl.load(at)
        if w.parts == 2:
            start = tl.where(_inside(w, rows) >= w.height, tl.load(at + 1), start)
        if KIND == 0:
            return tl.multiple_of(start, w.data_unit)
        else:
            return start if KIND == 3 else tl.multiple_of(start, w.scale_unit)
    elif KIND == 0:
        return expert * w.data_strides[0]
    elif KIND == 1:
        return expert if w.scales is None else expert * w.scale_strides[0]
    elif KIND == 2:
        return expert if w.zeros is None else expert * w.zero_strides[0]
    else:
        return expert * w.factor_stride


@triton.jit
def step_meta(w, begins, rows, k0, K, BK: tl.constexpr):
    """Scales and zero points, as stored, of the rows [BN] and the blocks of columns k0 to k0 + BK: [BN, blocks] each.

    Of blocks of rows that hold a tile, those of its first two rows stand for the even and the odd: [2, blocks].
    Not loaded a step ahead: a loop that carries them costs a copy of each tile through shared memory, and seven of
    eight of these loads find their sector in the cache.
    """
    if w.scale == "none" or w.columns == 0:
        return tl.zeros((1, 1), tl.int32), tl.zeros((1, 1), tl.int32)
    else:
        # Scales of shorter groups are applied to decoded nibbles, and nowhere to bytes.
        tl.static_assert(w.columns >= BK or (w.element != "e4m3" and w.element != "int8"))
        COUNT: tl.constexpr = BK // w.columns if w.columns < BK else 1
        blocks = tl.multiple_of(k0 // w.columns, COUNT) + tl.arange(0, COUNT)
        down = _own(w, rows) // w.rows
        if w.pairs and rows.shape[0] <= w.rows:
            down = tl.min(tl.reshape(down, (rows.shape[0] // 2, 2)), 0)
        WHOLE: tl.constexpr = w.unit % BK == 0
        mask = None if WHOLE else ((blocks * w.columns < K) & (k0 < K))[None, :]
        REST: tl.constexpr = None if WHOLE else 0
        scales = tl.load(_addresses(w, w.scales, w.scale_strides, begins[1], down, blocks, w.step), mask, REST)
        if w.zeros is None:
            return scales, tl.zeros((1, 1), tl.int32)
        else:
            at = _addresses(w, w.zeros, w.zero_strides, begins[2], down, blocks, w.step)
            return scales, tl.load(at, mask, REST)


@triton.jit
def weight_tile(w, begins, rows, k0, K, BK: tl.constexpr, DTYPE: tl.constexpr, meta, WGMMA: tl.constexpr, order):
    """Rows `rows` [BN] of an expert's matrix, columns k0 to k0 + BK -> [BN, BK] of DTYPE, for `add_product`.

    0 beyond N and K. `rows` are any integers, k0 is a multiple of BK, `begins` and `meta` what `begin` and `step_meta`
    gave for them. WGMMA says which instruction multiplies: `_reordered`. Its columns are those of rows in the `order`.
    """
    return decoded(_codes(w, begins, rows, k0, K, BK, DTYPE), w, BK, DTYPE, meta, WGMMA, order)


@triton.jit
def decoded(codes, w, BK: tl.constexpr, DTYPE: tl.constexpr, meta, WGMMA: tl.constexpr, order):
    """`weight_tile` of items as they were loaded."""
    if w.element == "dense":
        return round_to(codes, DTYPE)
    elif tl.float8e4nv == DTYPE or tl.int8 == DTYPE:
        return as_stored(codes, DTYPE)
    elif w.element == "e4m3" or w.element == "int8":
        tile = _bytes_to(codes, w.element, w.converts, DTYPE)
        return tile if order is None else in_order(tile, order)
    else:
        return _nibble_tile(codes, w, BK, DTYPE, meta, WGMMA)


@triton.jit
def typed(pointers, DTYPE: tl.constexpr):
    """Pointers to bytes as those to what tensor cores multiply, who read it where loads put it; others as they are."""
    if INTERPRETED or not (tl.float8e4nv == DTYPE or tl.int8 == DTYPE):
        return pointers
    else:
        return pointers.to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def as_stored(codes, DTYPE: tl.constexpr):
    """What was loaded through `typed` pointers as what tensor cores multiply."""
    if INTERPRETED:
        return _bytes_to(codes, "int8" if tl.int8 == DTYPE else "e4m3", False, tl.float32)
    else:
        return codes


@triton.jit
def add_rounded_product(acc, x, tile, w, meta, row_scales, SWAP: tl.constexpr):
    """`add_product` of rows that were rounded: in one sum over all steps where a row has one scale.

    Where columns share scales, each step has a sum, to which those of its rows, [BM], are applied.
    """
    NUMBER: tl.constexpr = tl.int32 if x.dtype == tl.int8 else tl.float32
    part = acc if w.columns == 0 else tl.zeros(acc.shape, NUMBER)
    if SWAP:
        part = tl.dot(tile, tl.trans(x), part, input_precision="ieee", out_dtype=NUMBER)
    else:
        part = tl.dot(x, tl.trans(tile), part, input_precision="ieee", out_dtype=NUMBER)
    if w.columns == 0:
        return part
    else:
        part = part.to(tl.float32)
        scale = _of_rows(_scale_value(meta[0], w.scale, w.converts), tile.shape[0])
        part = part * (row_scales[None, :] if SWAP else row_scales[:, None])
        return acc + part * (scale[:, None] if SWAP else scale[None, :])


@triton.jit
def _of_rows(scales, BN: tl.constexpr):
    """One scale a row [BN] from those of one block of columns [BN, 1] or [2, 1]."""
    ROWS: tl.constexpr = scales.shape[0]
    return tl.reshape(tl.broadcast_to(tl.reshape(scales, (1, ROWS)), (BN // ROWS, ROWS)), (BN,))


@triton.jit
def add_product(acc, x, tile, w, meta, SWAP: tl.constexpr, WGMMA: tl.constexpr, order):
    """acc + x @ tile^T with the scale of this step: acc float32 [BM, BN], or its transpose where SWAP, x [BM, BK].

    Decoded weights are in registers. Triton 3.6 has such products of Hopper's own instruction run on while the next
    step's weights take the same registers (triton-lang/triton, issue 9433): `_settled`.
    """
    BK: tl.constexpr = x.shape[1]
    UNITS: tl.constexpr = w.columns > 0 and w.columns < BK and x.dtype == tl.float16
    if order is None and w.element != "dense" and w.element != "e4m3" and w.element != "int8":
        x = _reordered(tl.reshape(x, (x.shape[0], 4, BK // 32, 2, 4)), w, WGMMA)
    if INTERPRETED:
        x = x.to(tl.float32)
        tile = tile.to(tl.float32)
    if (w.scale != "none" and w.columns >= BK) or UNITS:
        scales = _scale_value(meta[0], w.scale, w.converts)
        scale = _unit(scales) if UNITS else _of_rows(scales, tile.shape[0])
        part = tl.zeros(acc.shape, tl.float32)
        if SWAP:
            return acc + tl.dot(tile, tl.trans(x), part, input_precision="ieee") * scale[:, None]
        else:
            return acc + tl.dot(x, tl.trans(tile), part, input_precision="ieee") * scale[None, :]
    elif SWAP:
        acc = tl.dot(tile, tl.trans(x), acc, input_precision="ieee")
        return _settled(acc) if WGMMA and w.element != "dense" else acc
    else:
        return tl.dot(x, tl.trans(tile), acc, input_precision="ieee")


@triton.jit
def _settled(acc):
    """The same sums, by an instruction that waits for them and leaves no trace: a copy to the same registers."""
    if INTERPRETED:
        return acc
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], tl.float32, True, 1)


@triton.jit
def finish(acc, w, expert, rows, SWAP: tl.constexpr, DTYPE: tl.constexpr):
    """The sum over K with what stands once before it: the scale of a row or a matrix, and nvfp4's global one."""
    if w.element == "e2m1" and tl.bfloat16 == DTYPE:
        acc = acc * (1.0 / _SHORT)
    if w.factors is not None:
        factor = tl.load(w.factors + _begin(w, 3, expert, rows))
        if w.parts == 1:
            acc = acc * factor
        else:
            acc = acc * (factor[:, None] if SWAP else factor[None, :])
    if w.scale != "none" and w.columns == 0:
        row = _own(w, rows) if w.rows == 1 else tl.zeros_like(rows)
        at = w.scales + _begin(w, 1, expert, rows) + row.to(tl.int64) * w.scale_strides[1]
        scale = _scale_value(tl.load(at), w.scale, w.converts)
        acc = acc * (scale[:, None] if SWAP else scale[None, :])
    return acc


@triton.jit
def round_to(value, DTYPE: tl.constexpr):
    """The value in DTYPE, rounded to nearest even: the interpreter cuts bfloat16 off instead, and takes small numbers
    for others."""
    if INTERPRETED and value.dtype == tl.float32 and tl.bfloat16 == DTYPE:
        bits = value.to(tl.int32, bitcast=True)
        bits = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(DTYPE)


@triton.jit
def _inside(w, rows):
    """Row 0 in place of those beyond the matrix: what they give is not stored."""
    return tl.where((rows >= 0) & (rows < w.num_rows), rows, 0)


@triton.jit
def _own(w, rows):
    """The row of its matrix that each of an expert's rows is; row 0 in place of those beyond."""
    rows = _inside(w, rows)
    return rows if w.parts == 1 else tl.where(rows >= w.height, rows - w.height, rows)


@triton.jit
def _addresses(w, base, strides, start, down, across, STEP: tl.constexpr):
    base = base + (start if w.parts == 1 else start[:, None])
    row = down.to(tl.int64) * strides[1]
    if STEP is not None:
        row = tl.multiple_of(row, STEP)
    return base + row[:, None] + across[None, :] * strides[2]


@triton.jit
def _codes(w, begins, rows, k0, K, BK: tl.constexpr, DTYPE: tl.constexpr):
    """Columns k0 to k0 + BK of the rows as stored; 0 beyond the matrix's columns."""
    PER_ITEM: tl.constexpr = w.per_item
    WHOLE: tl.constexpr = w.unit % BK == 0
    ZERO: tl.constexpr = 0.0 if tl.float8e4nv == DTYPE and not INTERPRETED else 0
    items = k0 // PER_ITEM + tl.arange(0, BK // PER_ITEM)
    if WHOLE:
        inside = True
    elif w.unit > 16:  # and K no 1, which Triton makes a compile-time value that takes no hint
        inside = (items < tl.multiple_of(K // PER_ITEM, w.unit // PER_ITEM))[None, :]
    else:
        inside = (items < K // PER_ITEM)[None, :]
    data = typed(w.data, DTYPE)
    if w.by_rows:
        at = _addresses(w, data, w.data_strides, begins[0], _own(w, rows), items, None)
        return tl.load(at) if WHOLE else tl.load(at, mask=inside, other=ZERO)
    else:
        down = rows if w.parts == 1 else _own(w, rows)
        at = _addresses(w, data, w.data_strides, begins[0], down, items.to(tl.int64), None)
        return tl.load(at, mask=((rows >= 0) & (rows < w.num_rows))[:, None] & inside, other=ZERO)


@triton.jit
def _nibble_tile(words, w, BK: tl.constexpr, DTYPE: tl.constexpr, meta, WGMMA: tl.constexpr):
    """int16 words [BN, BK / 4] -> [BN, BK] of DTYPE, columns as `_reordered` has them."""
    BN: tl.constexpr = words.shape[0]
    HALF: tl.constexpr = tl.float16 if tl.float16 == DTYPE else tl.bfloat16
    WIDE: tl.constexpr = tl.float32 if INTERPRETED or tl.float32 == DTYPE else HALF
    SHAPE: tl.constexpr = (BN, 4, BK // 32, 2, 4)
    first, second, third, fourth = nibbles(words, w.element, HALF)
    tile = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), SHAPE).to(WIDE)
    if w.element == "int4":
        tile = tile - _constant(1032.0 if tl.float16 == DTYPE else 136.0, WIDE)
    elif w.element == "uint4":
        tile = tile - _constant(1024.0 if tl.float16 == DTYPE else 128.0, WIDE)
        tile = tile - _of_groups(meta[1].to(tl.float32).to(WIDE), SHAPE)
    SHORT: tl.constexpr = _SHORT if tl.bfloat16 == DTYPE else 1.0
    UNIT: tl.constexpr = (2.0**14 if tl.float16 == DTYPE else 2.0**126 * SHORT) if w.element == "e2m1" else 1.0
    if UNIT != 1 and (w.columns >= BK or tl.float32 == DTYPE):
        tile = tile * _constant(UNIT, WIDE)
    if w.columns < BK:
        scales = _scale_value(meta[0], w.scale, w.converts)
        if tl.float16 == DTYPE:
            scales = scales / _unit(scales)[:, None]
        if tl.float32 != DTYPE:
            scales = scales * UNIT
        tile = _scaled(tile, scales, w.scale == "float", WIDE)
    return round_to(_reordered(tile, w, WGMMA), DTYPE)


@triton.jit
def _scaled(tile, scales, ROUNDS: tl.constexpr, WIDE: tl.constexpr):
    """Tile [BN, 4, BK / 32, 2, 4] times scales [BN, groups]; in 16 bits by what they round to and by what is left."""
    if tl.float32 == WIDE:
        return tile * _of_groups(scales, tile.shape)
    high = scales.to(WIDE)
    if ROUNDS and tl.bfloat16 == WIDE:
        low = (scales - high.to(tl.float32)).to(WIDE)
        return tl.fma(tile, _of_groups(high, tile.shape), tile * _of_groups(low, tile.shape))
    else:
        return tile * _of_groups(high, tile.shape)


@triton.jit
def _constant(VALUE: tl.constexpr, DTYPE: tl.constexpr):
    return tl.full((1, 1, 1, 1, 1), VALUE, DTYPE)


@triton.jit
def _of_groups(blocks, SHAPE: tl.constexpr):
    """One number a group [BN, groups] -> one a column, in the shape of a tile of nibbles."""
    GROUPS: tl.constexpr = blocks.shape[1]
    COLUMNS: tl.constexpr = SHAPE[1] * SHAPE[2] * SHAPE[3] * SHAPE[4]
    wide = tl.broadcast_to(blocks[:, :, None], (blocks.shape[0], GROUPS, COLUMNS // GROUPS))
    return tl.reshape(wide, SHAPE)


@triton.jit
def _reordered(tile, w, WGMMA: tl.constexpr):
    """[n, 4, BK / 32, 2, 4] -> [n, BK] in the order in which four threads, each with a quarter of a row, hold it.

    Hopper's own instruction (WGMMA) gives a thread two columns in a row, then two 8 further on. Of the other one, which
    Hopper has too, Triton gives it eight, or four where no byte goes into a tile: it takes the narrowest number of a
    tile for the size of a stored weight.
    """
    n: tl.constexpr = tile.shape[0]
    steps: tl.constexpr = tile.shape[2]
    BYTES: tl.constexpr = w.zeros is not None or (w.columns < 32 * steps and w.scale != "float")
    tile = tl.reshape(tile, (n, 4, steps, 2, 2, 2))
    if WGMMA:
        tile = tl.permute(tile, (0, 2, 4, 5, 1, 3))
    elif BYTES:
        tile = tl.permute(tile, (0, 2, 1, 4, 5, 3))
    else:
        tile = tl.permute(tile, (0, 2, 4, 1, 5, 3))
    return tl.reshape(tile, (n, 32 * steps))


@triton.jit
def _unit(scales):
    """The largest power of two at or below each row's largest scale [BN, groups]; 1 where that is 0 or not finite."""
    largest = tl.max(tl.abs(scales), 1).to(tl.int32, bitcast=True) & 0x7F800000
    power = largest.to(tl.float32, bitcast=True)
    return tl.where((largest == 0) | (largest == 0x7F800000), 1.0, power)


@triton.jit
def _scale_value(stored, SCALE: tl.constexpr, CONVERTS: tl.constexpr):
    """Scales as stored -> float32."""
    if SCALE == "e8m0":
        bits = stored.to(tl.int32) << 23
        bits = tl.where(stored == 0, 0x400000, tl.where(stored == 255, 0x7FC00000, bits))
        return bits.to(tl.float32, bitcast=True)
    elif SCALE == "e4m3":
        return _bytes_to(stored, "e4m3", CONVERTS, tl.float32)
    else:
        return stored.to(tl.float32)


@triton.jit
def _bytes_to(codes, ELEMENT: tl.constexpr, CONVERTS: tl.constexpr, DTYPE: tl.constexpr):
    """The values of bytes of e4m3 or int8, which every DTYPE holds."""
    HALF: tl.constexpr = tl.bfloat16 == DTYPE or tl.float16 == DTYPE
    if HALF and not INTERPRETED and (ELEMENT == "int8" or not CONVERTS):
        return bytes_as(codes.to(tl.uint8, bitcast=True), ELEMENT, DTYPE)
    elif ELEMENT == "int8":
        # As the lowest bits of 2 ** 23, whose last place counts one: a conversion of integers is slow.
        bits = (codes.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.int32) | 0x4B000000
        return (bits.to(tl.float32, bitcast=True) - 8388736.0).to(DTYPE)
    elif CONVERTS and not INTERPRETED:
        half = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        return half if tl.float16 == DTYPE else half.to(tl.float32).to(DTYPE)
    else:
        # The fields of e4m3 as those of float16, whose exponent has a bias larger by 8.
        code = codes.to(tl.int16)
        bits = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(DTYPE)
