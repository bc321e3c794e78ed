"""expert_mlp on a GPU: which arguments Triton's kernels take, and by which plan they are computed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moestro import formats
from moestro.formats import PackedTensor, SplitTensor, StoredExperts, WeightFormat
from moestro.ops import gpu
from moestro.ops.dispatch import KernelUse, Prepared
from moestro.ops.expert_mlp import triton_maps, triton_tuning
from moestro.ops.expert_mlp.reasons import UNREAD_ZEROS, exchanged, matrices_of, no_activation
from moestro.ops.expert_mlp.triton_tuning import Plan, Problem
from moestro.ops.expert_mlp.tuning import named_strategy
from moestro.ops.grouping import tuning as grouping_tuning
from moestro.ops.tensors import not_of
from moestro.types import EMPTY, Routing
from moestro.weights import ExpertWeights

if TYPE_CHECKING:
    from moestro.ops.expert_mlp.triton_work import Work

_INPUT_DTYPES = {"int8": torch.int8, "fp8-e4m3": torch.float8_e4m3fn}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MOST_INT8_COLUMNS = (2**31 - 1) // (127 * 128)
"""Of rows that are rounded within +-127, times weights from -128 on."""
_DECODED = {"e4m3": 128, "int8": 128, "e2m1": 16, "int4": 16, "uint4": 16}
"""Elements that kernels decode, and the fewest columns of a group: of 8-bit weights, those of the longest step."""


@functools.cache
def _launches() -> ModuleType:
    return importlib.import_module("moestro.ops.expert_mlp.triton_launch")


def _has_activation(kind: str) -> bool:
    """Whether kernels compute it, for code that a tracer follows."""
    return kind in gpu.kernels(__package__).KINDS


setattr(_has_activation, "_dynamo_marked_constant", True)  # noqa: B010  (as in `moestro.ops.gpu`)


def prepare(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> Prepared | str:
    """The call on a GPU, or the reason why there is none."""
    name, block, by = named_strategy(strategy)
    reason = (
        gpu.unusable(x.device)
        or why_unsupported(x, routing, weights)
        or gpu.unreadable(x, routing.expert_ids, routing.routing_weights, *weights.tensors)
    )
    if reason is None and name == "all_experts" and routing.weight_on == "input":
        reason = 'it weights the output where every expert computes every token, and weight_on is "input"'
    if reason is not None:
        return reason
    every = name == "all_experts"
    walked = _walked(routing, weights, every)
    how = plan(x, walked, weights, (name, block))
    dtype = compute_dtype(x, weights)
    called = triton_tuning.outside_graphs(how, problem(x, walked, weights))
    launches = _by_capture(how, called, dtype)

    def compute(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> Tensor:
        with gpu.on(x):
            whole, slots = every_expert(routing, weights.num_experts) if every else (routing, None)
            return launches(x, whole, weights, slots)

    def kernels(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> tuple[KernelUse, ...]:
        walked = _walked(routing, weights, every)
        if not (x.numel() and walked.expert_ids.numel() and weights.num_experts):
            return ()
        work: Work = _launches().work(x, walked, weights, how, dtype)
        return work.uses()

    walk = name if every else how.strategy
    parts = None if every else _launches().in_waves(called, dtype)
    why = f"{by}; {how}" if by else str(how)
    return Prepared(gpu.IMPLEMENTATION, compute, walk, why, kernels=kernels, in_waves=parts)


def _by_capture(captured: Plan, called: Plan, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Calls by one plan while a CUDA graph is made, else by another."""
    in_graphs: Callable[..., Tensor] = _launches().prepared(captured, dtype)
    if called == captured:
        return in_graphs
    in_calls, is_loaded = _launches().prepared(called, dtype), [False]

    def launch(x: Tensor, routing: Routing, weights: ExpertWeights, slots: Tensor | None) -> Tensor:
        if gpu.is_captured(x):
            return in_graphs(x, routing, weights, slots)
        if not is_loaded[0]:  # a graph that is made later is to load no code
            in_graphs(x, routing, weights, slots)
            is_loaded[0] = True
        y: Tensor = in_calls(x, routing, weights, slots)
        return y

    return launch


