"""The four strategies in plain torch: four walks over the same work, `expert_rows`.

Differentiable when any input requires a gradient; otherwise buffers are reused and written in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro import formats, machine
from moestro.formats import StoredExperts
from moestro.formats.dense import DENSE_FORMATS
from moestro.ops import grouping
from moestro.ops.dispatch import Prepared
from moestro.ops.expert_mlp.input_formats import low_precision_spans
from moestro.ops.expert_mlp.matmul import Span, Way, matmul, matmul_spans
from moestro.ops.expert_mlp.stored import recorded, stored_spans
from moestro.ops.expert_mlp.tuning import (
    ACCUMULATE_BYTES,
    batch_rows,
    choose_strategy,
    choose_ways,
    compute_dtype,
    dense_stack,
    named_strategy,
)
from moestro.ops.grouping.tuning import choose_block_size
from moestro.ops.tensors import no_gradient, without_autocast
from moestro.reference import activate
from moestro.types import Activation, Routing
from moestro.weights import ExpertWeights


def prepare(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> Prepared | str:
    """The call in plain torch, or the reason why there is none."""
    reason = why_unsupported(x, routing, weights)
    if reason is not None:
        return reason
    name, block_size, why = named_strategy(strategy)
    if name == "auto":
        name, why = choose_strategy(routing.expert_ids.numel(), weights.planned_experts)
    walk = _WALKS.get(name)
    if walk is None:
        size = block_size or measured_block_size(x, routing, weights)
        walk = functools.partial(blockwise, block_size=size)
    chosen: Walk = nothing if routing.expert_ids.numel() == 0 else walk
    # float16 cannot hold every product of x and a weight, and the low-precision inputs are rounded from float32.
    weighted = x.dtype == torch.float16 and routing.weight_on == "input"
    widened = weighted or (weights.input_format != "float" and x.dtype in (torch.bfloat16, torch.float16))

    def compute(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> Tensor:
        y = chosen(x.float() if widened else x, routing, weights)
        return y.to(x.dtype)

    return Prepared("torch", without_autocast(x, compute), name, why)


def why_unsupported(x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    """Why plain torch, or the reference, cannot compute this; None if it can."""
    for name, stored in (("gate_up", weights.gate_up), ("down", weights.down)):
        form = stored.format
        if form not in DENSE_FORMATS:
            if formats.FORMATS.get(form.name) != form:
                return f"it reads the formats of moestro.formats.FORMATS, and {name} is stored as {form.name}"
            if torch.is_grad_enabled() and any(t.requires_grad for t in stored.tensors):
                return f"experts stored as {form.name} are not trained, and a tensor of {name} requires a gradient"
    if weights.input_format != "float" and no_gradient(x, routing.routing_weights, *weights.tensors):
        return (
            f"inputs rounded to {weights.input_format} have no gradient, and a tensor requires one: "
            "call it under torch.no_grad()"
        )
    return "meta tensors hold no values to compute with" if x.device.type == "meta" else None


def measured_block_size(x: Tensor, routing: Routing, weights: ExpertWeights) -> int:
    """The block size for this shape on this machine, from its measured roof (one to two seconds, once a process)."""
    roof = machine.roof(x.dtype, x.device.type)
    bytes_per_weight = weights.gate_up.format.bits / 8
    return choose_block_size(routing.expert_ids.numel(), weights.planned_experts, roof.balance, bytes_per_weight)


class Batch(NamedTuple):
    """Rows [n, H] computed together, by the experts of spans that cover them; from `used` on they are padding."""

    spans: list[Span]
    rows: Tensor
    used: int


def expert_rows(rows: Tensor, weights: ExpertWeights, spans: Sequence[Span], out: Tensor | None = None) -> Tensor:
    """E_e(x) for rows [n, H] covered by spans -> [n, H], written to `out` if given; no gradient is recorded.

    Weights that have a `rows_of` are asked for the rows instead: `moestro.memory.waves` has such.
    """
    rows_of = getattr(weights, "rows_of", None)
    if rows_of is not None:
        y: Tensor = rows_of(rows, spans, out)
        return y
    first, last = weights.gate_up, weights.down
    if weights.input_format != "float":
        to = weights.input_format
        h = low_precision_spans(rows, first, spans, to)
        return _after(rows, weights, spans, h, lambda a: low_precision_spans(a, last, spans, to, out))
    wide = compute_dtype(rows, weights)
    ways = choose_ways(rows, first, spans, wide)
    h = _times(rows, first, spans, ways, wide, None)
    if last.format is not first.format:
        ways = choose_ways(rows, last, spans, wide)
    return _after(rows, weights, spans, h, lambda a: _times(a, last, spans, ways, wide, out))


def _after(
    rows: Tensor, weights: ExpertWeights, spans: Sequence[Span], h: Tensor, down: Callable[[Tensor], Tensor]
) -> Tensor:
    """What follows the first product, `down` being the second; h is overwritten."""
    if weights.gate_up_bias is not None:
        h.add_(_of_rows(weights.gate_up_bias, spans))
    y = down(_activate_in_place(h, weights.activation, rows.dtype))
    if weights.down_bias is not None:
        y.add_(_of_rows(weights.down_bias, spans))
    return y if weights.output_norm is None else y.copy_(weights.output_norm(y.to(rows.dtype)))


def _times(
    x: Tensor, stored: StoredExperts, spans: Sequence[Span], ways: Sequence[Way], dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    stack = dense_stack(stored)
    if stack is None:
        return stored_spans(x, stored, spans, ways, dtype, out)
    return matmul_spans(x, stack, spans, ways, dtype, out)


def _of_rows(bias: Tensor, spans: Sequence[Span]) -> Tensor:
    """The bias [E, N] of each row's expert: [n, N], or [N] for a single span."""
    if len(spans) == 1:
        return bias[spans[0].expert]
    owners = [e for e, start, stop in spans for _ in range(start, stop)]
    return bias.index_select(0, torch.tensor(owners, device=bias.device))


