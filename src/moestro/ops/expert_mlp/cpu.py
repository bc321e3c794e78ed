"""The native engine's side of Python: which arguments it takes, and how their memory is described to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moestro import formats
from moestro.formats import PackedTensor, SplitTensor, StoredExperts, WeightFormat
from moestro.ops import native
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
_NONE = (0, 0, 0)
_MOST_SLOTS = 256
TOKEN_BLOCK = 96
"""Token rows that meet a range of weights before the next rows do; "blockwise-N" sets fewer."""


def supports(isa: native.Isa, x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    """None, or the sentence why the engine cannot compute this with this instruction set."""
    return native.reason(isa) or _no_tensors(x, routing, weights) or _no_layer(x, routing, weights)


def _no_tensors(x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    tensors = (x, routing.expert_ids, routing.routing_weights, weights.gate_up_bias, weights.down_bias)
    present = [t for t in tensors if t is not None]
    if x.device.type != "cpu":
        return f"it computes on the CPU, and x is on {x.device.type}"
    if any(
        type(t) not in (Tensor, torch.nn.Parameter) for t in present
    ) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "it reads memory, which a traced or transformed tensor, or one of a subclass, may not have"
    for t in present:
        if t.is_floating_point() and t.dtype not in _FLOATS:
            return f"it computes in float32, and a tensor is of {t.dtype}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*present, *_examples(weights))):
        return "it computes no gradients, and a tensor requires one"
    return None


def _examples(weights: ExpertWeights) -> tuple[Tensor, ...]:
    """The tensors of a stack; of experts apart those of the first, since all are stored alike."""
    found: list[Tensor] = []
    for stored in (weights.gate_up, weights.down):
        parts = (stored,) if isinstance(stored, PackedTensor) else stored.matrices[0]
        found += [t for part in parts for t in part.tensors]
    return tuple(found)


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
    parts = stored.matrices[0] if isinstance(stored, SplitTensor) else (stored,)
    if len({part.shape for part in parts}) > 1:
        return f"the matrices of {name} differ in height"
    for matrix in (stored,) if isinstance(stored, PackedTensor) else (m for e in stored.matrices for m in e):
        if any(
            t.dim() and t.shape[-1] > 1 and t.stride(-1) != 1
            for t in (matrix.data, matrix.scales, matrix.zeros)
            if t is not None
        ):
            return f"it reads rows, and {name} is not contiguous along what a product sums over"
        if isinstance(stored, SplitTensor) and not all(t.is_contiguous() for t in matrix.tensors):
            return f"it reads experts apart as contiguous matrices, and one of {name} is not"
    return None


def run(
    isa: native.Isa, x: Tensor, routing: Routing, weights: ExpertWeights, strategy: tuple[str, int | None]
) -> Tensor:
    """`expert_mlp` for arguments that `supports` has passed."""
    engine = native.module
    assert engine is not None
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    ids, w = routing.expert_ids.contiguous(), routing.routing_weights.contiguous()
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
        (_bias(weights.gate_up_bias), _bias(weights.down_bias)),
        _activation(weights.activation),
        (out.data_ptr(), _FLOATS[x.dtype]),
    )
    return out


def _activation(a: Activation) -> tuple[int, bool, bool, bool, float, float, float]:
    limit = 0.0 if a.limit is None else a.limit
    return _KINDS[a.kind], a.gated, a.interleaved, a.limit is not None, a.alpha, limit, a.up_offset


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
