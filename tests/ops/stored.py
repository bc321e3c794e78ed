"""Experts in every format, stacked and apart: what the tests of stored experts are run on."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from moestro import ExpertWeights
from moestro.formats import FORMATS, PackedTensor, SplitTensor, StoredExperts, dequantize

from . import problems

PACKED = [name for name, form in FORMATS.items() if not form.is_dense]


def sizes_for(name: str, num_tokens: int = 9, num_experts: int = 4, top_k: int = 2) -> problems.Sizes:
    """The least H and I that the format's groups allow; off every tile where they ask for nothing."""
    scaling = FORMATS[name].scaling
    group = 0 if scaling is None or scaling.rows > 1 else scaling.columns
    hidden, intermediate = (group, group) if group else (150, 74) if scaling and scaling.rows > 1 else (37, 21)
    return problems.Sizes(num_tokens, hidden, intermediate, num_experts, top_k)


def apart(weights: ExpertWeights) -> ExpertWeights:
    """The same experts as checkpoints of one tensor a projection have them: gate, up and down of each on their own."""
    halves = 2 if weights.activation.gated else 1
    return replace(weights, gate_up=_cut(weights.gate_up, halves), down=_cut(weights.down, 1))


def moved(weights: ExpertWeights, device: torch.device) -> ExpertWeights:
    """The same experts on another device."""
    moved: ExpertWeights = pytree.tree_map(lambda t: t if t is None else t.to(device), weights)
    return moved


def _cut(stored: StoredExperts, parts: int) -> SplitTensor:
    num_experts, num_rows, _ = stored.shape
    scaling = stored.format.scaling
    height = scaling.rows if scaling is not None else 1
    if parts == 2 and height != 1 and (num_rows // 2) % max(height, num_rows):
        parts = 1  # the two halves share scales
    matrices = []
    for e in range(num_experts):
        matrix = stored.blocks(e)[0]
        cuts = [(i * num_rows // parts, (i + 1) * num_rows // parts) for i in range(parts)]
        matrices.append(tuple(_clone(matrix.rows(a, b)) for a, b in cuts))
    return SplitTensor(tuple(matrices))


def _clone(matrix: PackedTensor) -> PackedTensor:
    copies = (None if t is None else t.clone() for t in (matrix.scales, matrix.zeros, matrix.global_scales))
    return PackedTensor(matrix.data.clone(), matrix.format, *copies)


def dequantized(weights: ExpertWeights, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    """The same experts as ordinary tensors."""

    def stack(stored: StoredExperts) -> PackedTensor:
        experts = [torch.cat([dequantize(b, dtype) for b in stored.blocks(e)]) for e in range(stored.shape[0])]
        return PackedTensor(torch.stack(experts), FORMATS[str(dtype).removeprefix("torch.")])

    return replace(weights, gate_up=stack(weights.gate_up), down=stack(weights.down))


def poison(stored: StoredExperts, e: int) -> None:
    """Make whatever reads expert e read NaN."""
    for matrix in stored.blocks(e):
        numbers: Tensor = matrix.data if matrix.scales is None else matrix.scales
        if numbers.dtype in (torch.uint8, torch.float8_e4m3fn):
            numbers.view(torch.uint8).fill_(0xFF)
        else:
            numbers.fill_(torch.nan)


def widths(name, lanes):
    """On both sides of the vectors of bytes, and of the blocks of 32 * lanes nibbles and shared ones of 8 * lanes."""
    form = FORMATS[name]
    if form.per_item == 1:
        return [1, 3, 7, 4 * lanes - 1, 4 * lanes, 4 * lanes + 1, 8 * lanes + 2, 33]
    group, block, shared = form.scaling.columns, 32 * lanes, 8 * lanes
    wanted = (group, 3 * group, block - group, block, block + group, block + shared + group, 2 * block + 3 * shared)
    return sorted({-(-n // group) * group for n in wanted} - {0})