def why_unsupported(x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    """Why these kernels have no such layer, on whatever device they run; None if they do. A tracer follows this."""
    return _no_layer(weights) or _no_rows(x, weights) or _no_dtype(x, routing, weights)


def _walked(routing: Routing, weights: ExpertWeights, every: bool) -> Routing:
    """The routing, or for every expert on every token one of the shape and dtypes that `every_expert` makes."""
    if not every:
        return routing
    shape, ids = (routing.num_tokens, weights.num_experts), routing.expert_ids
    return Routing.unchecked(ids.new_empty(shape), routing.routing_weights.new_empty(shape), "output")


def _no_layer(weights: ExpertWeights) -> str | None:
    """Why these kernels have no layer like this; None if they do."""
    reason = no_activation(weights, _has_activation)
    if reason is not None:
        return reason
    if weights.num_experts > grouping_tuning.MOST_EXPERTS:
        return f"it orders rows by at most {grouping_tuning.MOST_EXPERTS} experts, not {weights.num_experts}"
    for name, stored in (("gate_up", weights.gate_up), ("down", weights.down)):
        reason = _unread(name, stored)
        if reason is not None:
            return reason
    return None


def _unread(name: str, stored: StoredExperts) -> str | None:
    """Why kernels cannot read the experts of a projection; None if they can."""
    form = stored.format
    if not formats.is_registered(form) or form.storage == torch.float64:
        return f"it does not read {form.name}, in which {name} is stored"
    reason = None if form.is_dense else _undecoded(form)
    if reason is not None:
        return f"{reason}, and {name} is stored as {form.name}"
    reason = exchanged(stored)
    if reason is not None:
        return reason.format(name=name)
    for matrix in matrices_of(stored):
        if form.per_item == 2 and not _is_words(matrix.data):
            return f"it reads two bytes at once, and those of {name} are not in rows at even addresses"
    return _no_table(name, stored.matrices) if isinstance(stored, SplitTensor) else None


def _undecoded(form: WeightFormat) -> str | None:
    """Why kernels do not decode a packed format; None if they do."""
    scaling, least = form.scaling, _DECODED.get(form.element)
    if least is None or scaling is None or form.per_item not in (1, 2):
        return f"it decodes {', '.join(_DECODED)}"
    if scaling.zeros != (form.element == "uint4"):
        return UNREAD_ZEROS
    columns, rows = scaling.columns, scaling.rows
    if form.per_item == 2 and (rows != 1 or columns < least or columns & (columns - 1)):
        return f"it reads scales of four-bit weights for a power of two of a row's columns, at least {least}"
    if form.per_item == 1 and (columns % least or (columns and not rows)):
        return f"it reads scales of 8-bit weights for whole rows, or for blocks of a multiple of {least} columns"
    return None


def _no_table(name: str, experts: tuple[tuple[PackedTensor, ...], ...]) -> str | None:
    """Why unstacked experts cannot be found by a table of where they lie; None if they can."""
    first = experts[0][0]
    if len(experts[0]) > 2 or any(part.data.shape != first.data.shape for part in experts[0]):
        return f"it reads experts of one matrix, or of two of one height, and {name} has others"
    layout = [(t.stride(), t.dtype) for t in first.tensors]
    for matrix in (m for parts in experts for m in parts):
        if [(t.stride(), t.dtype) for t in matrix.tensors] != layout:
            return f"it reads unstacked experts by one set of strides and dtypes, and those of {name} differ"
        if not torch.compiler.is_compiling() and any(t.data_ptr() % t.element_size() for t in matrix.tensors):
            return f"it reads numbers at multiples of their size, and those of {name} lie elsewhere"
    return None


def _is_words(data: Tensor) -> bool:
    if data.stride(-1) != 1 or any(stride % 2 for stride in data.stride()[:-1]):
        return False
    return torch.compiler.is_compiling() or data.data_ptr() % 2 == 0  # a tracer sees no addresses


def _no_rows(x: Tensor, weights: ExpertWeights) -> str | None:
    """Why these kernels do not multiply rows rounded as the weights ask; None if they do."""
    if weights.input_format == "int8":
        for name, form in (("gate_up", weights.gate_up.format), ("down", weights.down.format)):
            if form.element != "int8":
                return f"it multiplies int8 inputs by weights stored as int8, and {name} is stored as {form.name}"
        columns = max(weights.hidden_size, weights.intermediate_size)
        if columns > _MOST_INT8_COLUMNS:
            return f"a sum of products of int8 stays within 32 bits up to {_MOST_INT8_COLUMNS} columns, not {columns}"
    if weights.input_format == "fp8-e4m3" and not gpu.multiplies_fp8(x.device.type, x.device.index):
        return f"the tensor cores of {x.device} do not multiply 8-bit floats, those of capability 8.9 and later do"
    return None


def _no_dtype(x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    """Why these kernels do not compute with tensors of such dtypes; None if they do."""
    biases = [bias for bias in (weights.gate_up_bias, weights.down_bias) if bias is not None]
    return not_of(_FLOATS, x, routing.routing_weights, *biases)


def plan(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: tuple[str, int | None]) -> Plan:
    """How these arguments are computed."""
    invariant = torch.are_deterministic_algorithms_enabled()
    how = triton_tuning.choose(problem(x, routing, weights), gpu.device_of(x), strategy, invariant)
    return triton_maps.by_pointers(how, weights, compute_dtype(x, weights))


def problem(x: Tensor, routing: Routing, weights: ExpertWeights) -> Problem:
    """What the choice of a plan depends on."""
    scaling = [stored.format.scaling for stored in (weights.gate_up, weights.down)]
    columns = [0 if s is None else s.columns for s in scaling]
    return Problem(
        routing.num_tokens,
        routing.top_k,
        weights.planned_experts,
        weights.hidden_size,
        weights.intermediate_size,
        2 if weights.activation.gated else 1,
        compute_dtype(x, weights).itemsize,
        (weights.gate_up.format.bits, weights.down.format.bits),
        max(columns),
    )


def compute_dtype(x: Tensor, weights: ExpertWeights) -> torch.dtype:
    """What rows like x are multiplied in, and, unless they are rounded, what stands between the two products."""
    if weights.input_format != "float":
        return _INPUT_DTYPES[weights.input_format]
    return torch.promote_types(_computed_in(x, weights.gate_up.format), _computed_in(x, weights.down.format))


def _computed_in(x: Tensor, stored: WeightFormat) -> torch.dtype:
    return torch.promote_types(x.dtype, stored.storage) if stored.is_dense else x.dtype


def every_expert(routing: Routing, num_experts: int) -> tuple[Routing, Tensor]:
    """The routing [T, E] of each token to every expert, and its ids with -1 where it was not chosen.

    Of weights on the output: those on the input may be several for one expert and token.
    """
    ids = routing.expert_ids
    experts = torch.arange(num_experts, dtype=ids.dtype, device=ids.device)
    named = ids[:, :, None] == experts  # sums of a comparison have one order; scattered ones would not
    weights = torch.where(named, routing.routing_weights[:, :, None], 0.0).sum(1)
    every, chosen = experts.expand(weights.shape), named.any(1)
    return Routing.unchecked(every, weights, "output"), torch.where(chosen, every, EMPTY)
