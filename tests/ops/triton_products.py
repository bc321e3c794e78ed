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


@triton.jit
def kernel(
    x, w, y, experts, T, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * BN
    columns = first + tl.arange(0, BN)
    live = rows < T
    expert = tl.load(experts)
    acc = product(x + rows * K, None, rows, live, w, None, expert, first, columns, K, 0, K, BM, BN, BK, DTYPE, SWAP)
    tl.store(y + rows[:, None] * N + columns[None, :], acc, mask=live[:, None] & (columns < N)[None, :])


def times(x: Tensor, stored: PackedTensor, expert: int, depth: int, swap: bool = False) -> Tensor:
    """x [T, K] times an expert's matrix [N, K], transposed -> float32 [T, N], in tiles of 16 x 32 x `depth`."""
    (t, k), n = x.shape, stored.shape[1]
    y = torch.empty(t, n, device=x.device, dtype=torch.float32)
    wide = torch.promote_types(x.dtype, stored.data.dtype) if stored.format.is_dense else x.dtype
    experts = torch.tensor([expert], dtype=torch.int32, device=x.device)
    kernel[(triton.cdiv(t, 16), triton.cdiv(n, 32))](
        x, triton_stored.describe(stored), y, experts, t, n, k,
        BM=16, BN=32, BK=depth, SWAP=swap, DTYPE=triton_kernels.DTYPES[wide],
    )  # fmt: skip
    return y
