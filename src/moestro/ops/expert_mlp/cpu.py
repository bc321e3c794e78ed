"""The native engine's side of Python: which arguments it takes, and how their memory is described to it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moestro.formats import SplitTensor
from moestro.ops import native
from moestro.ops.expert_mlp import crossover
from moestro.ops.expert_mlp.described import Description, described
from moestro.types import EMPTY, Activation, Routing
from moestro.weights import ExpertWeights

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_PIECES = contextvars.ContextVar("pieces", default=0)


def supports(isa: native.Isa, x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    """None, or the sentence why the engine cannot compute this with this instruction set."""
    reason = native.reason(isa) or _no_memory(x)
    if reason is not None:
        return reason
    stored = _descriptions(weights, _used(routing.expert_ids, weights))
    return (
        _no_tensors(x, routing, weights, stored)
        or _no_layer(routing, weights, stored)
        or _no_rows(isa, weights)
        or _dtype(isa, x, weights)
        or crossover.reason(isa, x, routing, weights)
    )


def excludes(isa: native.Isa, x: Tensor, routing: Routing, weights: ExpertWeights) -> bool:
    """What `supports` refuses, as far as a look at x and the processor tells."""
    kinds = {"float": isa.multiplies_floats, "int8": isa.multiplies_int8}
    rows = kinds.get(weights.input_format, False)
    return not (isa.runs_here and rows and x.is_cpu) or (isa.multiplies_bfloat16 and x.dtype is not torch.bfloat16)


def takes_pairs(name: str, x: Tensor, weights: ExpertWeights) -> bool:
    """Whether under the implementation of this name rows of x, but those in tiles, become pairs of 8-bit integers."""
    isa = next((isa for isa in native.ISAS if name == f"cpu-{isa.name}"), native.ABSENT)
    elements = {weights.gate_up.format.element, weights.down.format.element}
    columns = max(weights.hidden_size, weights.intermediate_size)
    if x.dtype == torch.float32 or weights.input_format != "float" or torch.are_deterministic_algorithms_enabled():
        return False
    integers = isa.multiplies_int8_residual and elements <= set(native.INTEGERS)
    return integers and columns <= native.LIMITS["most_int8_columns"]


def _no_rows(isa: native.Isa, weights: ExpertWeights) -> str | None:
    if weights.input_format == "float":
        return None if isa.multiplies_floats else "it multiplies rows as int8 only, and these are to stay floats"
    if weights.input_format != "int8":
        return f"it multiplies rows of floats or int8, and these are to be rounded to {weights.input_format}"
    if not isa.multiplies_int8:
        return "it multiplies rows of floats only, and these are to be rounded to int8"
    columns = max(weights.hidden_size, weights.intermediate_size)
    most = native.LIMITS["most_int8_columns"]
    return (
        None
        if columns <= most
        else f"it adds products of int8 in 32 bits, {most} of a row at most, and here are {columns}"
    )


def _dtype(isa: native.Isa, x: Tensor, weights: ExpertWeights) -> str | None:
    if not isa.multiplies_bfloat16:
        return None
    if x.dtype != torch.bfloat16:
        return f"it multiplies bfloat16, and x is of {x.dtype}"
    for name, form in (("gate_up", weights.gate_up.format), ("down", weights.down.format)):
        if form.is_dense and form.storage != torch.bfloat16:
            return f"it multiplies bfloat16, and {name} is stored as {form.name}"
    return _no_tiles(weights)


def _no_tiles(weights: ExpertWeights) -> str | None:
    activation = weights.activation
    halves = 2 if activation.gated and not activation.interleaved else 1
    for name, stored, most in (("gate_up", weights.gate_up, halves), ("down", weights.down, 1)):
        if isinstance(stored, SplitTensor) and stored.format.is_dense and len(stored.matrices[0]) > most:
            return f"it multiplies 16 rows at a time, and the matrices of {name} may end between them"
    return None


def _no_memory(x: Tensor) -> str | None:
    if not x.is_cpu:
        return f"it computes on the CPU, and x is on {x.device.type}"
    if native.is_watched():
        return "it reads and writes memory, and a tracer, a transform or a dispatch mode is to see every operation"
    return None


def _no_tensors(
    x: Tensor, routing: Routing, weights: ExpertWeights, stored: tuple[Description, Description]
) -> str | None:
    values = [x, routing.routing_weights]
    values += [bias for bias in (weights.gate_up_bias, weights.down_bias) if bias is not None]
    ordinary = stored[0].is_ordinary and stored[1].is_ordinary and native.is_ordinary(routing.expert_ids)
    if not ordinary or not all(map(native.is_ordinary, values)):
        return "it reads memory as it is, and a tensor is of a subclass or stands for its negative"
    for t in values:
        if t.dtype not in _FLOATS:
            return f"it computes in float32, and a tensor is of {t.dtype}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*values, *weights.tensors)):
        return "it computes no gradients, and a tensor requires one"
    if forward_ad._current_level >= 0:
        return "it computes no gradients, and forward-mode differentiation is on"
    return None


def _no_layer(routing: Routing, weights: ExpertWeights, stored: tuple[Description, Description]) -> str | None:
    if weights.activation.kind == "custom" or weights.output_norm is not None:
        return "it cannot call a Python function, and the activation or the output norm is one"
    most = native.LIMITS["most_slots"]
    if routing.top_k > most:
        return f"it takes at most {most} slots a token, not {routing.top_k}"
    for name, description in zip(("gate_up", "down"), stored, strict=True):
        if description.reason is not None:
            return description.reason.format(name=name)
    return None


def run(
    isa: native.Isa, x: Tensor, routing: Routing, weights: ExpertWeights, strategy: tuple[str, int | None]
) -> Tensor:
    """`expert_mlp` for arguments that `supports` has passed."""
    x = _rows(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    ids, w = routing.expert_ids.contiguous(), routing.routing_weights.contiguous()
    biases = _rows(weights.gate_up_bias), _rows(weights.down_bias)
    name, block = strategy
    all_experts = name == "all_experts"
    gate_up, down = _descriptions(weights, _used(ids, weights, all_experts))
    prepared = _prepared(
        isa.index,
        (gate_up.handle, down.handle),
        (_bias(biases[0]), _bias(biases[1])),
        weights.activation,
        (weights.num_experts, routing.top_k, x.dtype, ids.dtype, routing.weight_on == "input", weights.input_format),
        (all_experts, torch.are_deterministic_algorithms_enabled(), block, _PIECES.get()),
    )
    addresses = ids.data_ptr(), w.data_ptr(), out.data_ptr()
    prepared.run(torch.get_num_threads(), x.shape[0], x.data_ptr(), x.stride(0), *addresses)
    return out


_Bias = tuple[int, torch.dtype, int]
_Sizes = tuple[int, int, torch.dtype, torch.dtype, bool, str]


@functools.lru_cache(maxsize=512)
def _prepared(
    isa: int,
    handles: tuple[Any, Any],
    biases: tuple[_Bias | None, _Bias | None],
    activation: Activation,
    sizes: _Sizes,
    walk: tuple[bool, bool, int | None, int],
) -> Any:
    """What of a call does not change from one to the next, as the engine has checked it."""
    engine = native.module
    assert engine is not None
    arrays = [None if b is None else engine.Array(b[0], native.FLOATS[b[1]], b[2]) for b in biases]
    num_experts, top_k, dtype, id_dtype, weight_on_input, input_format = sizes
    all_experts, same_bits, block, pieces = walk
    a = activation
    kind = native.ACTIVATIONS[a.kind]
    return engine.ExpertMlp(
        isa=isa,
        gate_up=handles[0],
        down=handles[1],
        gate_up_bias=arrays[0],
        down_bias=arrays[1],
        activation=engine.Activation(kind, a.gated, a.interleaved, a.alpha, a.limit, a.up_offset),
        num_experts=num_experts,
        top_k=top_k,
        x_dtype=native.FLOATS[dtype],
        out_dtype=native.FLOATS[dtype],
        ids_are_64_bit=id_dtype == torch.int64,
        weight_on_input=weight_on_input,
        int8_input=input_format == "int8",
        all_experts=all_experts,
        same_bits=same_bits,
        token_block=block or native.LIMITS["token_block"],
        pieces=pieces,
    )


@contextlib.contextmanager
def cut_into(pieces: int) -> Iterator[None]:
    """Inside, each projection of an expert is cut into this many ranges of rows for the threads, 0: by its cost.

    With 1 work is split along experts alone. It is how the benchmark of splits asks for each of them.
    """
    token = _PIECES.set(pieces)
    try:
        yield
    finally:
        _PIECES.reset(token)


@overload
def _rows(t: Tensor) -> Tensor: ...
@overload
def _rows(t: None) -> None: ...
def _rows(t: Tensor | None) -> Tensor | None:
    """The tensor, copied only if its last dimension is not contiguous; rows may be apart."""
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


def _bias(bias: Tensor | None) -> _Bias | None:
    return None if bias is None else (bias.data_ptr(), bias.dtype, bias.stride(0))


def _used(ids: Tensor, weights: ExpertWeights, all_experts: bool = False) -> Collection[int]:
    """The experts that are read, where that matters: those that `ids` name, or all."""
    if not isinstance(weights.gate_up, SplitTensor) and not isinstance(weights.down, SplitTensor):
        return ()
    return range(weights.num_experts) if all_experts else set(chain.from_iterable(ids.tolist())) - {EMPTY}


def _descriptions(weights: ExpertWeights, used: Collection[int]) -> tuple[Description, Description]:
    return described(weights.gate_up, used), described(weights.down, used)
