"""PyTorch's own products with packed weights, in the loop over experts that one would write around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moestro import machine
from moestro.bench.layers import Layer, LayerSpec
from moestro.bench.peers.variant import Bind, Call, Numbers, Variant, cost
from moestro.reference import activate
from moestro.types import Routing
from peers import installed
from peers.bounds import QUANTISED

Product = Callable[[Tensor], Tensor]
"""Rows [R, K] times one expert's matrix -> [R, N], bias included, in the dtype of the rows."""

Pack = Callable[[Tensor, Tensor | None], Product]
"""Packs one expert's matrix [N, K], with its bias [N]."""

_GROUP = 64


def _int8_weights(matrix: Tensor, bias: Tensor | None) -> Product:
    """int8 by rows, widened inside `_weight_int8pack_mm`."""
    codes, scales = installed.rows_in_int8(matrix[None])
    packed, narrow = codes[0], scales[0].bfloat16()
    return lambda rows: _with_bias(torch._weight_int8pack_mm(rows, packed, narrow), bias)


def _int4_weights(matrix: Tensor, bias: Tensor | None) -> Product:
    """Groups of 64 columns between their least and their largest weight, widened by `_weight_int4pack_mm_for_cpu`."""
    groups = matrix.float().view(matrix.shape[0], -1, _GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = ((high - low) / 15).clamp_min(torch.finfo(torch.float32).tiny)
    codes = ((groups - low) / scales).round_().clamp_(0, 15).to(torch.int32).view(matrix.shape)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    parameters = torch.cat([scales, low + 8 * scales], -1).transpose(0, 1).contiguous().bfloat16()
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    return lambda rows: _with_bias(product(rows, packed, _GROUP, parameters), bias)


def _int8_products(matrix: Tensor, bias: Tensor | None) -> Product:
    """oneDNN's int8 linear; rows are rounded to uint8 between their least and their largest number, of all rows.

    Without VNNI two products share 16 bits and saturate: rows then have 7 bits, as PyTorch's own `reduce_range` has it.
    """
    levels = 255 if {"avx512_vnni", "avx_vnni"} & set(machine.features()) else 127
    codes, scales = installed.rows_in_int8(matrix[None])
    packed = torch.ops.onednn.qlinear_prepack(codes[0], None)
    zeros = torch.zeros(len(matrix), dtype=torch.int32)
    linear = torch.ops.onednn.qlinear_pointwise.default
    own_scales = scales[0]

    def product(rows: Tensor) -> Tensor:
        low, high = (min(float(rows.min()), 0.0), max(float(rows.max()), 0.0))
        scale = max((high - low) / levels, torch.finfo(torch.float32).tiny)
        zero = round(-low / scale)
        quantised = rows.mul(1 / scale).add_(zero).round_().clamp_(0, levels).to(torch.uint8)
        out: Tensor = linear(
            quantised, scale, zero, packed, own_scales, zeros, bias, 1.0, 0, torch.float32, "none", [], ""
        )
        return out

    return product


def _with_bias(rows: Tensor, bias: Tensor | None) -> Tensor:
    return rows if bias is None else rows + bias


def _prepare(pack: Pack, dtype: torch.dtype, layer: Layer) -> Bind:
    products = []
    for weight, bias in zip(installed.matrices(layer), installed.biases(layer), strict=True):
        own = [None] * layer.num_experts if bias is None else list(bias if dtype == torch.float32 else bias.to(dtype))
        products.append([pack(weight[e], own[e]) for e in range(layer.num_experts)])
    gate_up, down = products
    activation = layer.spec.activation

    def call(x: Tensor, routing: Routing) -> Tensor:
        experts, order = routing.expert_ids.reshape(-1).sort()
        counts = torch.bincount(experts, minlength=layer.num_experts).tolist()
        tokens = order // routing.top_k
        weights = routing.routing_weights.reshape(-1)[order, None].to(dtype)
        out, start = torch.zeros_like(x), 0
        for expert, count in enumerate(counts):
            if count:
                own = tokens[start : start + count]
                rows = down[expert](activate(gate_up[expert](x[own]), activation))
                out.index_add_(0, own, rows * weights[start : start + count])
                start += count
        return out

    def bind(x: Tensor, routing: Routing) -> Call:
        return partial(call, x.to(dtype), routing)

    return bind


def _refuses(unit: int, spec: LayerSpec, dtype: torch.dtype) -> str | None:
    if spec.hidden_size % unit or spec.intermediate_size % unit:
        return f"it needs sizes that are multiples of {unit}"
    return installed.refuses(spec)


def _absent(name: str) -> str | None:
    if "avx2" not in machine.features():
        return "PyTorch has these products for x86-64 with AVX2 only"
    namespace, operation = name.split("::")
    there = hasattr(getattr(torch.ops, namespace), operation)
    return None if there else f"this PyTorch has no {name}"


TORCH_PACKED = (
    Variant(
        "onednn-int8",
        partial(_refuses, 1),
        partial(_prepare, _int8_products, torch.float32),
        cost,
        "cpu",
        numbers=Numbers("int8", 8, 8.0, bound=QUANTISED[8], products="int8"),
        absent=partial(_absent, "onednn::qlinear_pointwise"),
    ),
    Variant(
        "torch-int8",
        partial(_refuses, 1),
        partial(_prepare, _int8_weights, torch.bfloat16),
        cost,
        "cpu",
        numbers=Numbers("int8", 8, 8.0, bound=QUANTISED[8]),
        absent=partial(_absent, "aten::_weight_int8pack_mm"),
    ),
    Variant(
        "torch-int4",
        partial(_refuses, _GROUP),
        partial(_prepare, _int4_weights, torch.bfloat16),
        cost,
        "cpu",
        numbers=Numbers("int4-g64-zp", 4, 4.5, bound=QUANTISED[4]),
        absent=partial(_absent, "aten::_weight_int4pack_mm_for_cpu"),
    ),
)