def differentiable_rows(rows: Tensor, weights: ExpertWeights, e: int) -> Tensor:
    """E_e(x) for rows [n, H] -> [n, H], every step recorded by autograd."""
    h = _times_recorded(rows, weights.gate_up, e, weights)
    if weights.gate_up_bias is not None:
        h = h + weights.gate_up_bias[e]
    if weights.activation.function is not None:
        a = weights.activation.function(h.to(rows.dtype)).to(h.dtype)
    else:
        a = activate(h, weights.activation)
    y = _times_recorded(a, weights.down, e, weights)
    if weights.down_bias is not None:
        y = y + weights.down_bias[e]
    return y if weights.output_norm is None else weights.output_norm(y.to(rows.dtype))


def _times_recorded(x: Tensor, stored: StoredExperts, e: int, weights: ExpertWeights) -> Tensor:
    wide = torch.promote_types(x.dtype, compute_dtype(x, weights))
    stack = dense_stack(stored)
    return recorded(x.to(wide), stored, e) if stack is None else matmul(x.to(wide), stack[e], Way.ROWS)


def _activate_in_place(h: Tensor, activation: Activation, dtype: torch.dtype) -> Tensor:
    if activation.function is not None:
        return activation.function(h.to(dtype)).to(h.dtype)
    if activation.kind == "silu" and activation.alpha == 1 and activation.limit is None and not activation.up_offset:
        if not activation.gated:
            return F.silu(h, inplace=True)
        gate, up = (h[..., ::2], h[..., 1::2]) if activation.interleaved else h.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    return activate(h, activation)


def records(x: Tensor, routing: Routing, weights: ExpertWeights) -> bool:
    """Whether autograd is recording something here; a Python function may hide parameters of its own."""
    if not torch.is_grad_enabled():
        return False
    if weights.activation.function is not None or weights.output_norm is not None:
        return True
    return any(t.requires_grad for t in (x, routing.routing_weights, *weights.tensors))


def nothing(x: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """What an all-empty routing computes: zeros like x, and a zero gradient for every input."""
    y = x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0.0)
    if records(x, routing, weights):
        for tensor in (routing.routing_weights, *weights.tensors):
            if tensor.requires_grad:
                y = y + tensor[:0].sum().to(y.dtype)
    return y


class PairRows(NamedTuple):
    """The row of each pair [T, K] among all, `num_rows` for an empty slot; `complete` where there is none."""

    of_pairs: Tensor
    num_rows: int
    complete: bool


