"""The launches of expert_mlp, and what they keep of a layer from call to call.

The order of rows (none where every pair is a block of its own, two launches for many), gate_up with the activation,
down with the routing weights, and the sum over slots; before each product one more where rows are rounded. Nothing is
read back, grids depend on T, K and E alone, and so a CUDA graph
can capture a call and replay it with other ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moestro.formats import PackedTensor, StoredExperts
from moestro.ops.expert_mlp import triton_rows
from moestro.ops.expert_mlp.triton_kernels import DTYPES, down_kernel, gate_up_kernel, sum_slots_kernel
from moestro.ops.expert_mlp.triton_known import ALIGNED, Call, layer_of
from moestro.ops.expert_mlp.triton_tuning import Plan, Tile
from moestro.ops.expert_mlp.triton_weights import describe
from moestro.ops.expert_mlp.triton_work import Work
from moestro.ops.gpu import Launch
from moestro.ops.grouping import triton as grouping
from moestro.types import Activation, Routing
from moestro.weights import ExpertWeights

_SUM_COLUMNS = 1024
_MOST_KEPT, _MOST_COMPILED = 64, 1024

_Launches = tuple[Launch, Launch, Launch]


@dataclass(frozen=True, eq=False)
class _Kept:
    """What one layer's launches by one plan have in common.

    Attributes:
        how: the plan.
        gate_up, down: arguments of the two kernels that describe weights.
        launches: gate_up, down and the sum over slots, compiled.
        roundings: of the rows that meet gate_up and down; empty where rows are floats.
    """

    how: Plan
    gate_up: tuple[Any, ...]
    down: tuple[Any, ...]
    launches: _Launches
    roundings: tuple[triton_rows.Rounding, ...]


_COMPILED: dict[Any, _Launches] = {}


def launch(
    x: Tensor, routing: Routing, weights: ExpertWeights, how: Plan, dtype: torch.dtype, slots: Tensor | None = None
) -> Tensor:
    """`expert_mlp` by a given plan, for arguments that the kernels can read.

    Args:
        x, routing, weights: as for `moestro.expert_mlp`.
        how: the plan.
        dtype: what rows are multiplied in.
        slots: [T, K]; where given, slots that are -1 in it are left out of the sums.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    ids, routing_weights = routing.expert_ids.contiguous(), routing.routing_weights.contiguous()
    if _is_nothing(x, ids, weights):
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    work = _work((x, ids, routing_weights), routing.weight_on == "input", weights, how, dtype)
    return work.compute(x, ids, routing_weights, ids if slots is None else slots.contiguous())


def known(x: Tensor, routing: Routing, weights: ExpertWeights, how: Plan, dtype: torch.dtype) -> Call | None:
    """What `launch` has computed such arguments by, for others that lie alike; None where nothing can be kept of it."""
    given = (x, routing.expert_ids, routing.routing_weights)
    if x.stride(-1) != 1 or not all(t.is_contiguous() for t in given[1:]) or _is_nothing(x, given[1], weights):
        return None
    if any(t.device != x.device for t in (*given, *weights.tensors)) or not _is_described(weights):
        return None
    return _work(given, routing.weight_on == "input", weights, how, dtype).call(x)


def _is_nothing(x: Tensor, ids: Tensor, weights: ExpertWeights) -> bool:
    return ids.numel() == 0 or x.numel() == 0 or weights.num_experts == 0


