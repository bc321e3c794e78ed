"""The specification: a routed-expert layer in plain torch, to be checked by eye against its formulas.

Every other implementation is tested against this file. It dequantises a whole expert at a time and computes in float32,
or in float64 when given float64 weights; it is slow and does not try to be anything else. T, H, I, E, K as in
`moestro.types`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.formats import PackedTensor, StoredExperts, dequantize, floats, integers
from moestro.formats.elements import E4M3_LARGEST, divided, round_e4m3
from moestro.types import EMPTY, Activation, InputFormat, Routing
from moestro.weights import ExpertWeights

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda z: z,
}


def activate(z: Tensor, activation: Activation) -> Tensor:
    """Between the two matmuls: [..., 2 * I] (gated) or [..., I] -> [..., I]."""
    if activation.function is not None:
        return activation.function(z)
    gate, up = z, None
    if activation.gated:
        gate, up = (z[..., ::2], z[..., 1::2]) if activation.interleaved else z.chunk(2, dim=-1)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = None if up is None else up.clamp(-activation.limit, activation.limit)
    if activation.kind == "silu":
        gate = gate * torch.sigmoid(activation.alpha * gate)
    else:
        gate = _FUNCTIONS[activation.kind](gate)
    return gate if up is None else gate * (up + activation.up_offset)


def matrix(stored: StoredExperts, e: int, dtype: torch.dtype) -> Tensor:
    """Expert e's matrix [N, K] as the numbers that the stored bytes stand for."""
    return torch.cat([dequantize(block, dtype) for block in stored.blocks(e)])


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [R, K] as 8-bit integers and one float32 scale each: integers [R, K] within +-127, scales [R, 1].

    s = max |x| / 127 and q = the integer nearest to x / s, ties to even, all in float32. Where s is 0, so is q; a row
    with NaN or infinity has the scale NaN.
    """
    x = x.float()
    if x.shape[1] == 0:
        return x, x.new_zeros(x.shape[0], 1)
    s = divided(x.abs().amax(1, keepdim=True), 127)
    usable = (s > 0) & torch.isfinite(s)
    q = torch.where(usable, (x / s).round().clamp(-127, 127), 0)
    return q, torch.where(torch.isfinite(s), s, torch.nan)


def round_rows_e4m3(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Rows x [R, K] as values of e4m3 and float32 scales: values [R, K] within +-448, scales [R, ceil(K / columns)].

    s = max |x| / 448 of each `columns` of a row, of which the last may be fewer, and q = the e4m3 value nearest to
    x / s, ties to the even code, all in float32. Where s is 0, so is q; what shares its scale with NaN or infinity has
    the scale NaN.
    """
    if x.shape[1] == 0:
        return x.float(), x.new_zeros(x.shape[0], 1, dtype=torch.float32)
    values, scales = [], []
    for part in torch.split(x.float(), columns, dim=1):
        s = divided(part.abs().amax(1, keepdim=True), E4M3_LARGEST)
        usable = (s > 0) & torch.isfinite(s)
        values.append(torch.where(usable, round_e4m3(torch.where(usable, part / s, 0.0)), 0.0))
        scales.append(torch.where(torch.isfinite(s), s, torch.nan))
    return torch.cat(values, 1), torch.cat(scales, 1)


