"""Device code of expert_mlp: rows times gate_up with the activation, times down, and the weighted sum over slots.

A tile is BM rows of one block (one expert) times BN columns of the result. Names as in `moestro.types`; K is also what
a product sums over. Sizes that can pass 2^31 when multiplied are int64 before they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from moestro.ops.triton_kernels import tanh
from moestro.ops.triton_nibbles import INTERPRETED
from moestro.ops.triton_order import column_offsets, in_order
from moestro.ops.triton_weights import (
    add_product,
    add_rounded_product,
    as_stored,
    begin,
    decoded,
    finish,
    round_to,
    step_meta,
    typed,
    weight_tile,
)

DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.int8: tl.int8,
}


class Rows(NamedTuple):
    """Which rows make up a block: those of `moestro.ops.grouping.triton.sizes`, or a pair each where `pairs` is None.

    Attributes:
        ids: [T * K] expert of each pair; none where it lies outside 0..E-1.
        weights: float32 [T * K] weight of each pair.
        top_k: K.
        num_experts: E.
        pairs: int32 [T * K], pair indices in the order of experts.
        offsets: int32 [E + 1], where each expert's rows begin among them.
        experts, starts: int32 [G], expert and first row of each block.
        filled: int32 [1], blocks that hold rows.
    """

    ids: Any
    weights: Any
    top_k: Any
    num_experts: Any
    pairs: Any = None
    offsets: Any = None
    experts: Any = None
    starts: Any = None
    filled: Any = None


@triton.jit
def num_blocks(rows, num_pairs):
    """Blocks that hold rows; without an order, that may."""
    if rows.filled is None:
        return num_pairs
    else:
        return tl.load(rows.filled)


@triton.jit
def tile_at(index, blocks, columns, GROUP: tl.constexpr):
    """(block, column) of a tile: GROUP blocks, mostly of one expert, meet one column of weights before the next."""
    group = index // (GROUP * columns)
    first = group * GROUP
    height = tl.minimum(blocks - first, GROUP)
    inside = index - group * GROUP * columns
    return first + inside % height, inside // height


@triton.jit
def is_expert(named, num_experts):
    """Whether an id, as wide as it is stored, names one of the experts; else its slot is empty."""
    return (named >= 0) & (named < num_experts)


@triton.jit
def block_rows(rows, block, BLOCK: tl.constexpr, BM: tl.constexpr, EVERY: tl.constexpr):
    """A block's expert (-1: no rows), and for each of BM rows its place in the order, its pair and whether it is one.

    With EVERY those that are none have the places and pairs of other rows, which may be loaded.
    """
    local = tl.arange(0, BM)
    if rows.pairs is None:
        named = tl.load(rows.ids + block)
        expert = tl.where(is_expert(named, rows.num_experts), named, -1).to(tl.int32)
        tl.static_assert(not EVERY, "only ordered rows have others behind them")
        live = (local < 1) & (expert >= 0)
        at = block.to(tl.int64) + local
        pairs = block.to(tl.int64) + local * 0
    else:
        expert = tl.load(rows.experts + block)
        start = tl.load(rows.starts + block).to(tl.int64)
        at = start + local
        live = at < tl.minimum(start + BLOCK, tl.load(rows.offsets + expert + 1))
        if EVERY:
            at = tl.minimum(at, tl.load(rows.offsets + rows.num_experts) - 1)
            pairs = tl.load(rows.pairs + at).to(tl.int64)
        else:
            pairs = tl.load(rows.pairs + at, mask=live, other=0).to(tl.int64)
    return expert, at, pairs, live


@triton.jit
def load_rows(rows_at, live, k0, K, BK: tl.constexpr, DTYPE: tl.constexpr, WHOLE: tl.constexpr, EVERY: tl.constexpr):
    """[BM, BK] of the rows that begin at rows_at, zero beyond K and where there is no row, which is not loaded.

    With WHOLE no step ends beyond K; with EVERY none does, and all rows are loaded.
    """
    columns = k0 + tl.arange(0, BK)
    if EVERY:
        return tl.load(rows_at[:, None] + columns[None, :]).to(DTYPE)
    mask = live[:, None] if WHOLE else live[:, None] & (columns < K)[None, :]
    if tl.float8e4nv == DTYPE or tl.int8 == DTYPE:
        ZERO: tl.constexpr = 0.0 if tl.float8e4nv == DTYPE and not INTERPRETED else 0
        x = tl.load(typed(rows_at, DTYPE)[:, None] + columns[None, :], mask=mask, other=ZERO)
        return as_stored(x, DTYPE)
    else:
        return tl.load(rows_at[:, None] + columns[None, :], mask=mask, other=0).to(DTYPE)


@triton.jit
def zeros(BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr, NUMBER: tl.constexpr):
    """Sums of a tile, transposed where weights are the left operand."""
    if SWAP:
        return tl.zeros((BN, BM), NUMBER)
    else:
        return tl.zeros((BM, BN), NUMBER)


@triton.jit
def upright(acc, SWAP: tl.constexpr):
    """[BM, BN] of sums as they were added up."""
    if SWAP:
        return tl.trans(acc)
    else:
        return acc


@triton.jit
def product(
    rows_at, scales, scale_rows, live, w, map, order, expert, first, columns, K, k_from, k_to,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr, SWAP: tl.constexpr,
    EVERY: tl.constexpr,
):  # fmt: skip
    """Rows [BM, k_from:k_to] times the expert's weights [columns, k_from:k_to], transposed: [BM, BN].

    Weights come through the tensor map where there is one, which has those of output `first` and on in a box. Rows lie
    in the `order` where there is one, in whole steps; with EVERY all are loaded. Rows that were rounded have `scales`,
    in rows `scale_rows` [BM]: one for each block of columns that shares one in the weights. Where a row has one, the
    sum is unbroken, and of int8 an integer; Hopper adds products of 8-bit floats in fewer bits than float32 has.
    """
    INTEGERS: tl.constexpr = scales is not None and w.columns == 0 and tl.int8 == DTYPE and not INTERPRETED
    acc = zeros(BM, BN, SWAP, tl.int32 if INTEGERS else tl.float32)
    # Triton multiplies by Hopper's own instruction where the left operand has at least 64 rows.
    WGMMA: tl.constexpr = w.warpgroups and (BN if SWAP else BM) >= 64
    tl.static_assert(order is None or WGMMA, "rows are in the order of another instruction")
    begins = begin(w, expert, columns)
    for k0 in tl.range(k_from, k_to, BK):
        x = load_rows(rows_at, live, k0, K, BK, DTYPE, order is not None or w.unit % BK == 0, EVERY)
        meta = step_meta(w, begins, columns, k0, K, BK)
        if map is None:
            tile = weight_tile(w, begins, columns, k0, K, BK, DTYPE, meta, WGMMA, order)
        else:
            codes = map.load([expert, first, 0, k0 // w.per_item]).reshape(BN, BK // w.per_item)
            if INTERPRETED and scales is not None:
                codes = codes.to(tl.uint8, bitcast=True)
            tile = decoded(codes, w, BK, DTYPE, meta, WGMMA, order)
        if scales is None:
            acc = add_product(acc, x, tile, w, meta, SWAP, WGMMA, order)
        elif w.columns == 0:
            acc = add_rounded_product(acc, x, tile, w, meta, 1.0, SWAP)
        else:
            scales_at = scales + scale_rows * tl.cdiv(K, w.columns) + k0 // w.columns
            step_scales = tl.load(scales_at, mask=live, other=0.0)
            acc = add_rounded_product(acc, x, tile, w, meta, step_scales, SWAP)
    acc = upright(finish(acc.to(tl.float32), w, expert, columns, SWAP, DTYPE), SWAP)
    if scales is not None and w.columns == 0:
        acc = acc * tl.load(scales + scale_rows, mask=live, other=0.0)[:, None]
    return acc


@triton.jit
def gate_and_up(first, BN: tl.constexpr, I, INTERLEAVED: tl.constexpr):
    """Rows of gate_up [BN] from which outputs first to first + BN / 2 come: a gate, its up, the next gate.

    Those of outputs beyond the last lie beyond the matrix.
    """
    place = tl.arange(0, BN)
    output = first + place // 2
    row = output * 2 + place % 2 if INTERLEAVED else output + place % 2 * I
    return tl.where(output < I, row, 2 * I)


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)), whose exponential never overflows."""
    e = tl.exp(-tl.abs(z))
    return tl.where(z < 0, e, 1.0) / (1.0 + e)