def _run(x: Tensor, routing: Routing, weights: ExpertWeights, batches: Iterable[Batch], pair_rows: PairRows) -> Tensor:
    """Compute the batches and add up each token's slots."""
    num_rows = pair_rows.num_rows
    if num_rows == 0:
        return nothing(x, routing, weights)
    # Half precision overflows where the sum of the slots need not.
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    slot_weights = routing.routing_weights
    if routing.weight_on == "input":
        slot_weights = torch.ones_like(slot_weights)
    elif not pair_rows.complete:
        slot_weights = slot_weights.masked_fill(pair_rows.of_pairs >= num_rows, 0.0)
    if records(x, routing, weights):
        parts = [*_recorded(batches, weights, dtype), x.new_zeros(1, x.shape[1], dtype=dtype)]
        return (torch.cat(parts)[pair_rows.of_pairs] * slot_weights[..., None]).sum(1).to(x.dtype)
    out, start = None, 0
    for spans, rows, _ in batches:
        if pair_rows.complete and rows.shape[0] == num_rows:
            out = expert_rows(rows, weights, spans).to(dtype)
            break
        if out is None:
            out = torch.empty(num_rows + 1, x.shape[1], dtype=dtype, device=x.device)
            out[num_rows] = 0
        expert_rows(rows, weights, spans, out[start : start + rows.shape[0]])
        start += rows.shape[0]
    assert out is not None
    return weighted_sum(out, pair_rows.of_pairs, slot_weights).to(x.dtype)


def _recorded(batches: Iterable[Batch], weights: ExpertWeights, dtype: torch.dtype) -> Iterator[Tensor]:
    """The outputs of all rows in order; padding is zeros, since 0 times a NaN of its gradient would spread."""
    for spans, rows, used in batches:
        for e, start, stop in spans:
            yield differentiable_rows(rows[start : min(stop, used)], weights, e).to(dtype)
        yield rows.new_zeros(rows.shape[0] - used, rows.shape[1], dtype=dtype)


def weighted_sum(rows: Tensor, pair_rows: Tensor, slot_weights: Tensor) -> Tensor:
    """y[t] = sum over k of slot_weights[t, k] * rows[pair_rows[t, k]], in one pass, accumulated in float32 or wider.

    The pass takes weights of the rows' dtype. A float32 weight is the sum of two bfloat16 ones up to 2^-17 of it.
    """
    if rows.dtype == torch.bfloat16:
        high = slot_weights.to(rows.dtype)
        low = (slot_weights - high).to(rows.dtype)
        pair_rows, slot_weights = torch.cat([pair_rows, pair_rows], 1), torch.cat([high, low], 1)
    return F.embedding_bag(pair_rows, rows, per_sample_weights=slot_weights.to(rows.dtype), mode="sum")


def _weighted_input(rows: Tensor, pair_weights: Tensor, routing: Routing) -> Tensor:
    """The rows as the experts see them: times their weights where the model weights the input."""
    return (rows * pair_weights[:, None]).to(rows.dtype) if routing.weight_on == "input" else rows