def product(x: Tensor, stored: StoredExperts, e: int, rows: InputFormat) -> Tensor:
    """Rows x [R, K] times expert e's matrix [N, K], transposed -> [R, N], in the dtype of x.

    Int8 or fp8-e4m3 inputs: in float64 the sum of a group of weights that share a scale is exact, and one scale of the
    weights and one of the row are all that meets it.
    """
    if rows == "float":
        return x @ matrix(stored, e, x.dtype).T
    if rows == "fp8-e4m3":
        return torch.cat([_product_of_floats(x, block) for block in stored.blocks(e)], dim=1)
    q, s = round_rows(x)
    parts = []
    for block in stored.blocks(e):
        values, steps = integers(block)
        sums = x.new_zeros(x.shape[0], block.shape[0])
        size = -(-values.shape[1] // max(steps.shape[1], 1))
        for g in range(steps.shape[1]):
            columns = slice(g * size, (g + 1) * size)
            exact = q[:, columns].double() @ values[:, columns].double().T
            sums = sums + exact.to(x.dtype) * steps[:, g].to(x.dtype)
        parts.append(sums)
    return torch.cat(parts, dim=1) * s.to(x.dtype)


def _product_of_floats(x: Tensor, block: PackedTensor) -> Tensor:
    """`product` of fp8-e4m3 inputs; the columns that share a scale of the weights share one of a row."""
    values, steps, columns = floats(block)
    q, s = round_rows_e4m3(x, columns)
    y = x.new_zeros(x.shape[0], block.shape[0])
    for g in range(steps.shape[1]):
        of_group = slice(g * columns, (g + 1) * columns)
        exact = q[:, of_group].double() @ values[:, of_group].double().T
        y = y + exact.to(x.dtype) * steps[:, g].to(x.dtype) * s[:, g, None].to(x.dtype)
    return y


def one_expert(x: Tensor, weights: ExpertWeights, e: int) -> Tensor:
    """E_e(x) for rows x [R, H] -> [R, H], in the dtype of x."""
    h = product(x, weights.gate_up, e, weights.input_format)
    if weights.gate_up_bias is not None:
        h = h + weights.gate_up_bias[e].to(x.dtype)
    y = product(activate(h, weights.activation), weights.down, e, weights.input_format)
    if weights.down_bias is not None:
        y = y + weights.down_bias[e].to(x.dtype)
    return y if weights.output_norm is None else weights.output_norm(y)


def expert_mlp(x: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """y[t] = sum over k of w[t, k] * E_{id[t, k]}(x[t]), slot after slot; id = -1 adds nothing.

    x [T, H], routing [T, K], weights of any format -> [T, H] in float32, or float64 if x or a weight is float64.
    """
    stored = (weights.gate_up.format.storage, weights.down.format.storage)
    wide = torch.float64 if torch.float64 in (x.dtype, *stored) else torch.float32
    x = x.to(wide)
    y = torch.zeros_like(x)
    for k in range(routing.top_k):
        for e in range(weights.num_experts):
            (tokens,) = (routing.expert_ids[:, k] == e).nonzero(as_tuple=True)
            if len(tokens) == 0:
                continue
            w = routing.routing_weights[tokens, k, None].to(wide)
            if routing.weight_on == "input":
                y = y.index_add(0, tokens, one_expert(x[tokens] * w, weights, e))
            else:
                y = y.index_add(0, tokens, one_expert(x[tokens], weights, e) * w)
    return y


def topk(scores: Tensor, k: int) -> Tensor:
    """Indices [T, k] of the k largest of scores [T, E], largest first; of equal scores the larger index wins."""
    flipped = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    return scores.shape[-1] - 1 - flipped[..., :k]


def group_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[list[int], list[int], list[int]]:
    """(token, slot) pairs in expert order, earlier pairs first: token ids, slots, offsets [E + 1]."""
    tokens, slots, offsets = [], [], [0]
    rows = expert_ids.tolist()
    for e in range(num_experts):
        for t, row in enumerate(rows):
            for k, expert in enumerate(row):
                if expert == e:
                    tokens.append(t)
                    slots.append(k)
        offsets.append(len(tokens))
    return tokens, slots, offsets


def block_schedule(expert_ids: Tensor, num_experts: int, block_size: int) -> list[tuple[int, list[int]]]:
    """(expert, pair ids padded with -1 to block_size) of every block that is needed, in expert order."""
    tokens, slots, offsets = group_by_expert(expert_ids, num_experts)
    pairs = [t * expert_ids.shape[1] + k for t, k in zip(tokens, slots, strict=True)]
    blocks = []
    for e in range(num_experts):
        for start in range(offsets[e], offsets[e + 1], block_size):
            block = pairs[start : min(start + block_size, offsets[e + 1])]
            blocks.append((e, block + [EMPTY] * (block_size - len(block))))
    return blocks
