"""expert_mlp in the native engine: which arguments an instruction set takes, and the call prepared for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moestro import settings
from moestro.errors import UnsupportedError, unsupported
from moestro.formats import SplitTensor
from moestro.ops import native
from moestro.ops.dispatch import InWaves, KernelUse, Prepared
from moestro.ops.expert_mlp import costs, crossover
from moestro.ops.expert_mlp.native_handles import stored_handle, why_unreadable, why_untiled
from moestro.ops.expert_mlp.reasons import no_activation
from moestro.ops.expert_mlp.tuning import named_strategy
from moestro.ops.tensors import no_extent, no_gradient, no_memory, not_of
from moestro.types import Activation, Routing
from moestro.weights import ExpertWeights

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

PIECES = 0
"""Ranges of rows that each projection of an expert is cut into for the threads, 0: by its cost. benchmarks/splits.py
sets it; with 1 work is split along experts alone."""


def prepare(isa: native.Isa, x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> Prepared | str:
    """The call on this instruction set, or the reason why there is none."""
    reason = why_unsupported(isa, x, routing, weights)
    if reason is not None:
        return reason
    name, block, by = named_strategy(strategy)
    threads = torch.get_num_threads()
    walk = "grouped" if name == "auto" else name
    how = walk == "all_experts", block or 0, PIECES
    biases = weights.gate_up_bias, weights.down_bias
    copied = any(b is not None and b.stride(-1) != 1 for b in biases)
    measured = settings.current().implementation is not None or isa is best_set(x, routing, weights)
    wide = crossover.wide_rows(isa, binder(isa), x, weights) if measured else 0
    handle = _handle(isa, x, routing, weights, _rows_of(biases), how, wide)

    def compute(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> Tensor:
        ids, w = routing.expert_ids.contiguous(), routing.routing_weights.contiguous()
        rows = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        held = _rows_of((weights.gate_up_bias, weights.down_bias)) if copied else None
        call = handle if held is None else _handle(isa, x, routing, weights, held, how, wide)
        given = rows.data_ptr(), rows.stride(0), ids.data_ptr(), w.data_ptr(), out.data_ptr()
        try:
            call.run(threads, rows.shape[0], *given)
        except ValueError as error:
            raise _refused(error) from None
        return out

    def kernels(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> tuple[KernelUse, ...]:
        ids = routing.expert_ids.contiguous()
        uses = handle.plan(threads, x.shape[0], ids.data_ptr())
        return tuple(KernelUse(use.projection, use.kernel, use.units, use.rows) for use in uses)

    return Prepared(
        f"cpu-{isa.name}",
        compute,
        walk,
        _why(isa, walk, by, block),
        threads,
        handle.workspace_bytes(x.shape[0]),
        kernels,
        routed_only=walk != "all_experts",
        in_waves=_in_waves(handle, threads),
        handle=None if copied else handle,
    )


@functools.cache
def binder(isa: native.Isa) -> costs.Bind:
    """What computes samples with this instruction set."""

    def bind(x: Tensor, routing: Routing, weights: ExpertWeights, wide: int) -> Callable[[], object]:
        how, threads, out = (False, 0, 0), torch.get_num_threads(), torch.empty_like(x)
        handle = _handle(isa, x, routing, weights, (None, None), how, wide)

        def call() -> Tensor:
            ids, w = routing.expert_ids.data_ptr(), routing.routing_weights.data_ptr()
            handle.run(threads, weights.num_experts * x.shape[0], x.data_ptr(), x.stride(0), ids, w, out.data_ptr())
            return out

        return call

    return bind


def _in_waves(handle: Any, threads: int) -> InWaves:
    """The same call, its rows by themselves and their sums by themselves."""

    def room(x: Tensor, routing: Routing) -> Tensor:
        return torch.empty(routing.num_tokens, routing.top_k, x.shape[1], dtype=torch.float32, device="cpu")

    def put(x: Tensor, routing: Routing, rows: Tensor, to: Tensor) -> None:
        named = routing.expert_ids >= 0
        to[named] = rows[named]

    def rows(x: Tensor, routing: Routing, weights: ExpertWeights, to: Tensor) -> None:
        ids, w = routing.expert_ids.contiguous(), routing.routing_weights.contiguous()
        given = x if x.stride(1) == 1 else x.contiguous()
        addresses = given.data_ptr(), given.stride(0), ids.data_ptr(), w.data_ptr(), to.data_ptr()
        try:
            handle.run_rows(threads, given.shape[0], *addresses)
        except ValueError as error:
            raise _refused(error) from None

    def total(x: Tensor, routing: Routing, rows: Tensor, num_experts: int) -> Tensor:
        ids, w = routing.expert_ids.contiguous(), routing.routing_weights.contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        handle.sum(threads, x.shape[0], rows.data_ptr(), ids.data_ptr(), w.data_ptr(), out.data_ptr(), num_experts)
        return out

    return InWaves(room, rows, put, total)


def _refused(error: ValueError) -> UnsupportedError:
    """What the engine finds in ids, and nothing on this side looks for."""
    return unsupported(
        "expert_mlp",
        got=str(error),
        needs="tensors that hold memory, of every expert that the routing names",
        fix="Bring the experts' weights back into memory before they are routed to.",
    )


def _why(isa: native.Isa, walk: str, by: str, block: int | None) -> str:
    if walk == "all_experts":
        return f"{by}: every expert on every token"
    dots, outer = (
        min(block or most, most) for most in (native.LIMITS["token_block"], native.LIMITS["outer_token_block"])
    )
    one = f"the engine's one walk: an expert's weights are read once for each {dots} of its rows"
    if isa.has_outer_products and outer > dots:
        one += f" ({outer} by outer products)"
    return f"{by}; {one}" if by else one


def why_unsupported(isa: native.Isa, x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    """Why the engine cannot compute this with this instruction set; None if it can."""
    reason = _cannot(isa, x, routing, weights)
    if reason is not None:
        return reason
    best = best_set(x, routing, weights) or isa
    return crossover.reason(best, binder(best), x, routing, weights)


def predictions(x: Tensor, routing: Routing, weights: ExpertWeights) -> dict[str, float]:
    """Seconds that a call is predicted to take, by implementation: of the best set that can compute it, and of plain
    torch. Empty where nothing is measured."""
    best = best_set(x, routing, weights)
    return {} if best is None else crossover.predictions(best, binder(best), x, routing, weights)


def too_busy(x: Tensor, routing: Routing, weights: ExpertWeights) -> bool:
    """Whether nothing is predicted because threads waited for cores while this process measured."""
    best = best_set(x, routing, weights)
    return best is not None and crossover.too_busy(best, binder(best), x, routing, weights)


def best_set(x: Tensor, routing: Routing, weights: ExpertWeights) -> native.Isa | None:
    """The first set that can compute it."""
    return next((isa for isa in native.ISAS if _cannot(isa, x, routing, weights) is None), None)


def _cannot(isa: native.Isa, x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    return (
        native.reason(isa)
        or (None if x.is_cpu else f"it computes on the CPU, and x is on {x.device.type}")
        or _wrong_tensors(x, routing, weights)
        or _wrong_layer(routing, weights)
        or _wrong_input_format(isa, weights)
        or _wrong_dtype(isa, x, weights)
    )


def _wrong_tensors(x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    biases = [bias for bias in (weights.gate_up_bias, weights.down_bias) if bias is not None]
    floats = (x, routing.routing_weights, *biases)
    reason = no_memory(*floats, routing.expert_ids, *weights.tensors)
    if reason is not None:
        return reason
    reason = not_of(_FLOATS, *floats)
    if reason is not None:
        return reason
    if routing.routing_weights.dtype != torch.float32:
        return f"it reads routing weights of float32, and these are of {routing.routing_weights.dtype}"
    return no_gradient(*floats, *weights.tensors) or no_extent(x, routing.expert_ids, routing.routing_weights, *biases)


def _wrong_layer(routing: Routing, weights: ExpertWeights) -> str | None:
    reason = no_activation(weights, native.ACTIVATIONS.__contains__)
    if reason is not None:
        return reason
    if routing.top_k > native.LIMITS["most_slots"]:
        return f"it takes at most {native.LIMITS['most_slots']} slots a token, not {routing.top_k}"
    if weights.num_experts >= native.LIMITS["most_experts"]:
        return f"it takes fewer than {native.LIMITS['most_experts']} experts, not {weights.num_experts}"
    for name, stored in (("gate_up", weights.gate_up), ("down", weights.down)):
        reason = why_unreadable(stored)
        if reason is not None:
            return reason.format(name=name)
    return None


def _wrong_input_format(isa: native.Isa, weights: ExpertWeights) -> str | None:
    if weights.input_format == "float":
        return None if isa.multiplies_floats else "it multiplies int8 inputs only, and these are to stay floats"
    if weights.input_format != "int8":
        return f"it multiplies inputs of floats or int8, and these are to be rounded to {weights.input_format}"
    if not isa.multiplies_int8:
        return "it multiplies inputs of floats only, and these are to be rounded to int8"
    for name, form in (("gate_up", weights.gate_up.format), ("down", weights.down.format)):
        if form.element == "int8" and form.scaling is not None and form.scaling.columns:
            return f"it multiplies int8 inputs by int8 weights with a scale a row, and {name} is stored as {form.name}"
    columns, most = max(weights.hidden_size, weights.intermediate_size), native.LIMITS["most_int8_columns"]
    if columns > most:
        return f"it adds products of int8 in 32 bits, {most} of a row at most, and here are {columns}"
    return None


def _wrong_dtype(isa: native.Isa, x: Tensor, weights: ExpertWeights) -> str | None:
    if not isa.multiplies_bfloat16:
        return None
    if x.dtype != torch.bfloat16:
        return f"it multiplies bfloat16, and x is of {x.dtype}"
    for name, form in (("gate_up", weights.gate_up.format), ("down", weights.down.format)):
        if (reason := why_untiled(form)) is not None:
            return reason.format(name=name)
    return _wrong_tiles(weights)


def _wrong_tiles(weights: ExpertWeights) -> str | None:
    activation = weights.activation
    halves = 2 if activation.gated and not activation.interleaved else 1
    for name, stored, most in (("gate_up", weights.gate_up, halves), ("down", weights.down, 1)):
        if isinstance(stored, SplitTensor) and stored.format.is_dense and len(stored.matrices[0]) > most:
            return f"it multiplies 16 rows at a time, and the matrices of {name} may end between them"
    return None


def _handle(
    isa: native.Isa,
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    biases: tuple[Tensor | None, Tensor | None],
    how: tuple[bool, int, int],
    wide: int,
) -> Any:
    engine, dtype = native.engine(), native.FLOATS[x.dtype]
    all_experts, token_block, pieces = how
    return engine.ExpertMlp(
        isa=isa.index,
        gate_up=stored_handle(weights.gate_up),
        down=stored_handle(weights.down),
        gate_up_bias=native.array(biases[0]),
        down_bias=native.array(biases[1]),
        activation=_activation(weights.activation),
        num_experts=weights.num_experts,
        top_k=routing.top_k,
        x_dtype=dtype,
        out_dtype=dtype,
        ids_are_64_bit=routing.expert_ids.dtype == torch.int64,
        weight_on_input=routing.weight_on == "input",
        int8_input=weights.input_format == "int8",
        all_experts=all_experts,
        same_bits=torch.are_deterministic_algorithms_enabled(),
        token_block=token_block,
        pieces=pieces,
        wide_rows=wide,
    )


def _activation(a: Activation) -> Any:
    kind = native.ACTIVATIONS[a.kind]
    return native.engine().Activation(kind, a.gated, a.interleaved, a.alpha, a.limit, a.up_offset)


def _rows_of(biases: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    """The biases, copied only if the last dimension is not contiguous; rows may be apart."""
    first, last = (b if b is None or b.stride(-1) == 1 else b.contiguous() for b in biases)
    return first, last