def _work(
    given: tuple[Tensor, Tensor, Tensor], on_input: bool, weights: ExpertWeights, how: Plan, dtype: torch.dtype
) -> Work:
    (x, ids, _), kept = given, _kept(given, on_input, weights, how, dtype)
    (num_tokens, hidden), num_pairs, inner = x.shape, ids.numel(), weights.intermediate_size
    num_experts, blocks, spaces, sort = weights.num_experts, num_pairs, [], None
    wide = how.wide or how.splits > 1 or x.dtype != torch.bfloat16
    spaces.append((num_pairs * inner, torch.float32 if kept.roundings else dtype))
    spaces.append((how.splits * num_pairs * hidden, torch.float32 if wide else x.dtype))
    if how.ordered:
        sizes = grouping.sizes(num_pairs, num_experts, how.block)
        blocks, sort = sizes[2], grouping.rows_launch(ids, num_experts, how.block)
        spaces += [(size, torch.int32) for size in sizes]
    roundings = kept.roundings if inner else ()
    for rounding, rows in zip(roundings, (num_tokens, num_pairs), strict=False):
        spaces += rounding.sizes(rows)
    outputs = -(-weights.gate_up.shape[1] // how.gate_up.columns), -(-hidden // how.down.columns) * how.splits
    tiles = (how.programs or blocks * columns for columns in outputs)
    return Work(
        (num_tokens, ids.shape[1], num_experts),
        (num_pairs, hidden, inner),
        x.stride(0),
        how.block if how.ordered else 0,
        (*kept.launches, sort, *(rounding.launch for rounding in roundings)),
        (*tiles, num_tokens * -(-hidden // _SUM_COLUMNS)),
        kept.gate_up,
        kept.down,
        roundings,
        tuple(spaces),
    )


def _kept(
    given: tuple[Tensor, Tensor, Tensor], on_input: bool, weights: ExpertWeights, how: Plan, dtype: torch.dtype
) -> _Kept:
    """What is kept for such arguments, made anew where the weights have moved since."""
    of_layer = layer_of(weights).plans
    aligned = tuple(t.data_ptr() % ALIGNED == 0 for t in given)
    key = (how, on_input, aligned, given[0].dtype, given[0].stride(0), given[1].dtype, given[1].shape[1])
    kept: _Kept | None = of_layer.get(key)
    if kept is None:
        if len(of_layer) >= _MOST_KEPT:
            of_layer.clear()
        gate_up = _described(weights.gate_up, weights.gate_up_bias, how.gate_up, (dtype, weights.activation))
        down = _described(weights.down, weights.down_bias, how.down, (dtype, None))
        kinds = (_kind(gate_up), _kind(down), weights.input_format, weights.activation.code)
        alike = (*key, kinds, given[0].shape[1], given[0].device, dtype)
        kept = _Kept(how, gate_up, down, _launches(alike, weights, given), _roundings(weights))
        if _is_described(weights):
            of_layer[key] = kept
    return kept


def _is_described(weights: ExpertWeights) -> bool:
    """Whether kernels read the weights' own tensors: of a bias with other strides they are given a copy."""
    return all(b is None or b.stride(-1) == 1 for b in (weights.gate_up_bias, weights.down_bias))


def _kind(argument: Any) -> Any:
    """What Triton would look for in an argument, and what kernels are compiled for because of it."""
    if isinstance(argument, tuple):
        return tuple(map(_kind, argument))
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNED == 0
    if isinstance(argument, TensorDescriptor):
        return _kind(argument.base), *argument.shape, *argument.strides, *argument.block_shape
    return getattr(argument, "value", argument)  # of a constexpr


def _launches(alike: tuple[Any, ...], weights: ExpertWeights, given: tuple[Tensor, ...]) -> _Launches:
    """The launches of all layers of one kind; they hold no tensors."""
    found = _COMPILED.get(alike)
    if found is None:
        if len(_COMPILED) >= _MOST_COMPILED:
            _COMPILED.clear()
        found = _COMPILED[alike] = _made(alike, weights, given)
    return found


def _made(alike: tuple[Any, ...], weights: ExpertWeights, given: tuple[Tensor, ...]) -> _Launches:
    how, on_input, dtype = alike[0], alike[1], alike[-1]
    x, ids, _ = given
    a = weights.activation
    tiles = {"BLOCK": how.block, "BM": how.rows}
    between = {
        "KIND": a.kind,
        "GATED": a.gated,
        "INTERLEAVED": a.interleaved,
        "ALPHA": a.alpha,
        "LIMIT": a.limit,
        "UP_OFFSET": a.up_offset,
    }
    gate_up = {**tiles, **_tile(how.gate_up, dtype), "WEIGHTED": on_input, **between}
    down = {**tiles, **_tile(how.down, dtype), "WEIGHTED": not on_input, "SPLITS": how.splits}
    columns = min(_SUM_COLUMNS, 1 << max(x.shape[1] - 1, 0).bit_length())
    add = {"TOP_K": ids.shape[1], "SPLITS": how.splits, "BN": columns}
    return (
        Launch(gate_up_kernel, gate_up, _resources(how.gate_up)),
        Launch(down_kernel, down, _resources(how.down)),
        Launch(sum_slots_kernel, add, {"num_warps": 4}),
    )


def _roundings(weights: ExpertWeights) -> tuple[triton_rows.Rounding, ...]:
    if weights.input_format == "float":
        return ()
    return tuple(
        triton_rows.Rounding(weights.input_format, stored.num_columns, stored.format.scaling.columns)
        for stored in (weights.gate_up, weights.down)
        if stored.format.scaling is not None
    )


def _tile(tile: Tile, dtype: torch.dtype) -> dict[str, Any]:
    sizes = {"BN": tile.columns, "BK": tile.depth, "GROUP": tile.group}
    return {**sizes, "SWAP": tile.swap, "DTYPE": DTYPES[dtype]}


def _resources(tile: Tile) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def _described(
    stored: StoredExperts, bias: Tensor | None, tile: Tile, rest: tuple[torch.dtype, Activation | None]
) -> tuple[Any, ...]:
    if bias is not None and bias.stride(-1) != 1:
        bias = bias.contiguous()
    map = tensor_map(stored, tile, *rest) if isinstance(stored, PackedTensor) else None
    return describe(stored), map, bias, 0 if bias is None else bias.stride(0)


def tensor_map(
    stored: PackedTensor, tile: Tile, dtype: torch.dtype, activation: Activation | None
) -> TensorDescriptor | None:
    """What the hardware copies tiles of weights by, in boxes [1, outputs, halves, depth]; None where pointers must do.

    Either order of gate and up is a matter of strides; the rows of a box alternate between them.

    Args:
        stored: the experts [E, N, K].
        tile: how they are cut; None is returned unless it asks for a tensor map.
        dtype: what rows are multiplied in: boxes are not converted.
        activation: that of gate_up; None for down.
    """
    data = stored.data
    halves = 2 if activation is not None and activation.gated else 1
    expert, row, column = data.stride()
    aligned = data.data_ptr() % ALIGNED == 0 and all(s * data.element_size() % ALIGNED == 0 for s in (expert, row))
    whole = data.shape[2] % tile.depth == 0 and data.numel() > 0  # a step past the last column is not to be copied
    if not (tile.tensor_map and data.dtype == dtype and column == 1 and row > 0 and expert > 0 and aligned and whole):
        return None
    outputs = data.shape[1] // halves
    apart = (row, row * outputs) if activation is None or not activation.interleaved else (row * 2, row)
    return TensorDescriptor(
        data,
        [data.shape[0], outputs, halves, data.shape[2]],
        [expert, *apart, 1],
        [1, tile.columns // halves, halves, tile.depth],
    )
