"""The native engine's side of Python: which arguments it takes, and how their memory is described to it."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moestro import formats, settings
from moestro.formats import PackedTensor, SplitTensor, StoredExperts, WeightFormat
from moestro.ops import native
from moestro.ops.expert_mlp import tuning
from moestro.types import EMPTY, Activation, Routing
from moestro.weights import ExpertWeights

_ELEMENTS = {
    "float32": 0, "float16": 1, "bfloat16": 2, "e4m3": 3, "int8": 4, "e2m1": 5, "int4": 6, "uint4": 7,
}  # fmt: skip
_SCALES = {
    torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.uint8: 4, torch.float8_e8m0fnu: 4,
    torch.float8_e4m3fn: 5,
}  # fmt: skip
_FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_KINDS = {"silu": 0, "gelu": 1, "gelu-tanh": 2, "relu": 3, "relu2": 4, "sigmoid": 5, "tanh": 6, "identity": 7}
_ORDINARY = (Tensor, torch.nn.Parameter)
_NONE = (0, 0, 0)
_MOST_SLOTS = 256
_MOST_ROUNDED_COLUMNS = 1 << 17
TOKEN_BLOCK = 96
"""Token rows that meet a range of weights before the next rows do; "blockwise-N" sets fewer."""


def supports(isa: native.Isa, x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    """None, or the sentence why the engine cannot compute this with this instruction set."""
    return (
        native.reason(isa)
        or _no_tensors(x, routing, weights)
        or _no_layer(x, routing, weights)
        or _no_rows(isa, weights)
        or _dtype(isa, x, routing, weights)
        or _wide(x, routing, weights)
    )


def _no_rows(isa: native.Isa, weights: ExpertWeights) -> str | None:
    if weights.row_format == "float":
        return None if isa.multiplies_floats else "it multiplies rows as int8 only, and these are to stay floats"
    if not isa.multiplies_integers:
        return "it multiplies rows of floats only, and these are to be rounded to int8"
    columns = max(weights.hidden_size, weights.intermediate_size)
    if columns > _MOST_ROUNDED_COLUMNS:
        return f"it adds products of int8 in 32 bits, {_MOST_ROUNDED_COLUMNS} of a row at most, and here are {columns}"
    return None


def _dtype(isa: native.Isa, x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    is_bfloat16 = {x.dtype, weights.gate_up.format.storage, weights.down.format.storage} == {torch.bfloat16}
    if isa.multiplies_bfloat16:
        return (
            _no_tiles(weights) if is_bfloat16 else "it multiplies bfloat16, and x or a projection is of another dtype"
        )
    if is_bfloat16 and tuning.multiplies_bfloat16():
        rows = routing.expert_ids.numel() / max(weights.num_experts, 1)
        if rows > tuning.BFLOAT16_ROWS and settings.current().implementation is None:
            return (
                f"this processor's bfloat16 instructions, which PyTorch uses and it does not, are faster from "
                f"{tuning.BFLOAT16_ROWS} rows an expert on ({rows:.0f} here); forced by name it runs"
            )
    return None


def _wide(x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    """Where many tokens meet rows so long that a block of them leaves the second cache."""
    stored = {weights.gate_up.format.storage, weights.down.format.storage, x.dtype}
    rows = routing.expert_ids.numel() / max(weights.num_experts, 1)
    columns = max(weights.hidden_size, weights.intermediate_size)
    forced = settings.current().implementation is not None
    if forced or stored not in ({torch.float32}, {torch.bfloat16}):
        return None
    if columns <= tuning.WIDE_COLUMNS or rows <= tuning.WIDE_ROWS:
        return None
    return (
        f"PyTorch's matmuls are faster from {tuning.WIDE_ROWS} rows an expert on ({rows:.0f} here) where it has more "
        f"than {tuning.WIDE_COLUMNS} columns ({columns}); forced by name it runs"
    )


def _no_tiles(weights: ExpertWeights) -> str | None:
    activation = weights.activation
    halves = 2 if activation.gated and not activation.interleaved else 1
    for name, stored, most in (("gate_up", weights.gate_up, halves), ("down", weights.down, 1)):
        if isinstance(stored, SplitTensor) and len(stored.matrices[0]) > most:
            return f"it multiplies 16 rows at a time, and the matrices of {name} may end between them"
    return None


def _no_tensors(x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    if x.device.type != "cpu":
        return f"it computes on the CPU, and x is on {x.device.type}"
    if _is_watched():
        return "it reads and writes memory, and a tracer, a transform or a dispatch mode is to see every operation"
    values = [x, routing.routing_weights]
    values += [bias for bias in (weights.gate_up_bias, weights.down_bias) if bias is not None]
    stored = (*weights.gate_up.tensors, *weights.down.tensors)
    if any(type(t) not in _ORDINARY or t.is_neg() for t in (*values, *stored, routing.expert_ids)):
        return "it reads memory as it is, and a tensor is of a subclass or stands for its negative"
    for t in values:
        if t.dtype not in _FLOATS:
            return f"it computes in float32, and a tensor is of {t.dtype}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*values, *stored)):
        return "it computes no gradients, and a tensor requires one"
    if forward_ad._current_level >= 0:
        return "it computes no gradients, and forward-mode differentiation is on"
    return None


def _is_watched() -> bool:
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _no_layer(x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    if weights.activation.kind == "custom" or weights.output_norm is not None:
        return "it cannot call a Python function, and the activation or the output norm is one"
    if routing.top_k > _MOST_SLOTS:
        return f"it takes at most {_MOST_SLOTS} slots a token, not {routing.top_k}"
    for name, stored in (("gate_up", weights.gate_up), ("down", weights.down)):
        reason = _no_weights(name, stored)
        if reason is not None:
            return reason
    return None


def _no_weights(name: str, stored: StoredExperts) -> str | None:
    form = stored.format
    if form.element not in _ELEMENTS or formats.FORMATS.get(form.name) != form:
        return f"it does not read {form.name}, in which {name} is stored"
    if isinstance(stored, SplitTensor):
        return _no_matrices(name, stored)
    for t in (stored.data, stored.scales, stored.zeros):
        if t is not None and t.shape[-1] > 1 and t.stride(-1) != 1:
            return f"it reads rows, and {name} is not contiguous along what a product sums over"
    return None


def _no_matrices(name: str, stored: SplitTensor) -> str | None:
    if len({part.data.shape[0] for part in stored.matrices[0]}) > 1:
        return f"the matrices of {name} differ in height"
    if not all(t.is_contiguous() for t in stored.tensors):
        return f"it reads experts apart as contiguous matrices, and one of {name} is not"
    if len({m.scales.dtype for parts in stored.matrices for m in parts if m.scales is not None}) > 1:
        return f"the scales of {name} are of several dtypes"
    return None


def run(
    isa: native.Isa, x: Tensor, routing: Routing, weights: ExpertWeights, strategy: tuple[str, int | None]
) -> Tensor:
    """`expert_mlp` for arguments that `supports` has passed."""
    engine = native.module
    assert engine is not None
    x = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    ids, w = routing.expert_ids.contiguous(), routing.routing_weights.contiguous()
    biases = _rows(weights.gate_up_bias), _rows(weights.down_bias)
    name, block = strategy
    all_experts = name == "all_experts"
    apart = isinstance(weights.gate_up, SplitTensor) or isinstance(weights.down, SplitTensor)
    used = _used(ids, weights.num_experts if all_experts else 0) if apart else []
    engine.expert_mlp(
        isa.index,
        torch.get_num_threads(),
        (all_experts, block or TOKEN_BLOCK),
        (x.shape[0], routing.top_k, weights.num_experts),
        (x.data_ptr(), _FLOATS[x.dtype], x.stride(0)),
        (ids.data_ptr(), ids.dtype == torch.int64, w.data_ptr(), routing.weight_on == "input"),
        _described(weights.gate_up, used),
        _described(weights.down, used),
        (_bias(biases[0]), _bias(biases[1])),
        _activation(weights.activation),
        (out.data_ptr(), _FLOATS[x.dtype]),
        weights.row_format == "int8",
    )
    return out


def _activation(a: Activation) -> tuple[int, bool, bool, bool, float, float, float]:
    limit = 0.0 if a.limit is None else a.limit
    return _KINDS[a.kind], a.gated, a.interleaved, a.limit is not None, a.alpha, limit, a.up_offset


@overload
def _rows(t: Tensor) -> Tensor: ...
@overload
def _rows(t: None) -> None: ...
def _rows(t: Tensor | None) -> Tensor | None:
    """The tensor, copied only if its last dimension is not contiguous; rows may be apart."""
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


def _bias(bias: Tensor | None) -> tuple[int, int, int]:
    if bias is None:
        return _NONE
    return bias.data_ptr(), _FLOATS[bias.dtype], bias.stride(0)


def _used(ids: Tensor, at_least: int) -> list[int]:
    """The experts that are read: those that `ids` name, and the first so many."""
    return sorted({*ids.flatten().tolist(), *range(at_least)} - {EMPTY})


def _described(stored: StoredExperts, used: list[int]) -> Any:
    """What the engine knows of a projection; of experts apart, where those used lie."""
    if isinstance(stored, PackedTensor):
        return _stack(stored, stored.shape[-2], stored.format)
    first = stored.matrices[0]
    made = _stack(first[0], stored.shape[1], stored.format)
    assert native.module is not None
    addresses = [_addresses(matrix) for e in used for matrix in stored.matrices[e]]
    native.module.use_table(made, len(stored.matrices), len(first), used, addresses)
    return made


def _stack(stored: PackedTensor, num_rows: int, form: WeightFormat) -> Any:
    scaling, data, scales, zeros = form.scaling, stored.data, stored.scales, stored.zeros
    assert native.module is not None
    size = data.element_size()
    is_stack = data.dim() == 3
    return native.module.stacked(
        (_ELEMENTS[form.element], 0 if scales is None else _SCALES[scales.dtype]),
        (num_rows, stored.shape[-1]),
        (1, 0) if scaling is None else (scaling.rows, scaling.columns),
        (data.stride(-2) * size, _bytes(scales, -2), _bytes(zeros, -2)),
        _addresses(stored),
        (data.stride(0) * size, _bytes(scales, 0), _bytes(zeros, 0), _bytes(stored.global_scales, 0))
        if is_stack
        else (0, 0, 0, 0),
    )


def _bytes(t: Tensor | None, dim: int) -> int:
    return 0 if t is None or t.dim() == 0 else t.stride(dim) * t.element_size()


def _addresses(matrix: PackedTensor) -> tuple[int, int, int, int]:
    scales, zeros, factors = matrix.scales, matrix.zeros, matrix.global_scales
    return (
        matrix.data.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        0 if factors is None else factors.data_ptr(),
    )
