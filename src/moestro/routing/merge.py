"""Experts that are nearly the same, stored once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moestro.errors import invalid_input, unsupported
from moestro.formats import PackedTensor, StoredExperts, dense
from moestro.formats.dense import DENSE_FORMATS
from moestro.weights import ExpertWeights

# Squared distances by way of a Gram matrix in float32 lose this much, relative to the squared norms.
_GRAM_SLACK = 1e-4


def merge_experts(weights: ExpertWeights, threshold: float = 0.0) -> tuple[ExpertWeights, Tensor]:
    """Store near-duplicate experts once.

    The distance of two experts is ``||a - b|| / max(||a||, ||b||)`` over all their weights and biases. Experts are
    taken in order of id; each joins the closest representative within the threshold, or becomes one itself. So a merged
    expert is never further than the threshold from what replaces it, and a threshold of 0 merges exact copies only.
    Runs on data: not for use under torch.compile.

    Args:
        weights: E experts, each projection one tensor of a dense format.
        threshold: relative distance, 0 <= threshold < 1.

    Returns:
        The weights of the E' <= E representatives (unchanged, in order of id), and the mapping, int64 [E] on the
        weights' device: `remap(routing, mapping)` goes with it.

    Raises:
        InvalidInputError: the threshold is out of range.
        UnsupportedError: the weights are quantised, or the experts are unstacked.
    """
    if not 0 <= threshold < 1:
        raise invalid_input(
            "merge_experts", got=f"threshold={threshold}", needs="0 <= threshold < 1", fix="0.01 is one per cent."
        )
    stacks = tuple(_stack(stored) for stored in (weights.gate_up, weights.down))
    parts = (*stacks, *(bias for bias in (weights.gate_up_bias, weights.down_bias) if bias is not None))
    kept: list[int] = []
    mapping: list[int] = []
    candidates = _candidates(parts, threshold)
    for e in range(weights.num_experts):
        near = [(_distance(parts, e, kept[r]), r) for r in range(len(kept)) if candidates[e][kept[r]]]
        best = min(near, default=(float("inf"), 0))
        if best[0] > threshold:
            best = (0.0, len(kept))
            kept.append(e)
        mapping.append(best[1])
    device = stacks[0].device
    return _take(weights, stacks, torch.tensor(kept, device=device)), torch.tensor(mapping, device=device)


def _stack(stored: StoredExperts) -> Tensor:
    if isinstance(stored, PackedTensor) and stored.format in DENSE_FORMATS:
        return stored.data
    unstacked = stored.format in DENSE_FORMATS
    raise unsupported(
        "merge_experts",
        got=f"weights in format {stored.format.name}{', each matrix a tensor of its own' if unstacked else ''}",
        needs="one tensor of a dense format (float32, bfloat16, float16, float64) for all experts",
        fix=f"Stack them with weights.quantize({stored.format.name!r})." if unstacked else "Merge before quantising.",
    )


def _candidates(parts: tuple[Tensor, ...], threshold: float) -> list[list[bool]]:
    """[E][E]: pairs that may be within the threshold, by an inexact distance that errs on the side of yes."""
    gram = torch.zeros(len(parts[0]), len(parts[0]), dtype=torch.float64, device=parts[0].device)
    for part in parts:
        flat = part.detach().reshape(len(part), -1).float()
        gram += (flat @ flat.T).double()
    norms = gram.diagonal()
    squared = norms[:, None] + norms[None, :] - 2 * gram
    larger = torch.maximum(norms[:, None], norms[None, :])
    possible: list[list[bool]] = (squared <= (threshold**2 + _GRAM_SLACK) * larger).tolist()
    return possible


def _distance(parts: tuple[Tensor, ...], a: int, b: int) -> float:
    squared = norm_a = norm_b = 0.0
    for part in parts:
        x, y = part[a].detach().double(), part[b].detach().double()
        squared += float((x - y).square().sum())
        norm_a += float(x.square().sum())
        norm_b += float(y.square().sum())
    return float((squared / max(norm_a, norm_b)) ** 0.5) if squared else 0.0


def _take(weights: ExpertWeights, stacks: tuple[Tensor, ...], experts: Tensor) -> ExpertWeights:
    gate_up, down = (dense(stack[experts]) for stack in stacks)
    return replace(
        weights,
        gate_up=gate_up,
        down=down,
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias[experts],
        down_bias=None if weights.down_bias is None else weights.down_bias[experts],
    )
