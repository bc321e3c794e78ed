"""Rows in the order of experts as expert_mlp's kernels have them, launched on their own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moestro.ops.grouping import triton


class Rows(NamedTuple):
    """What `triton.sizes` describes."""

    pairs: Tensor
    offsets: Tensor
    block_expert: Tensor
    block_start: Tensor
    num_blocks: Tensor


def rows(expert_ids: Tensor, num_experts: int, block_size: int) -> Rows:
    """The rows of expert_ids [T, K], in one or two launches as their number asks for."""
    ids = expert_ids.contiguous()
    sizes = triton.sizes(ids.numel(), num_experts, block_size)
    found = Rows(*(torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes))
    launch = triton.rows_launch(ids, num_experts, block_size)
    if launch is None:
        triton.in_chunks(ids, found, num_experts, (block_size, sizes[2]))
    else:
        launch(num_experts, ids, *found, ids.numel(), num_experts, sizes[2])
    return found