def grouped(x: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """Rows ordered by expert, one matmul of any height per expert; experts without rows are never touched."""
    order = grouping.run(routing.expert_ids, weights.num_experts)
    offsets = order.offsets.tolist()
    num_rows = offsets[-1]
    row_weights = routing.routing_weights.reshape(-1)[order.token_ids * routing.top_k + order.slots]

    def batches() -> Iterator[Batch]:
        for spans in batch_spans(offsets, batch_rows(weights.gate_up)):
            start, stop = spans[0].start, spans[-1].stop
            rows = x.index_select(0, order.token_ids[start:stop])
            local = [Span(e, a - start, b - start) for e, a, b in spans]
            yield Batch(local, _weighted_input(rows, row_weights[start:stop], routing), stop - start)

    if not records(x, routing, weights) and num_rows * x.shape[1] * x.element_size() > ACCUMULATE_BYTES:
        return _accumulate(x, routing, weights, batches(), order.token_ids, row_weights)
    pair_rows = order.inverse.clamp(max=num_rows).reshape(routing.expert_ids.shape)
    return _run(x, routing, weights, batches(), PairRows(pair_rows, num_rows, num_rows == pair_rows.numel()))


def _accumulate(
    x: Tensor, routing: Routing, weights: ExpertWeights, batches: Iterable[Batch], tokens: Tensor, row_weights: Tensor
) -> Tensor:
    """Add each batch's rows to its tokens' sums, in float32 at least: no buffer of all rows, T * H instead of R * H."""
    y = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    start = 0
    for spans, rows, _ in batches:
        stop = start + rows.shape[0]
        z = expert_rows(rows, weights, spans).to(y.dtype)
        if routing.weight_on == "output":
            z.mul_(row_weights[start:stop, None])
        y.index_add_(0, tokens[start:stop], z)
        start = stop
    return y.to(x.dtype)


def batch_spans(offsets: Sequence[int], most: int) -> Iterator[list[Span]]:
    """The experts that have rows, in order: together up to `most` rows, an expert of more alone."""
    batch: list[Span] = []
    for e, (start, stop) in enumerate(pairwise(offsets)):
        if start == stop:
            continue
        if batch and stop - batch[0].start > most:
            yield batch
            batch = []
        batch.append(Span(e, start, stop))
    if batch:
        yield batch


def selective(x: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """Walk the pairs themselves: for few of them, each distinct expert is read once and nothing is sorted."""
    flat_ids = routing.expert_ids.reshape(-1).tolist()
    pairs_of: dict[int, list[int]] = {}
    for pair, e in enumerate(flat_ids):
        if 0 <= e < weights.num_experts:
            pairs_of.setdefault(e, []).append(pair)
    pairs: list[int] = []
    spans: list[Span] = []
    for e, own in sorted(pairs_of.items()):
        spans.append(Span(e, len(pairs), len(pairs) + len(own)))
        pairs += own
    row_of = [len(pairs)] * len(flat_ids)
    for row, pair in enumerate(pairs):
        row_of[pair] = row
    pair_rows = torch.tensor(row_of, device=x.device).reshape(routing.expert_ids.shape)
    index = torch.tensor(pairs, device=x.device, dtype=torch.int64)
    rows = x.index_select(0, index // routing.top_k)
    if routing.weight_on == "input":
        rows = _weighted_input(rows, routing.routing_weights.reshape(-1)[index], routing)
    batches = [Batch(spans, rows, len(pairs))] if spans else []
    return _run(x, routing, weights, batches, PairRows(pair_rows, len(pairs), len(pairs) == len(flat_ids)))


def blockwise(x: Tensor, routing: Routing, weights: ExpertWeights, block_size: int) -> Tensor:
    """Fixed blocks of one expert each, laid out by `moestro.block_schedule`.

    No token is loaded for a padded cell, empty blocks never run, and consecutive blocks of one expert read it once.
    """
    schedule = grouping.run_blocks(routing.expert_ids, weights.num_experts, block_size)
    counts = schedule.counts.tolist()
    runs = [(e, sum(1 for _ in run)) for e, run in groupby(schedule.block_experts.tolist()) if e >= 0]
    num_cells = sum(length for _, length in runs) * block_size
    pair_rows = torch.where(schedule.scatter_index < 0, num_cells, schedule.scatter_index)
    pair_ids = schedule.pair_ids.reshape(-1)[:num_cells]
    (cells,) = (pair_ids >= 0).nonzero(as_tuple=True)
    pairs = pair_ids[cells]
    rows = _weighted_input(
        x.index_select(0, pairs // routing.top_k), routing.routing_weights.reshape(-1)[pairs], routing
    )
    blocked = x.new_zeros(num_cells, x.shape[1]).index_copy(0, cells, rows)

    def batches() -> Iterator[Batch]:
        start = 0
        for e, length in runs:
            stop = start + length * block_size
            yield Batch([Span(e, 0, stop - start)], blocked[start:stop], counts[e])
            start = stop

    complete = sum(counts) == pair_rows.numel()
    return _run(x, routing, weights, batches(), PairRows(pair_rows, num_cells, complete))


def all_experts(x: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """Every expert on every token, masked at the combine; only recording looks at the routing's values."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for e in range(weights.num_experts):
        chosen = routing.expert_ids == e
        w = routing.routing_weights.masked_fill(~chosen, 0.0)
        if routing.weight_on == "output":
            hit = chosen.any(1)
            z = _everyone(x, hit, routing, weights, e) * w.sum(1, keepdim=True, dtype=wide)
            y = y + torch.where(hit[:, None], z, 0.0)
            continue
        for k in range(routing.top_k):
            z = _everyone((x * w[:, k, None]).to(x.dtype), chosen[:, k], routing, weights, e)
            y = y + torch.where(chosen[:, k, None], z, 0.0)
    return y.to(x.dtype)


def _everyone(x: Tensor, hit: Tensor, routing: Routing, weights: ExpertWeights, e: int) -> Tensor:
    """E_e of every row; while autograd records, of the rows that `hit` [T] names, and zero for the others."""
    if not records(x, routing, weights):
        return expert_rows(x, weights, [Span(e, 0, x.shape[0])])
    (tokens,) = hit.nonzero(as_tuple=True)
    z = differentiable_rows(x[tokens], weights, e)
    return z.new_zeros(x.shape).index_copy(0, tokens, z)


Walk = Callable[[Tensor, Routing, ExpertWeights], Tensor]
_WALKS: dict[str, Walk] = {"selective": selective, "grouped": grouped, "all_experts": all_experts}
