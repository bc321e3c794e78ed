"""The four strategies in plain torch: four walks over the same work, `expert_rows`.

Differentiable when any input requires a gradient; otherwise buffers are reused and written in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.ops.expert_mlp.matmul import Way, matmul
from moestro.ops.expert_mlp.tuning import choose_way
from moestro.ops.grouping import plain as grouping
from moestro.reference import activate
from moestro.types import Activation, Routing
from moestro.weights import ExpertWeights

Group = tuple[int, Tensor, Tensor]
"""An expert, its rows [n, H], and the weight of each row [n]."""


def expert_rows(x: Tensor, weights: ExpertWeights, e: int, row_weights: Tensor | None) -> Tensor:
    """row_weights * E_e(x) for rows x [n, H] -> [n, H]; in float32 where the rows are computed in it."""
    stored = weights.gate_up.data.dtype
    way = choose_way(x.shape[0], stored, x.device.type) if x.dtype == stored else Way.ROWS
    grad = needs_grad(x, row_weights, *weights.tensors)
    if grad:
        way = Way.ROWS
    widened = way in (Way.WIDEN, Way.WIDEN_COLUMNS)
    x = x.to(torch.float32 if widened else torch.promote_types(x.dtype, stored))

    h = matmul(x, _matrix(weights.gate_up.data, e, x, widened), way)
    if weights.gate_up_bias is not None:
        h = h + weights.gate_up_bias[e] if grad else h.add_(weights.gate_up_bias[e])
    a = activate(h, weights.activation) if grad else _activate_in_place(h, weights.activation)

    late = weights.output_norm is not None
    scale = None if row_weights is None else row_weights[:, None]
    if scale is not None and not late:
        # W (s a) = s (W a): the narrow side of the second matmul is the cheap one to weight.
        a = (a * scale).to(a.dtype) if grad else a.mul_(scale)
    y = matmul(a.to(x.dtype), _matrix(weights.down.data, e, x, widened), way)
    if weights.down_bias is not None:
        bias = weights.down_bias[e].to(y.dtype)
        y = y + (bias if late or scale is None else (scale * bias).to(y.dtype))
    if weights.output_norm is not None:
        y = weights.output_norm(y)
        y = y if scale is None else (y * scale).to(y.dtype)
    return y


def _matrix(stack: Tensor, e: int, x: Tensor, widened: bool) -> Tensor:
    return stack[e] if widened or stack.dtype == x.dtype else stack[e].to(x.dtype)


def _activate_in_place(h: Tensor, activation: Activation) -> Tensor:
    if activation.kind == "silu" and activation.alpha == 1 and activation.limit is None and not activation.up_offset:
        if not activation.gated:
            return F.silu(h, inplace=True)
        gate, up = (h[..., ::2], h[..., 1::2]) if activation.interleaved else h.chunk(2, dim=-1)
        return F.silu(gate, inplace=True).mul_(up)
    return activate(h, activation)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd is recording and any of the tensors asks for it."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def run_groups(routing: Routing, weights: ExpertWeights, groups: Iterable[Group]) -> Iterator[Tensor]:
    """Weighted expert outputs of each group of rows, in the order of the groups."""
    for e, rows, row_weights in groups:
        if routing.weight_on == "input":
            yield expert_rows((rows * row_weights[:, None]).to(rows.dtype), weights, e, None)
        else:
            yield expert_rows(rows, weights, e, row_weights)


def gather_rows(outputs: Iterable[Tensor], num_rows: int, like: Tensor, grad: bool) -> Tensor:
    """The outputs one below the other, and a last row of zeros for empty slots: [num_rows + 1, H]."""
    # Half precision overflows where the sum of the slots need not.
    dtype = torch.float32 if like.dtype == torch.float16 else like.dtype
    if grad:
        return torch.cat([*(o.to(dtype) for o in outputs), like.new_zeros(1, like.shape[1], dtype=dtype)])
    rows = torch.empty(num_rows + 1, like.shape[1], dtype=dtype, device=like.device)
    start = 0
    for output in outputs:
        rows[start : start + output.shape[0]] = output
        start += output.shape[0]
    rows[start:] = 0
    return rows


def sum_slots(rows: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """y[t] = sum over k of rows[places[t, k]], slot after slot, accumulated in float32 (float64 for float64)."""
    return F.embedding_bag(places, rows, mode="sum").to(dtype)


def _finish(
    x: Tensor, routing: Routing, weights: ExpertWeights, groups: Iterable[Group], places: Tensor, num_rows: int
) -> Tensor:
    grad = needs_grad(x, routing.routing_weights, *weights.tensors)
    rows = gather_rows(run_groups(routing, weights, groups), num_rows, x, grad)
    return sum_slots(rows, places, x.dtype)


def grouped(x: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """Rows ordered by expert, one matmul of any height per expert; experts without rows are never touched."""
    order = grouping.group_by_expert(routing.expert_ids, weights.num_experts)
    offsets = order.offsets.tolist()
    num_rows = offsets[-1]
    row_weights = routing.routing_weights.reshape(-1)[order.token_ids * routing.top_k + order.slots]

    def groups() -> Iterator[Group]:
        for e, (a, b) in enumerate(pairwise(offsets)):
            if a < b:
                yield e, x.index_select(0, order.token_ids[a:b]), row_weights[a:b]

    places = order.inverse.clamp(max=num_rows).reshape(routing.expert_ids.shape)
    return _finish(x, routing, weights, groups(), places, num_rows)


def selective(x: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """Walk the pairs themselves: for few of them, each distinct expert is read once and nothing is sorted."""
    flat_ids = routing.expert_ids.reshape(-1).tolist()
    pairs_of: dict[int, list[int]] = {}
    for pair, e in enumerate(flat_ids):
        if e >= 0:
            pairs_of.setdefault(e, []).append(pair)
    ordered = [pair for pairs in pairs_of.values() for pair in pairs]
    flat = routing.routing_weights.reshape(-1)

    def groups() -> Iterator[Group]:
        for e, pairs in pairs_of.items():
            if len(pairs) == 1:
                t = pairs[0] // routing.top_k
                yield e, x[t : t + 1], flat[pairs[0] : pairs[0] + 1]
            else:
                index = torch.tensor(pairs, device=x.device)
                yield e, x.index_select(0, index // routing.top_k), flat.index_select(0, index)

    place = {pair: row for row, pair in enumerate(ordered)}
    places = torch.tensor([place.get(pair, len(ordered)) for pair in range(len(flat_ids))], device=x.device)
    return _finish(x, routing, weights, groups(), places.reshape(routing.expert_ids.shape), len(ordered))


def blockwise(x: Tensor, routing: Routing, weights: ExpertWeights, block_size: int) -> Tensor:
    """Fixed blocks of one expert each, laid out by `moestro.block_schedule`.

    Padded cells are never loaded, empty blocks never run, and consecutive blocks of one expert read it once.
    """
    schedule = grouping.block_schedule(routing.expert_ids, weights.num_experts, block_size)
    runs = [(e, sum(1 for _ in run)) for e, run in groupby(schedule.block_experts.tolist()) if e >= 0]
    num_cells = sum(length for _, length in runs) * block_size
    places = torch.where(schedule.scatter_index < 0, num_cells, schedule.scatter_index)
    cells = places.reshape(-1)
    blocked = x.new_zeros(num_cells + 1, x.shape[1]).index_copy(0, cells, x.repeat_interleave(routing.top_k, 0))
    flat = routing.routing_weights.reshape(-1)
    cell_weights = flat.new_zeros(num_cells + 1).index_copy(0, cells, flat)

    def groups() -> Iterator[Group]:
        start = 0
        for e, length in runs:
            stop = start + length * block_size
            yield e, blocked[start:stop], cell_weights[start:stop]
            start = stop

    return _finish(x, routing, weights, groups(), places, num_cells)


def all_experts(x: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """Every expert on every token, masked at the combine; no step depends on the routing's values."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for e in range(weights.num_experts):
        chosen = routing.expert_ids == e
        hit = chosen.any(1, keepdim=True)
        if routing.weight_on == "input":
            for k in range(routing.top_k):
                w = routing.routing_weights[:, k, None].masked_fill(~chosen[:, k, None], 0.0)
                y = y + torch.where(chosen[:, k, None], expert_rows((x * w).to(x.dtype), weights, e, None), 0.0)
        else:
            w = routing.routing_weights.masked_fill(~chosen, 0.0).sum(1)
            y = y + torch.where(hit, expert_rows(x, weights, e, w), 0.0)
    return y.to(x.dtype)
