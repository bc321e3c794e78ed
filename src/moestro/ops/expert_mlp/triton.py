"""expert_mlp on a GPU: which arguments Triton's kernels take, and how they are launched.

At most four launches: the order of rows (none where every pair is a block of its own), gate_up with the activation,
down with the routing weights, and the sum over slots. Nothing is read back, grids depend on T, K and E alone, and so a
CUDA graph can capture a call and replay it with other ids.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moestro.errors import unsupported
from moestro.formats import PackedTensor, WeightFormat
from moestro.ops import gpu
from moestro.ops.expert_mlp import triton_tuning
from moestro.ops.expert_mlp.triton_tuning import Plan, Problem, Tile
from moestro.ops.grouping import tuning as grouping_tuning
from moestro.ops.grouping.triton import Rows, group_rows, most_blocks
from moestro.types import EMPTY, Activation, Routing
from moestro.weights import ExpertWeights

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SUM_COLUMNS = 1024
_ALIGNED = 16


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module("moestro.ops.expert_mlp.triton_kernels")


@functools.cache
def _weights() -> ModuleType:
    return importlib.import_module("moestro.ops.expert_mlp.triton_weights")


def supports(x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    """None, or the sentence why these kernels cannot compute this."""
    return (
        gpu.unusable(x)
        or _no_layer(weights)
        or no_dtype(x, routing, weights)
        or gpu.unreadable(x, routing.expert_ids, routing.routing_weights, *weights.tensors)
    )


def _no_layer(weights: ExpertWeights) -> str | None:
    """Why these kernels have no layer like this; None if they do."""
    if weights.activation.kind == "custom" or weights.output_norm is not None:
        return "it cannot call a Python function, and the activation or the output norm is one"
    if weights.row_format != "float":
        return f"it multiplies rows of floats only, and these are to be rounded to {weights.row_format}"
    if weights.num_experts > grouping_tuning.MOST_EXPERTS:
        return f"it orders rows by at most {grouping_tuning.MOST_EXPERTS} experts, not {weights.num_experts}"
    for name, stored in (("gate_up", weights.gate_up), ("down", weights.down)):
        reason: str | None = _weights().unreadable(stored)
        if reason is not None:
            return reason.format(name=name)
    return None


def no_dtype(x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    """Why these kernels do not compute with tensors of such dtypes; None if they do."""
    biases = [bias for bias in (weights.gate_up_bias, weights.down_bias) if bias is not None]
    for t in (x, routing.routing_weights, *biases):
        if t.dtype not in _FLOATS:
            return f"it computes in float32, and a tensor is of {t.dtype}"
    return None


def plan(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: tuple[str, int | None]) -> Plan:
    """How these arguments are computed.

    Raises:
        UnsupportedError: "all_experts" with weights on the input.
    """
    invariant = torch.are_deterministic_algorithms_enabled()
    return triton_tuning.choose(problem(x, routing, weights), gpu.device_of(x), strategy, invariant)


def problem(x: Tensor, routing: Routing, weights: ExpertWeights) -> Problem:
    """What the choice of a plan depends on."""
    scaling = [stored.format.scaling for stored in (weights.gate_up, weights.down)]
    return Problem(
        routing.num_tokens,
        routing.top_k,
        weights.num_experts,
        weights.hidden_size,
        weights.intermediate_size,
        2 if weights.activation.gated else 1,
        compute_dtype(x, weights).itemsize,
        (weights.gate_up.format.bits, weights.down.format.bits),
        max(0 if s is None else s.columns for s in scaling),
    )


def compute_dtype(x: Tensor, weights: ExpertWeights) -> torch.dtype:
    """What rows like x are multiplied in, and what stands between the two products."""
    return torch.promote_types(_computed_in(x, weights.gate_up.format), _computed_in(x, weights.down.format))


def _computed_in(x: Tensor, stored: WeightFormat) -> torch.dtype:
    """float16 does not hold the range of scales that are powers of two, which tiles of weights are multiplied by."""
    if stored.is_dense:
        return torch.promote_types(x.dtype, stored.storage)
    assert stored.scaling is not None
    powers = stored.scaling.dtypes[0] in (torch.uint8, torch.float8_e8m0fnu)
    return torch.float32 if x.dtype == torch.float16 and powers else x.dtype


def run(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: tuple[str, int | None]) -> Tensor:
    """`expert_mlp` for arguments that `supports` has passed.

    Raises:
        UnsupportedError: "all_experts" with weights on the input.
    """
    slots = routing.expert_ids
    if strategy[0] == "all_experts":
        routing, slots = every_expert(routing, weights.num_experts)
    with gpu.on(x):
        return launch(x, routing, weights, plan(x, routing, weights, strategy), slots)


def every_expert(routing: Routing, num_experts: int) -> tuple[Routing, Tensor]:
    """The routing [T, E] of each token to every expert, and its ids with -1 where it was not chosen.

    Raises:
        UnsupportedError: weights on the input, of which an expert may have several for one token.
    """
    if routing.weight_on == "input":
        raise unsupported(
            "expert_mlp",
            got='strategy="all_experts" and weights on the input with the triton implementation',
            needs="weights on the output, which an expert's slots share",
            fix="Drop the strategy.",
        )
    used = routing.expert_ids >= 0
    ids = torch.where(used, routing.expert_ids, num_experts).long()
    shape = (routing.num_tokens, num_experts + 1)
    weights = routing.routing_weights.new_zeros(shape).scatter_add_(1, ids, routing.routing_weights)[:, :-1]
    chosen = used.new_zeros(shape).scatter_(1, ids, True)[:, :-1]
    every = torch.arange(num_experts, dtype=routing.expert_ids.dtype, device=ids.device).expand(chosen.shape)
    return Routing.unchecked(every, weights, "output"), torch.where(chosen, every, EMPTY)


def launch(x: Tensor, routing: Routing, weights: ExpertWeights, how: Plan, slots: Tensor | None = None) -> Tensor:
    """`expert_mlp` by a given plan; where `slots` [T, K] is given, those that are -1 in it are left out of the sums."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_pairs, top_k = routing.expert_ids.numel(), routing.top_k
    if num_pairs == 0 or out.numel() == 0 or weights.num_experts == 0:
        return out.zero_()
    routing = Routing.unchecked(
        routing.expert_ids.contiguous(), routing.routing_weights.contiguous(), routing.weight_on
    )
    order = group_rows(routing.expert_ids, weights.num_experts, how.block) if how.ordered else None
    rows = _rows(routing, order)
    blocks = most_blocks(num_pairs, weights.num_experts, how.block) if how.ordered else num_pairs
    dtype = compute_dtype(x, weights)
    h = x.new_empty(num_pairs, weights.intermediate_size, dtype=dtype)
    _gate_up(x, rows, weights, h, (how, blocks, routing.weight_on == "input"))
    wide = how.wide or how.splits > 1 or x.dtype != torch.bfloat16
    pieces = x.new_empty(how.splits, num_pairs, x.shape[1], dtype=torch.float32 if wide else x.dtype)
    _down(h, rows, weights, pieces, (how, blocks, routing.weight_on == "output"))
    columns = min(_SUM_COLUMNS, _power(x.shape[1]))
    _kernels().sum_slots_kernel[(x.shape[0], -(-x.shape[1] // columns))](
        pieces,
        routing.expert_ids if slots is None else slots.contiguous(),
        out,
        *x.shape,
        TOP_K=top_k,
        SPLITS=how.splits,
        BN=columns,
        num_warps=4,
    )
    return out


def _rows(routing: Routing, order: Rows | None) -> Any:
    made = _kernels().Rows
    first = (routing.expert_ids, routing.routing_weights, routing.top_k)
    if order is None:
        return made(*first)
    return made(*first, order.pairs, order.offsets, order.block_expert, order.block_start, order.num_blocks)


def _gate_up(x: Tensor, rows: Any, weights: ExpertWeights, h: Tensor, work: tuple[Plan, int, bool]) -> None:
    how, blocks, weighted = work
    a = weights.activation
    num_rows = weights.gate_up.shape[1]
    tiles = -(-num_rows // how.gate_up.columns)
    if tiles == 0:
        return
    _kernels().gate_up_kernel[(how.programs or blocks * tiles,)](
        x,
        x.stride(0),
        rows,
        _described(weights.gate_up),
        _tensor_map(weights.gate_up, how.gate_up, h.dtype, weights.activation),
        *_bias(weights.gate_up_bias),
        h,
        h.shape[0],
        x.shape[1],
        h.shape[1],
        WEIGHTED=weighted,
        KIND=a.kind,
        GATED=a.gated,
        INTERLEAVED=a.interleaved,
        ALPHA=a.alpha,
        LIMIT=a.limit,
        UP_OFFSET=a.up_offset,
        **_options(how, how.gate_up, h.dtype),
    )


def _down(h: Tensor, rows: Any, weights: ExpertWeights, pieces: Tensor, work: tuple[Plan, int, bool]) -> None:
    how, blocks, weighted = work
    tiles = -(-pieces.shape[2] // how.down.columns)
    _kernels().down_kernel[(how.programs or blocks * tiles * how.splits,)](
        h,
        rows,
        _described(weights.down),
        _tensor_map(weights.down, how.down, h.dtype, None),
        *_bias(weights.down_bias),
        pieces,
        h.shape[0],
        pieces.shape[2],
        h.shape[1],
        WEIGHTED=weighted,
        SPLITS=how.splits,
        **_options(how, how.down, h.dtype),
    )


def _options(how: Plan, tile: Tile, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "BLOCK": how.block,
        "BM": how.rows,
        "BN": tile.columns,
        "BK": tile.depth,
        "GROUP": tile.group,
        "SWAP": tile.swap,
        "DTYPE": _kernels().DTYPES[dtype],
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _described(stored: Any) -> Any:
    assert isinstance(stored, PackedTensor)
    return _weights().describe(stored)


def _tensor_map(stored: Any, tile: Tile, dtype: torch.dtype, activation: Activation | None) -> Any:
    """What the hardware copies tiles of weights by, in boxes [1, outputs, halves, depth]; None where pointers must do.

    Either order of gate and up is a matter of strides; the rows of a box alternate between them.
    """
    data = stored.data
    halves = 2 if activation is not None and activation.gated else 1
    expert, row, column = data.stride()
    aligned = data.data_ptr() % _ALIGNED == 0 and all(s * data.element_size() % _ALIGNED == 0 for s in (expert, row))
    whole = data.shape[2] % tile.depth == 0 and data.numel() > 0  # a step past the last column is not to be copied
    if not (tile.tensor_map and data.dtype == dtype and column == 1 and row > 0 and expert > 0 and aligned and whole):
        return None
    outputs = data.shape[1] // halves
    apart = (row, row * outputs) if activation is None or not activation.interleaved else (row * 2, row)
    return _kernels().TensorDescriptor(
        data,
        [data.shape[0], outputs, halves, data.shape[2]],
        [expert, *apart, 1],
        [1, tile.columns // halves, halves, tile.depth],
    )


def _bias(bias: Tensor | None) -> tuple[Tensor | None, int]:
    if bias is None:
        return None, 0
    bias = bias if bias.stride(-1) == 1 else bias.contiguous()
    return bias, bias.stride(0)


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
