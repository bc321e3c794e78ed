"""Experts that Transformers itself keeps in low precision: its FP8 experts, and the MXFP4 experts of gpt-oss.

Both are modules that Transformers puts in place of a model's own. Their kernels need a GPU; read as formats, they are
experts like any others. What such a module adds to the weights stays aside: activations keep the model's dtype.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moestro.errors import InvalidInputError
from moestro.formats import FORMATS, PackedTensor, SplitTensor, StoredExperts
from moestro.hf import experts
from moestro.hf.experts import Flags, Plan, refuse
from moestro.hf.families.base import Adapter, recall, remember
from moestro.types import GPT_OSS_SWIGLU
from moestro.weights import ExpertWeights

_E8M0 = torch.float8_e8m0fnu
_SCALES = "blocks of [128, 128], or one scale a matrix"


def inspect_fp8(module: Any) -> Plan:
    """Read a module of Transformers' FP8 experts."""
    gated = bool(module.has_gate)
    plan = Plan(experts.activation_of(module, gated), Flags(gated), "as stored")
    try:
        fp8_weights(module, plan)
    except InvalidInputError as error:
        raise refuse(module, f"scales that do not fit ({error})", _SCALES) from error
    return plan


def fp8_weights(module: Any, plan: Plan) -> ExpertWeights:
    """The module's parameters of this moment as experts in a format; nothing is copied."""
    up_name = plan.flags.up_name
    parts = {up_name: 2 if plan.flags.gated else 1, "down_proj": 1}
    gate_up, down = (
        _fp8(module, getattr(module, name), getattr(module, f"{name}_scale_inv"), n) for name, n in parts.items()
    )
    return ExpertWeights(gate_up, down, activation=plan.activation)


def _fp8(module: Any, data: Tensor, scales: Tensor, halves: int) -> StoredExperts:
    if data.dtype == torch.int8:
        if scales.dtype != _E8M0:
            raise refuse(module, f"FP4 weights with scales of {scales.dtype}", "scales of float8_e8m0fnu")
        return PackedTensor(data.detach().view(torch.uint8), FORMATS["mxfp4"], scales.detach().view(torch.uint8))
    if data.dtype != torch.float8_e4m3fn:
        raise refuse(module, f"weights of {data.dtype}", "float8_e4m3fn, or FP4 packed in int8")
    size = module.block_size
    if size is not None and tuple(size) != (128, 128):
        raise refuse(module, f"scales for blocks of {list(size)}", _SCALES)
    stored = FORMATS["fp8-e4m3-tensor" if size is None else "fp8-e4m3-b128"]
    data, scales = data.detach(), scales.detach()
    rows = data.shape[1] // halves
    height = 128 if size is not None else data.shape[1]
    joint = scales.shape[1] == -(-data.shape[1] // height)
    if halves == 2 and joint and rows % height and scales.shape[1] == 2 * -(-rows // height):
        got = f"gate and up of {rows} rows each and {scales.shape[1]} rows of scales, which each may have its own of"
        raise refuse(module, got, "rows in multiples of 128", "Load the checkpoint with moestro.load.")
    if halves == 1 or joint:
        return PackedTensor(data, stored, scales)
    pairs = zip(data.chunk(2, 1), scales.chunk(2, 1), strict=True)
    gate, up = (PackedTensor(half, stored, its) for half, its in pairs)
    return SplitTensor(tuple((gate[e], up[e]) for e in range(len(data))))


def serve_fp8(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, strategy: str = "auto"
) -> Tensor:
    """What ``experts_implementation="moestro"`` runs for FP8 experts; arguments and errors as for `experts.serve`."""
    weights = fp8_weights(module, recall(module, inspect_fp8))
    return experts.apply(hidden_states, top_k_index, top_k_weights, weights, strategy)


def inspect_mxfp4(module: Any) -> Plan:
    """Read a gpt-oss MLP whose experts Transformers has packed for its own kernels."""
    own = module.experts
    for name in _MXFP4:
        if isinstance(getattr(own, name), Tensor) or getattr(own, f"{name}_precision_config") is None:
            raise refuse(module, f"{name} that no checkpoint was loaded into", "packed blocks and their scales")
    return Plan(
        replace(GPT_OSS_SWIGLU, alpha=float(own.alpha), limit=float(own.limit)), Flags(biased=True), "as stored"
    )


def settle_mxfp4(module: Any, plan: Plan) -> Plan:
    """Turn the packed experts back into the published layout, once, in place of the kernels' layout."""
    own = module.experts
    for name in _MXFP4:
        config = getattr(own, f"{name}_precision_config")
        setattr(own, name, _published(getattr(own, name)))
        config.weight_scale = _published(config.weight_scale)
    return remember(module, plan)


def forward_mxfp4(module: Any, hidden_states: Tensor, *, strategy: str) -> tuple[Tensor, Tensor]:
    """Mxfp4GptOssMLP: hidden_states [..., H] -> (output of the same shape, router logits [T, E])."""
    own = module.experts
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits, scores, ids = module.router(rows)
    gate_up, down = (_mxfp4(own, name) for name in _MXFP4)
    activation = recall(module, inspect_mxfp4).activation
    weights = ExpertWeights(gate_up, down, own.gate_up_proj_bias, own.down_proj_bias, activation)
    return experts.apply(rows, ids, scores, weights, strategy).reshape(hidden_states.shape), logits


_MXFP4 = ("gate_up_proj", "down_proj")


def _mxfp4(own: Any, name: str) -> PackedTensor:
    blocks, config = getattr(own, name), getattr(own, f"{name}_precision_config")
    return PackedTensor(blocks.published, FORMATS["mxfp4"], config.weight_scale.published)


def _published(packed: Any) -> Any:
    """A tensor in the kernels' layout in the published one [E, N, .], for whoever asks it as such tensors are asked.

    Transformers saves ``storage.layout.unswizzle_data(storage.data)`` of it, which it expects [E, ., N].
    """
    published = packed.storage.layout.unswizzle_data(packed.storage.data).transpose(-1, -2).contiguous()
    layout = SimpleNamespace(unswizzle_data=torch.Tensor.detach)
    return SimpleNamespace(
        published=published, storage=SimpleNamespace(data=published.transpose(-1, -2), layout=layout)
    )


FP8 = Adapter("FP8 experts", "FP8Experts", inspect_fp8, remember, serve_fp8, "FP8 with scales of blocks or matrices")
MXFP4 = Adapter("MXFP4 gpt-oss", "Mxfp4GptOssMLP", inspect_mxfp4, settle_mxfp4, forward_mxfp4, "MXFP4, interleaved")
