"""A kernel around the loop of the engine's: one matrix of a stack times a few rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moestro.formats import PackedTensor
from moestro.ops import triton_stored
from moestro.ops.expert_mlp import triton_kernels
from moestro.ops.expert_mlp.triton_kernels import product
from moestro.ops.triton_order import Arranging, order_of


@triton.jit
def kernel(
    x, x_stride, w, order, y, experts, T, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * BN
    columns = first + tl.arange(0, BN)
    live = rows < T
    expert = tl.load(experts)
    acc = product(
        x + tl.minimum(rows, T - 1) * x_stride, None, rows, live, w, None, order, expert, first, columns,
        K, 0, K, BM, BN, BK, DTYPE, SWAP, order is not None,
    )  # fmt: skip
    tl.store(y + rows[:, None] * N + columns[None, :], acc, mask=live[:, None] & (columns < N)[None, :])


def times(x: Tensor, stored: PackedTensor, expert: int, depth: int, swap: bool = False) -> Tensor:
    """x [T, K] times an expert's matrix [N, K], transposed -> float32 [T, N], in tiles of 16 x 32 x `depth`."""
    (t, k), n = x.shape, stored.shape[1]
    y = torch.empty(t, n, device=x.device, dtype=torch.float32)
    wide = torch.promote_types(x.dtype, stored.data.dtype) if stored.format.is_dense else x.dtype
    experts = torch.tensor([expert], dtype=torch.int32, device=x.device)
    kernel[(triton.cdiv(t, 16), triton.cdiv(n, 32))](
        x, k, triton_stored.describe(stored), None, y, experts, t, n, k,
        BM=16, BN=32, BK=depth, SWAP=swap, DTYPE=triton_kernels.DTYPES[wide],
    )  # fmt: skip
    return y


def arranged(x: Tensor, stored: PackedTensor, depth: int) -> Tensor:
    """x [T, K] with its columns in the order for steps of so many columns, filled up with zeros."""
    of = Arranging(order_of(stored, depth), x.shape[1])
    found = torch.full((len(x), of.size), torch.nan, dtype=x.dtype, device=x.device)
    of.launch(len(x) * of.parts, x, x.stride(0), found, x.shape[1], of.size, of.parts, of.order)
    return found


def times_arranged(x: Tensor, stored: PackedTensor, expert: int, depth: int) -> Tensor:
    """The same as `times` of rows in order, in tiles of 64 x 64, where `stored` is taken for Hopper's."""
    (t, k), n = x.shape, stored.shape[1]
    y = torch.empty(t, n, device=x.device, dtype=torch.float32)
    experts = torch.tensor([expert], dtype=torch.int32, device=x.device)
    rows = arranged(x, stored, depth)
    weights = triton_stored.describe(stored)._replace(warpgroups=tl.constexpr(True))
    kernel[(triton.cdiv(t, 64), triton.cdiv(n, 64))](
        rows, rows.stride(0), weights, order_of(stored, depth), y, experts, t, n, k,
        BM=64, BN=64, BK=depth, SWAP=True, DTYPE=triton_kernels.DTYPES[x.dtype],
    )  # fmt: skip
    return y
