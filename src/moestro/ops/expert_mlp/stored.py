"""Rows times experts that are packed, or unstacked: matrix by matrix, a panel at a time.

A panel is as many rows of a matrix as stay in cache when dequantised. No more of any expert than that is ever written
out. Names: rows x [n, K], one expert's matrix [N, K] as blocks of its rows, top to bottom.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from moestro import formats
from moestro.formats import PackedTensor, StoredExperts
from moestro.ops.expert_mlp import tuning
from moestro.ops.expert_mlp.matmul import Span, Way, matmul, matmul_into

Blocks = Sequence[PackedTensor]


def stored_spans(
    x: Tensor, stored: StoredExperts, spans: Sequence[Span], ways: Sequence[Way], dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """Each span's rows times its expert's matrix -> [n, N] of `dtype`, in `out` if given; the spans cover x."""
    if out is None:
        out = torch.empty(x.shape[0], stored.shape[1], dtype=dtype, device=x.device)
    x = x.to(dtype)
    for (e, start, stop), way in zip(spans, ways, strict=True):
        target = out[start:stop]
        if out.dtype == dtype:
            product(x[start:stop], stored.blocks(e), way, target)
        else:
            target.copy_(product(x[start:stop], stored.blocks(e), way))
    return out


def product(x: Tensor, blocks: Blocks, way: Way | None = None, out: Tensor | None = None) -> Tensor:
    """x [n, K] times the matrix [N, K] -> [n, N], all in the dtype of x; no gradient is recorded."""
    blocks = joined(blocks)
    if way is None:
        way = _way(x, blocks[0])
    if out is None:
        out = x.new_empty(x.shape[0], sum(block.shape[0] for block in blocks))
    start = 0
    for block in blocks:
        target = out[:, start : start + block.shape[0]]
        start += block.shape[0]
        if block.format.is_dense:
            matmul_into(x, block.data, way, target)
            continue
        rows = x.to(tuning.panel_dtype(x.shape[0], x.dtype))
        for top, bottom, panel in panels(block, rows):
            matmul_into(rows, panel, way, target[:, top:bottom])
    return out


def transposed_product(grad: Tensor, blocks: Blocks) -> Tensor:
    """grad [n, N] times the matrix [N, K] -> [n, K], in the dtype of grad; no gradient is recorded."""
    out = grad.new_zeros(grad.shape[0], blocks[0].shape[1])
    start = 0
    for block in blocks:
        for top, bottom, panel in panels(block, grad):
            out.addmm_(grad[:, start + top : start + bottom], panel)
        start += block.shape[0]
    return out


def panels(matrix: PackedTensor, x: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """The matrix [N, K] from top to bottom in the dtype of x: first row, end, the rows themselves.

    One panel, the stored numbers themselves, where they are of that dtype.
    """
    num_rows, size = matrix.shape
    if matrix.data.dtype == x.dtype:
        yield 0, num_rows, matrix.data
        return
    scaling = matrix.format.scaling
    unit = scaling.rows if scaling is not None and scaling.rows else 1
    height = max(tuning.panel_rows(size, x) // unit, 1) * unit
    for start in range(0, num_rows, height):
        stop = min(start + height, num_rows)
        yield start, stop, formats.dequantize(matrix.rows(start, stop), x.dtype)


def joined(blocks: Blocks) -> Blocks:
    """Dense blocks that follow one another in memory, as a file may hold gate and up, as the one matrix they are."""
    if len(blocks) == 1 or not blocks[0].format.is_dense:
        return blocks
    first = blocks[0].data
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for block in blocks:
        data = block.data
        if not data.is_contiguous() or data.data_ptr() != end or data.untyped_storage().data_ptr() != storage:
            return blocks
        end += data.nbytes
    shape = (sum(block.shape[0] for block in blocks), first.shape[1])
    return (PackedTensor(first.as_strided(shape, first.stride()), blocks[0].format),)


def recorded(x: Tensor, stored: StoredExperts, e: int) -> Tensor:
    """x [n, K] times expert e's matrix -> [n, N], recorded by autograd.

    Weights that require a gradient get theirs. Those that do not are read again in the backward pass, panel by panel:
    nothing that was dequantised is kept.
    """
    blocks = stored.blocks(e)
    if any(block.data.requires_grad for block in blocks):
        return torch.cat([matmul(x, block.data, Way.ROWS) for block in blocks], dim=1)
    return recorded_product(x, blocks)


def recorded_product(x: Tensor, blocks: Blocks) -> Tensor:
    """`product`, of which autograd records the gradient of x."""
    y: Tensor = _Product.apply(x, blocks, False)  # type: ignore[no-untyped-call]
    return y


def _way(x: Tensor, block: PackedTensor) -> Way:
    if not block.format.is_dense:
        return tuning.choose_panel_way(x.shape[0], tuning.panel_dtype(x.shape[0], x.dtype))
    return Way.ROWS if x.dtype == block.data.dtype else tuning.choose_mixed_way(x.shape[0], x.device.type)


class _Product(torch.autograd.Function):
    """`product`, or `transposed_product` in float32 at least: each is the other's gradient."""

    @staticmethod
    def forward(x: Tensor, blocks: Blocks, transposed: bool) -> Tensor:
        if not transposed:
            return product(x, blocks)
        wide = torch.promote_types(x.dtype, torch.float32)
        return transposed_product(x.to(wide), blocks).to(x.dtype)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.blocks, ctx.transposed = inputs[1:]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Product.apply(grad, ctx.blocks, not ctx.transposed), None, None  # type: ignore[no-untyped-call]
