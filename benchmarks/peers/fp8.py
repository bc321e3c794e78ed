"""Layers on weights and rows of 8-bit floats: by hand on PyTorch's scaled grouped matmul, and Transformers' own."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moestro.bench.layers import Layer, LayerSpec
from moestro.bench.peers.variant import Bind, Numbers, Variant, cost
from moestro.formats import PackedTensor
from moestro.reference import activate
from moestro.tolerances import LOW_PRECISION_INPUT
from moestro.types import SWIGLU, Routing
from peers import installed

_MOST = torch.finfo(torch.float8_e4m3fn).max
_UNIT = 16
"""PyTorch's kernel takes rows of so many numbers, and multiples."""
_BLOCK = 128


def _numbers(format: str, bits: float) -> Numbers:
    return Numbers(
        format, 8, bits, reference=format, bound=LOW_PRECISION_INPUT, products="fp8-e4m3", bits_to_prepare=bits
    )


def rows_in_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[R, K] -> e4m3 [R, K] and float32 scales [R], each row's largest magnitude at 448."""
    wide = rows.float()
    scales = wide.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / _MOST
    return (wide / scales[:, None]).to(torch.float8_e4m3fn), scales


def _product(weights: PackedTensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Rows [R, K], rounded here, times each expert's weights [E, N, K], which have a scale a row."""
    assert weights.scales is not None
    codes, scales = rows_in_fp8(rows)
    of_weights = weights.scales.view(weights.shape[:2])
    out: Tensor = torch._scaled_grouped_mm(
        codes, weights.data.transpose(1, 2), scales, of_weights, offs=offsets, out_dtype=rows.dtype, use_fast_accum=True
    )
    return out


def _prepare_scaled(layer: Layer) -> Bind:
    weights = layer.in_format("fp8-e4m3-channel")
    gate_up, down = weights.gate_up, weights.down
    assert isinstance(gate_up, PackedTensor)
    assert isinstance(down, PackedTensor)
    every = torch.arange(layer.num_experts, device=layer.device)

    def call(x: Tensor, routing: Routing) -> Tensor:
        top_k = routing.top_k
        experts, order = routing.expert_ids.reshape(-1).sort()
        offsets = torch.searchsorted(experts, every, right=True, out_int32=True)
        w = routing.routing_weights.reshape(-1)[order, None].to(x.dtype)
        rows = x[order // top_k]
        hidden = _product(gate_up, rows * w if routing.weight_on == "input" else rows, offsets)
        if weights.gate_up_bias is not None:
            hidden = hidden + weights.gate_up_bias[experts]
        rows = _product(down, activate(hidden, weights.activation), offsets)
        if weights.down_bias is not None:
            rows = rows + weights.down_bias[experts]
        if routing.weight_on == "output":
            rows = rows * w
        back = torch.empty_like(rows).index_copy_(0, order, rows)
        return back.view(-1, top_k, rows.shape[-1]).sum(1)

    return lambda x, routing: partial(call, x, routing)


def _refuses_scaled(spec: LayerSpec, dtype: torch.dtype) -> str | None:
    if dtype != torch.bfloat16:
        return f"its results are bfloat16, not {dtype}"
    if spec.hidden_size % _UNIT or spec.intermediate_size % _UNIT:
        return f"it needs sizes that are multiples of {_UNIT}"
    return None


def _absent_scaled() -> str | None:
    return None if hasattr(torch, "_scaled_grouped_mm") else f"torch {torch.__version__} has no _scaled_grouped_mm"


def _fp8_module() -> Any:
    return importlib.import_module("transformers.integrations.finegrained_fp8")


def _prepare_transformers(layer: Layer) -> Bind:
    """Transformers' `FP8Experts` around moestro's fp8-e4m3-b128 weights, by its `grouped_mm`; nothing is copied."""
    module = _fp8_module()
    module.load_finegrained_fp8_kernel()
    weights, spec = layer.in_format("fp8-e4m3-b128"), layer.spec
    config: Any = importlib.import_module("transformers").PretrainedConfig(
        hidden_size=spec.hidden_size,
        moe_intermediate_size=spec.intermediate_size,
        num_local_experts=layer.num_experts,
        hidden_act="silu",
    )
    with torch.device("meta"):
        experts = module.FP8Experts(config, block_size=(_BLOCK, _BLOCK))
    for name, stored in (("gate_up_proj", weights.gate_up), ("down_proj", weights.down)):
        assert isinstance(stored, PackedTensor)
        assert stored.scales is not None
        setattr(experts, name, nn.Parameter(stored.data, requires_grad=False))
        setattr(experts, f"{name}_scale_inv", nn.Parameter(stored.scales, requires_grad=False))
    experts._is_expert_parallel = False
    compute = module.ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"]
    return lambda x, routing: partial(compute, experts, x, routing.expert_ids, routing.routing_weights.to(x.dtype))


def _refuses_transformers(spec: LayerSpec, dtype: torch.dtype) -> str | None:
    if spec.bias:
        return "Transformers' FP8Experts have no biases"
    if spec.hidden_size % _BLOCK or spec.intermediate_size % _BLOCK:
        return f"it needs sizes that are multiples of {_BLOCK}"
    return installed.refuses(spec, (SWIGLU,))


def _absent_transformers() -> str | None:
    """Its kernels are on the Hub, from where the package `kernels` loads them; none of its ways does without."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    if importlib.util.find_spec("kernels") is None:
        return (
            "Transformers' fp8 experts are computed by kernels-community/finegrained-fp8, a kernel of the Hugging Face "
            "Hub that the package kernels loads, and that package is not installed"
        )
    try:
        found = hasattr(_fp8_module(), "load_finegrained_fp8_kernel")
    except ImportError as error:
        return f"the installed Transformers' fp8 experts cannot be imported: {error}"
    return None if found else "the installed Transformers has other fp8 experts than the ones this peer calls"


FP8 = (
    Variant(
        "torch-scaled_grouped_mm",
        _refuses_scaled,
        _prepare_scaled,
        cost,
        "cuda",
        _numbers("fp8-e4m3-channel", 8.0),
        _absent_scaled,
    ),
    Variant(
        "transformers-fp8",
        _refuses_transformers,
        _prepare_transformers,
        cost,
        "cuda",
        _numbers("fp8-e4m3-b128", 8.002),
        _absent_transformers,
    ),
)
