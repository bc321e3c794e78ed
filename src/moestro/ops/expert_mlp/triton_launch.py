"""The launches of expert_mlp.

The order of rows (none where every pair is a block of its own, two launches for many), gate_up with the activation,
down with the routing weights, and the sum over slots; before each product one more where rows are rounded, and one
before gate_up where the columns of x are put in order.
Nothing is read back on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moestro.formats import PackedTensor, StoredExperts
from moestro.ops import gpu, triton_rows
from moestro.ops.dispatch import InWaves
from moestro.ops.expert_mlp.triton_kernels import DTYPES, down_kernel, gate_up_kernel, sum_slots_kernel
from moestro.ops.expert_mlp.triton_maps import items, layout
from moestro.ops.expert_mlp.triton_tuning import Plan, Tile
from moestro.ops.expert_mlp.triton_work import Work
from moestro.ops.gpu import Launch
from moestro.ops.grouping import triton as grouping
from moestro.ops.triton_order import Arranging, Order, order_of
from moestro.ops.triton_stored import describe
from moestro.types import Activation, Routing
from moestro.weights import ExpertWeights

_SUM_COLUMNS = 1024

_Launches = tuple[Launch, Launch, Launch]


def prepared(how: Plan, dtype: torch.dtype) -> Callable[..., Tensor]:
    """`expert_mlp` by a plan, rows multiplied in `dtype`, for arguments that lie like those of its first call.

    It takes x, routing, weights and, where given, slots [T, K]: those that are -1 in it are left out of the sums.
    """
    by_address: list[Callable[..., Tensor] | None] = []

    def compute(x: Tensor, routing: Routing, weights: ExpertWeights, slots: Tensor | None = None) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        ids, routing_weights = routing.expert_ids.contiguous(), routing.routing_weights.contiguous()
        if by_address and by_address[0] is not None and slots is None:
            return by_address[0](x, ids, routing_weights, weights)
        if ids.numel() == 0 or x.numel() == 0 or weights.num_experts == 0:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        launches = work(x, routing, weights, how, dtype)
        y = launches.compute(x, ids, routing_weights, ids if slots is None else slots.contiguous())
        if not by_address:
            by_address.append(launches.by_address(x) if _reads_own_biases(weights) else None)
        return y

    return compute


def in_waves(how: Plan, dtype: torch.dtype) -> InWaves:
    """The same plan in parts: pieces of pairs by themselves, and their sums by themselves."""

    def room(x: Tensor, routing: Routing) -> Tensor:
        size, kind = _pieces(x, routing, how)
        return torch.empty(size, dtype=kind, device=x.device).view(how.splits, -1, x.shape[1])

    def rows(x: Tensor, routing: Routing, weights: ExpertWeights, to: Tensor) -> None:
        x = x if x.stride(-1) == 1 else x.contiguous()
        ids, routing_weights = routing.expert_ids.contiguous(), routing.routing_weights.contiguous()
        with gpu.on(x):
            launches = work(x, routing, weights, how, dtype)
            h, _, *more = launches.spaces  # `to` is the second
            made = [torch.empty(size, dtype=kind, device=x.device) for size, kind in (h, *more)]
            spaces = [made[0], to, *made[1:]]
            launches.rows((x, ids, routing_weights), spaces)

    def put(x: Tensor, routing: Routing, rows: Tensor, to: Tensor) -> None:
        named = (routing.expert_ids >= 0).flatten()
        given = rows.to(x.device)
        if routing.weight_on == "output":
            given = given * routing.routing_weights[..., None]
        to[:, named] = 0
        to[0, named] = given.flatten(0, 1)[named].to(to.dtype)

    def total(x: Tensor, routing: Routing, pieces: Tensor, num_experts: int) -> Tensor:
        out, ids = torch.empty_like(x, memory_format=torch.contiguous_format), routing.expert_ids.contiguous()
        parts = -(-x.shape[1] // _SUM_COLUMNS)
        with gpu.on(x):
            add = _sum_launch(x, ids, how)
            add(len(x) * parts, pieces, ids, out, len(x), x.shape[1], parts, num_experts)
        return out

    return InWaves(room, rows, put, total)


def _pieces(x: Tensor, routing: Routing, how: Plan) -> tuple[int, torch.dtype]:
    """Numbers and dtype of the pieces of all pairs."""
    wide = how.wide or how.splits > 1 or x.dtype != torch.bfloat16
    return how.splits * routing.expert_ids.numel() * x.shape[1], torch.float32 if wide else x.dtype


def work(x: Tensor, routing: Routing, weights: ExpertWeights, how: Plan, dtype: torch.dtype) -> Work:
    """All launches of a call by a plan."""
    ids, on_input = routing.expert_ids, routing.weight_on == "input"
    (num_tokens, hidden), num_pairs, inner = x.shape, ids.numel(), weights.intermediate_size
    num_experts, blocks, spaces, sort = weights.num_experts, num_pairs, [], None
    roundings = _roundings(weights, x)
    order, into = _orders(weights, how)
    width = inner if into is None else into.whole(inner)
    spaces.append((num_pairs * width, torch.float32 if roundings else dtype))
    spaces.append(_pieces(x, routing, how))
    if how.ordered:
        sizes = grouping.sizes(num_pairs, num_experts, how.block)
        blocks, sort = sizes[2], grouping.rows_launch(ids, num_experts, how.block)
        spaces += [(size, torch.int32) for size in sizes]
    roundings = roundings if inner else ()
    for rounding, rows in zip(roundings, (num_tokens, num_pairs), strict=False):
        spaces += rounding.sizes(rows)
    rounds = [rounding.launch for rounding in roundings]
    arranging = None if order is None else Arranging(order, hidden)
    if arranging is not None:
        spaces.append((num_tokens * arranging.size, dtype))
        rounds.append(arranging.launch)
    gate_up = _projection_arguments(weights.gate_up, weights.gate_up_bias, how.gate_up, (dtype, weights.activation))
    down = _projection_arguments(weights.down, weights.down_bias, how.down, (dtype, None))
    outputs = -(-weights.gate_up.shape[1] // how.gate_up.columns), -(-hidden // how.down.columns) * how.splits
    tiles = (blocks * columns for columns in outputs)
    return Work(
        (num_tokens, ids.shape[1], num_experts),
        (num_pairs, hidden, inner),
        x.stride(0) if x.stride(-1) == 1 else hidden,
        how.block if how.ordered else 0,
        (*_launches(x, ids, weights, how, dtype, on_input), sort, *rounds),
        (*tiles, num_tokens * -(-hidden // _SUM_COLUMNS)),
        (*gate_up, order, into),
        (*down, into),
        roundings,
        arranging,
        tuple(spaces),
    )


def _orders(weights: ExpertWeights, how: Plan) -> tuple[Order | None, Order | None]:
    """The orders of columns of x and of what stands between the products; None as they come."""
    pairs = ((weights.gate_up, how.gate_up), (weights.down, how.down))
    of_x, between = (
        order_of(stored, tile.depth, weights.input_format) if tile.arranged else None for stored, tile in pairs
    )
    return of_x, between


def _reads_own_biases(weights: ExpertWeights) -> bool:
    """Whether kernels read the weights' own tensors: of a bias with other strides they are given a copy."""
    return all(b is None or b.stride(-1) == 1 for b in (weights.gate_up_bias, weights.down_bias))


