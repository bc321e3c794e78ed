"""OpenAI's `triton_kernels`: its routing, and its matmul with gather, fused SwiGLU and scatter, in any version.

The package does not say which it is; what it has does. Until Triton 3.5 its matmul was `matmul_ogs` and the routing a
module of its own, in 3.6 the routing came from a sparse matrix, and `matmul`, which came after, leaves the sum over
slots to `reduce`. On PyPI the name belongs to another package.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.bench.layers import Layer, LayerSpec
from moestro.bench.peers.variant import Bind, Call, Numbers, Variant, cost
from moestro.formats import PackedTensor
from moestro.types import Routing
from moestro.weights import ExpertWeights
from peers import installed

_FOLDER = "triton_kernels"
_SCALE_GROUPS = 4
"""mxfp4 groups in a step of 128 columns."""

Order = Callable[[Tensor, Tensor], Any]
"""Scores [T, E] and ids [T, K] -> the rows in the order of experts, as the version has it."""


@dataclass(frozen=True, eq=False)
class _Product:
    """One projection of every expert: weights [E, K, N], bias float32 [E, N] or None, and its PrecisionConfig."""

    weights: Any
    bias: Tensor | None
    precision: Any


def _part(name: str) -> Any:
    return installed.module(f"triton_kernels.{name}", _FOLDER)


def _has(name: str) -> bool:
    return importlib.util.find_spec(f"triton_kernels.{name}") is not None


def _named(cls: Any) -> set[str]:
    return {field.name for field in fields(cls)}


def _matmul() -> Any:
    """The module of the matmul, whatever it is called."""
    installed.module("triton_kernels", _FOLDER)
    return _part("matmul_ogs" if _has("matmul_ogs") else "matmul")


def _precision(scales: Any) -> Any:
    made = _matmul().PrecisionConfig
    if scales is None:
        return made()
    if "weight_scale" in _named(made):
        return made(weight_scale=scales)
    size = {"b_microblock_size": 32} if "b_microblock_size" in _named(made) else {}
    return made(b_mx_scale=scales, **size)


def _swiglu(alpha: float, limit: float | None) -> Any:
    """SwiGLU of neighbouring columns, gate * sigmoid(alpha * gate) * (up + 1), in the epilogue."""
    module = _matmul()
    arguments = ("swiglu", _part("swiglu").swiglu_fn, ("alpha", "limit"))
    if "reduction_n" in _named(module.FnSpecs):
        return module.FusedActivation(module.FnSpecs(*arguments, reduction_n=2), (alpha, limit))
    return module.FusedActivation(module.FnSpecs(*arguments), (alpha, limit), 2)


def _dense(stored: PackedTensor) -> tuple[Any, Any]:
    return stored.data.transpose(1, 2), None


def _mxfp4(stored: PackedTensor) -> tuple[Any, Any]:
    """Nibbles and scales in the layouts that the package picks for the device."""
    tensor, layout = _part("tensor"), _part("tensor_details.layout")
    scales = stored.scales
    assert scales is not None
    scales, axis = scales.view(torch.uint8), -2
    if _has("matmul_ogs"):  # its last step reads the scales of columns beyond the last
        scales, axis = F.pad(scales, (0, -scales.shape[2] % _SCALE_GROUPS)), 1
    found = []
    for values, dtype, chosen in (
        (stored.data, tensor.FP4, layout.make_default_matmul_mxfp4_w_layout(mx_axis=axis)),
        (scales, None, layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=axis, num_warps=8)),
    ):
        kind, options = chosen if isinstance(chosen, tuple) else (chosen, {})
        wrapped = tensor.wrap_torch_tensor(values.transpose(1, 2), dtype=dtype)
        found.append(tensor.convert_layout(wrapped, kind, **options))
    return found[0], found[1]


def _alternating(stored: PackedTensor) -> PackedTensor:
    """gate_up [E, 2 * I, H] with the rows of gate and of up in turn."""
    order = _order_of_halves(stored.shape[1], stored.data.device)
    scales = None if stored.scales is None else stored.scales[:, order]
    return replace(stored, data=stored.data[:, order], scales=scales)


def _order_of_halves(rows: int, device: torch.device) -> Tensor:
    return torch.arange(rows, device=device).view(2, -1).T.reshape(-1)


def _products(weights: ExpertWeights, convert: Callable[[PackedTensor], tuple[Any, Any]]) -> tuple[_Product, _Product]:
    gate_up, down, activation = weights.gate_up, weights.down, weights.activation
    assert isinstance(gate_up, PackedTensor)
    assert isinstance(down, PackedTensor)
    first, second = (None if b is None else b.float() for b in (weights.gate_up_bias, weights.down_bias))
    if not activation.interleaved:
        gate_up = _alternating(gate_up)
        order = _order_of_halves(gate_up.shape[1], gate_up.data.device)
        first = None if first is None else first[:, order]
    if activation.up_offset != 1.0:  # the fused function adds one to up
        first = torch.zeros(gate_up.shape[:2], device=gate_up.data.device) if first is None else first.clone()
        first[:, 1::2] += activation.up_offset - 1.0
    converted = (convert(gate_up), convert(down))
    return tuple(  # type: ignore[return-value]
        _Product(data, bias, _precision(scales))
        for (data, scales), bias in zip(converted, (first, second), strict=True)
    )


@dataclass(frozen=True, eq=False)
class _Experts:
    """What every call of a layer has in common: both products, the activation between them, how rows are ordered."""

    matmul: Any
    gate_up: _Product
    down: _Product
    fused: Any
    order: Order


def _run_ogs(experts: _Experts, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
    gate_up, down = experts.gate_up, experts.down
    data, gather, scatter = experts.order(scores, ids)
    rows = experts.matmul(
        x, gate_up.weights, gate_up.bias, data,
        gather_indx=gather, precision_config=gate_up.precision, fused_activation=experts.fused,
    )  # fmt: skip
    y: Tensor = experts.matmul(
        rows, down.weights, down.bias, data,
        scatter_indx=scatter, precision_config=down.precision, gammas=data.gate_scal,
    )  # fmt: skip
    return y


def _run_matmul(reduce: Any, experts: _Experts, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
    gate_up, down, top_k = experts.gate_up, experts.down, ids.shape[1]
    ragged, places, weights = experts.order(scores, ids)
    rows = experts.matmul(
        x, gate_up.weights, gate_up.bias, ragged,
        gather_indx=places // top_k, precision_config=gate_up.precision, fused_activation=experts.fused,
    )  # fmt: skip
    rows = experts.matmul(
        rows, down.weights, down.bias, ragged,
        scatter_indx=places, precision_config=down.precision, gammas=weights,
    )  # fmt: skip
    y: Tensor = reduce(rows.view(-1, top_k, rows.shape[-1]), dim=1)[0]
    return y


def _order_by_bits(topk: Any, route: Any, scores: Tensor, ids: Tensor) -> Any:
    """RoutingData, GatherIndx and ScatterIndx, as until Triton 3.5."""
    values, chosen, bits = topk(scores, ids.shape[1], apply_softmax=False, y_indx=ids)
    return route(bits, values, chosen, scores.shape[1], ids.shape[1])


def _ragged(topk: Any, describe: Any, scores: Tensor, ids: Tensor) -> tuple[Any, Any, Tensor]:
    """What is known of the ragged tensor of rows and of the order, and the weights in that order."""
    sparse = topk(scores, ids.shape[1], apply_softmax=False, y_indx=ids)
    known = sparse.mask_metadata
    ragged = describe(known.col_sum, known.row_sorted_indx.shape[0])
    return ragged, known, sparse.vals.flatten()[known.col_sorted_indx]


def _order_by_sparse(module: Any, ragged: Callable[..., Any], scores: Tensor, ids: Tensor) -> Any:
    """RoutingData, GatherIndx and ScatterIndx, as in Triton 3.6."""
    described, known, weights = ragged(scores, ids)
    to, of = known.row_sorted_indx, known.col_sorted_indx
    data = module.RoutingData(weights, known.col_sum, scores.shape[1], ids.shape[1], described)
    return data, module.GatherIndx(of, to), module.ScatterIndx(to, of)


def _order_ragged(ragged: Callable[..., Any], scores: Tensor, ids: Tensor) -> Any:
    """The ragged tensor, the places of its rows, and their weights, as since `matmul`."""
    described, known, weights = ragged(scores, ids)
    return described, known.col_sorted_indx, weights


def _interface() -> tuple[Any, Callable[..., Tensor], Order]:
    """The matmul of the version that is there, what calls it, and what orders rows for it."""
    module, topk = _matmul(), _part("topk").topk
    if _has("routing"):
        return module.matmul_ogs, _run_ogs, partial(_order_by_bits, topk, _part("routing").routing_from_bitmatrix)
    ragged = partial(_ragged, topk, _part("tensor").make_ragged_tensor_metadata)
    if _has("matmul_ogs"):
        return module.matmul_ogs, _run_ogs, partial(_order_by_sparse, module, ragged)
    return module.matmul, partial(_run_matmul, _part("reduce").reduce), partial(_order_ragged, ragged)


def _prepare(mxfp4: bool, layer: Layer) -> Bind:
    weights = layer.in_format("mxfp4") if mxfp4 else layer.weights
    module = _matmul()
    flags = _part(f"{module.__name__.rpartition('.')[2]}_details.opt_flags")
    flags.reset_opt_flags_constraints()
    if mxfp4:
        # As vLLM runs it: no pieces of the sum for packed weights on Hopper, the persistent kernel on what came after.
        later = torch.cuda.get_device_capability(layer.device)[0] >= 10
        flags.update_opt_flags_constraints({"is_persistent": True, "epilogue_subtile": 1} if later else {"split_k": 1})
    activation = weights.activation
    products = _products(weights, _mxfp4 if mxfp4 else _dense)
    fused = _swiglu(activation.alpha, activation.limit)
    matmul, run, order = _interface()
    experts = _Experts(matmul, *products, fused, order)

    def bind(x: Tensor, routing: Routing) -> Call:
        scores = torch.zeros(x.shape[0], layer.num_experts, device=x.device)
        scores.scatter_(1, routing.expert_ids, routing.routing_weights.float())
        return partial(run, experts, x, scores, routing.expert_ids.int())

    return bind


def _refuses(spec: LayerSpec, dtype: torch.dtype) -> str | None:
    if dtype != torch.bfloat16:
        return f"it is timed on bfloat16, not on {dtype}"
    if spec.top_k & (spec.top_k - 1):
        return "its routing takes powers of two of experts a token"
    return installed.refuses(spec)


def _absent() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        folders = [Path(folder) for folder in installed.module("triton_kernels", _FOLDER).__path__]
    except ImportError:
        return f"triton_kernels is not installed: {installed.INSTALL}"
    if any((folder / name).exists() for folder in folders for name in ("matmul_ogs.py", "matmul.py")):
        return None
    return f"the triton_kernels in {folders[0]} is another package of that name, without a matmul"


def _variant(name: str, numbers: Numbers, mxfp4: bool) -> Variant:
    return Variant(name, _refuses, partial(_prepare, mxfp4), cost, "cuda", numbers, _absent, compiles=True)


TRITON_KERNELS = (
    _variant("triton_kernels-bf16", Numbers("bfloat16", 16, 16), False),
    _variant("triton_kernels-mxfp4", Numbers("mxfp4", 4, 4.25, reference="mxfp4", bits_to_prepare=8.5), True),
)