KINDS = ("silu", "gelu", "gelu-tanh", "relu", "relu2", "sigmoid", "tanh", "identity")
"""What `activation` computes."""


@triton.jit
def activation(z, KIND: tl.constexpr, ALPHA: tl.constexpr):
    """The function that an `Activation` names."""
    if KIND == "silu":
        return z * sigmoid(ALPHA * z)
    elif KIND == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif KIND == "gelu-tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2 * u)
        return z * sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif KIND == "relu":
        return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "relu2":
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return z * z
    elif KIND == "sigmoid":
        return sigmoid(z)
    elif KIND == "tanh":
        return tanh(z)
    else:
        tl.static_assert(KIND == "identity")
        return z


@triton.jit
def at_most(z, LIMIT: tl.constexpr):
    """z clamped from above; NaN stays."""
    return tl.minimum(z, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def with_bias(acc, bias, bias_stride, expert, columns, inside):
    """Sums plus the expert's bias, where there is one."""
    if bias is None:
        return acc
    else:
        at = bias + expert.to(tl.int64) * bias_stride + columns
        return acc + tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def between(
    acc, bias, bias_stride, expert, first, I,
    BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """Sums [BM, BN] of gate_up -> [BM, BN / 2] (gated) or [BM, BN]: bias, clamp and activation."""
    if GATED:
        g, u = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        columns = first + tl.arange(0, BN // 2)
        gate = columns * 2 if INTERLEAVED else columns
        up = gate + 1 if INTERLEAVED else gate + I
        g = with_bias(g, bias, bias_stride, expert, gate, columns < I)
        u = with_bias(u, bias, bias_stride, expert, up, columns < I)
        if LIMIT is not None:
            g = at_most(g, LIMIT)
            u = -at_most(-at_most(u, LIMIT), LIMIT)
        return activation(g, KIND, ALPHA) * (u + UP_OFFSET)
    else:
        columns = first + tl.arange(0, BN)
        z = with_bias(acc, bias, bias_stride, expert, columns, columns < I)
        if LIMIT is not None:
            z = at_most(z, LIMIT)
        return activation(z, KIND, ALPHA)


@triton.jit
def height(rows, block):
    """How many rows a block can have at most: those of its expert from its first one on."""
    if rows.pairs is None:
        return 1
    else:
        expert = tl.load(rows.experts + block)
        stop = tl.load(rows.offsets + tl.maximum(expert, 0) + 1)
        return stop - tl.load(rows.starts + block)


@triton.jit
def store_outputs(h, out, at, live, first, I, into):
    """Store h [BM, WIDTH], columns first, a multiple of WIDTH, and on, in rows `at` [BM] of out: `gate_up_kernel`."""
    WIDTH: tl.constexpr = h.shape[1]
    outputs = first + tl.arange(0, WIDTH)
    if into is None:
        h = round_to(h, out.dtype.element_ty)
        tl.store(out + at[:, None] * I + outputs[None, :], h, mask=live[:, None] & (outputs < I)[None, :])
    else:
        whole = tl.cdiv(I, into.step) * into.step
        h = in_order(round_to(tl.where((outputs < I)[None, :], h, 0.0), out.dtype.element_ty), into)
        # The last columns' program has zeros for all that fills a row up.
        for more in tl.range(0, tl.where(first + WIDTH >= I, whole - first, WIDTH), WIDTH):
            to = column_offsets(first + more, WIDTH, into)
            tl.store(out + at[:, None] * whole + to[None, :], h, mask=live[:, None] & (to < whole)[None, :])
            h = tl.zeros_like(h)


@triton.jit
def gate_up_tile(
    x, x_stride, rows, w, map, bias, bias_stride, order, into, out, block, column, H, I, scales,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
    DTYPE: tl.constexpr, WEIGHTED: tl.constexpr, TAILS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """A block of `gate_up_kernel` and one column of weights, in a tile that is halved TAILS times where rows allow."""
    if TAILS > 0:
        if height(rows, block) <= BM // 2:
            LEFT: tl.constexpr = SWAP or (w.warpgroups and BM < 128)
            gate_up_tile(
                x, x_stride, rows, w, map, bias, bias_stride, order, into, out, block, column, H, I, scales,
                BLOCK, BM // 2, BN, BK, LEFT, DTYPE, WEIGHTED, TAILS - 1, KIND, GATED, INTERLEAVED, ALPHA, LIMIT,
                UP_OFFSET,
            )  # fmt: skip
        else:
            gate_up_tile(
                x, x_stride, rows, w, map, bias, bias_stride, order, into, out, block, column, H, I, scales,
                BLOCK, BM, BN, BK, SWAP, DTYPE, WEIGHTED, 0, KIND, GATED, INTERLEAVED, ALPHA, LIMIT, UP_OFFSET,
            )  # fmt: skip
    else:
        WIDTH: tl.constexpr = BN // 2 if GATED else BN
        EVERY: tl.constexpr = order is not None and BM >= 64  # a mask for each row would take too many registers
        expert, at, pairs, live = block_rows(rows, block, BLOCK, BM, EVERY)
        if expert >= 0:
            first = column * WIDTH
            columns = gate_and_up(first, BN, I, INTERLEAVED) if GATED else first + tl.arange(0, BN)
            rows_at = x + pairs // rows.top_k * x_stride
            acc = product(
                rows_at, scales, pairs // rows.top_k, live, w, map, order, expert, first, columns,
                H, 0, H, BM, BN, BK, DTYPE, SWAP, EVERY,
            )  # fmt: skip
            if WEIGHTED:
                acc = acc * tl.load(rows.weights + pairs, mask=live, other=0.0)[:, None]
            h = between(
                acc, bias, bias_stride, expert, first, I, BM, BN, KIND, GATED, INTERLEAVED, ALPHA, LIMIT, UP_OFFSET
            )
            store_outputs(h, out, at, live, first, I, into)


@triton.jit(do_not_specialize=["num_pairs"])
def gate_up_kernel(
    x, x_stride, rows, w, map, bias, bias_stride, order, into, out, num_pairs, H, I, scales,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    DTYPE: tl.constexpr, WEIGHTED: tl.constexpr, TAILS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """out [T * K, I]: what stands between the two products, of every row in the order of blocks.

    Columns lie in the order `into` where there is one, filled up to whole steps.
    """
    blocks = num_blocks(rows, num_pairs)
    tiles = tl.cdiv(I, BN // 2 if GATED else BN)
    index = tl.program_id(0)
    if index < blocks * tiles:
        block, column = tile_at(index, blocks, tiles, GROUP)
        gate_up_tile(
            x, x_stride, rows, w, map, bias, bias_stride, order, into, out, block, column, H, I, scales,
            BLOCK, BM, BN, BK, SWAP, DTYPE, WEIGHTED, TAILS, KIND, GATED, INTERLEAVED, ALPHA, LIMIT, UP_OFFSET,
        )  # fmt: skip


@triton.jit
def down_tile(
    h, rows, w, map, bias, bias_stride, order, out, block, column, piece, num_pairs, H, I, scales,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
    DTYPE: tl.constexpr, WEIGHTED: tl.constexpr, TAILS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A block of `down_kernel`, one column of weights and a piece of I, in a tile that is halved as in gate_up."""
    if TAILS > 0:
        if height(rows, block) <= BM // 2:
            LEFT: tl.constexpr = SWAP or (w.warpgroups and BM < 128)
            down_tile(
                h, rows, w, map, bias, bias_stride, order, out, block, column, piece, num_pairs, H, I, scales,
                BLOCK, BM // 2, BN, BK, LEFT, DTYPE, WEIGHTED, TAILS - 1, SPLITS,
            )  # fmt: skip
        else:
            down_tile(
                h, rows, w, map, bias, bias_stride, order, out, block, column, piece, num_pairs, H, I, scales,
                BLOCK, BM, BN, BK, SWAP, DTYPE, WEIGHTED, 0, SPLITS,
            )  # fmt: skip
    else:
        piece_size = tl.cdiv(tl.cdiv(I, BK), SPLITS) * BK
        EVERY: tl.constexpr = order is not None and BM >= 64  # a mask for each row would take too many registers
        expert, at, pairs, live = block_rows(rows, block, BLOCK, BM, EVERY)
        if expert >= 0:
            first = column * BN
            columns = first + tl.arange(0, BN)
            inside = columns < H
            stride = I if order is None else tl.cdiv(I, BK) * BK
            rows_at = h + at * stride
            k_from = piece * piece_size
            k_to = tl.minimum(k_from + piece_size, I)
            acc = product(
                rows_at, scales, at, live, w, map, order, expert, first, columns,
                I, k_from, k_to, BM, BN, BK, DTYPE, SWAP, EVERY,
            )  # fmt: skip
            if piece == 0:
                acc = with_bias(acc, bias, bias_stride, expert, columns, inside)
            if WEIGHTED:
                acc = acc * tl.load(rows.weights + pairs, mask=live, other=0.0)[:, None]
            to = out + (piece.to(tl.int64) * num_pairs + pairs)[:, None] * H + columns[None, :]
            tl.store(to, round_to(acc, out.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def down_kernel(
    h, rows, w, map, bias, bias_stride, order, out, num_pairs, H, I, scales,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    DTYPE: tl.constexpr, WEIGHTED: tl.constexpr, TAILS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """out [SPLITS, T * K, H]: each pair's weighted output, as the pieces of its sum over I."""
    blocks = num_blocks(rows, num_pairs)
    tiles = tl.cdiv(H, BN)
    index = tl.program_id(0)
    if index < blocks * tiles * SPLITS:
        piece = index % SPLITS
        block, column = tile_at(index // SPLITS, blocks, tiles, GROUP)
        down_tile(
            h, rows, w, map, bias, bias_stride, order, out, block, column, piece, num_pairs, H, I, scales,
            BLOCK, BM, BN, BK, SWAP, DTYPE, WEIGHTED, TAILS, SPLITS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "num_experts"])
def sum_slots_kernel(
    pieces, ids, out, T, H, parts, num_experts, TOP_K: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr
):
    """out [T, H]: each token's pieces added up, slot after slot; those of an empty slot are not loaded."""
    token = (tl.program_id(0) // parts).to(tl.int64)
    columns = tl.program_id(0) % parts * BN + tl.arange(0, BN)
    acc = tl.zeros((BN,), tl.float32)
    for slot in tl.range(0, TOP_K):
        pair = token * TOP_K + slot
        mask = (columns < H) & is_expert(tl.load(ids + pair), num_experts)
        for piece in tl.static_range(SPLITS):
            at = pieces + (piece * T.to(tl.int64) * TOP_K + pair) * H + columns
            acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * H + columns, round_to(acc, out.dtype.element_ty), mask=columns < H)