def _launches(
    x: Tensor, ids: Tensor, weights: ExpertWeights, how: Plan, dtype: torch.dtype, on_input: bool
) -> _Launches:
    a = weights.activation
    tiles = {"BLOCK": how.block, "BM": how.rows, "TAILS": how.tails}
    between = {n.upper(): getattr(a, n) for n in ("kind", "gated", "interleaved", "alpha", "limit", "up_offset")}
    gate_up = {**tiles, **_tile(how.gate_up, dtype), "WEIGHTED": on_input, **between}
    down = {**tiles, **_tile(how.down, dtype), "WEIGHTED": not on_input, "SPLITS": how.splits}
    return (
        Launch(gate_up_kernel, gate_up, _resources(how.gate_up)),
        Launch(down_kernel, down, _resources(how.down)),
        _sum_launch(x, ids, how),
    )


def _sum_launch(x: Tensor, ids: Tensor, how: Plan) -> Launch:
    columns = min(_SUM_COLUMNS, 1 << max(x.shape[1] - 1, 0).bit_length())
    return Launch(sum_slots_kernel, {"TOP_K": ids.shape[1], "SPLITS": how.splits, "BN": columns}, {"num_warps": 4})


def _roundings(weights: ExpertWeights, x: Tensor) -> tuple[triton_rows.Rounding, ...]:
    if weights.input_format == "float":
        return ()
    return tuple(
        triton_rows.Rounding(weights.input_format, stored.num_columns, stored.format.scaling.columns, x)
        for stored in (weights.gate_up, weights.down)
        if stored.format.scaling is not None
    )


def _tile(tile: Tile, dtype: torch.dtype) -> dict[str, Any]:
    sizes = {"BN": tile.columns, "BK": tile.depth, "GROUP": tile.group}
    return {**sizes, "SWAP": tile.swap, "DTYPE": DTYPES[dtype]}


def _resources(tile: Tile) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def _projection_arguments(
    stored: StoredExperts, bias: Tensor | None, tile: Tile, rest: tuple[torch.dtype, Activation | None]
) -> tuple[Any, ...]:
    if bias is not None and bias.stride(-1) != 1:
        bias = bias.contiguous()
    map = tensor_map(stored, tile, *rest) if isinstance(stored, PackedTensor) else None
    return describe(stored), map, bias, 0 if bias is None else bias.stride(0)


def tensor_map(
    stored: PackedTensor, tile: Tile, dtype: torch.dtype, activation: Activation | None
) -> TensorDescriptor | None:
    """What the hardware copies tiles of weights by, as `triton_maps.layout` says; None where pointers must do."""
    found = layout(stored, tile, dtype, activation)
    return None if found is None else TensorDescriptor(items(stored), *found)
