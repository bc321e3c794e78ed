"""Attention with sinks by PyTorch's fused kernel on a CPU, where Transformers has eager operations only."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

FUSED = "moestro_fused"
"""The name of the attention below in a model's configuration; Transformers calls what it stands in for "eager"."""

SINK_FAMILIES = ("flint", "gpt_oss", "granitemoe_swa", "mimo_v2_flash")
"""Transformers' names of the models whose eager attention is a softmax over a query's logits and one sink of its head,
which attends to nothing."""


def serve_attention(model: nn.Module) -> None:
    """Have attention with sinks run fused where the model would run it eagerly, by its configuration, in place.

    `model.config._attn_implementation` then is "moestro_fused"; `model.set_attn_implementation("eager")` takes it back.
    A configuration with output_attentions is left alone.
    """
    for module in model.modules():
        if _family(module) in SINK_FAMILIES and hasattr(module, "sinks"):
            config: Any = module.config
            if config._attn_implementation == "eager" and not config.output_attentions:
                config._attn_implementation = FUSED


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as Transformers has it: query [B, heads, Q, D], key and value [B, groups, T, D] -> [B, Q, heads, D].

    On a CPU, where no gradient, no attention weights and no dropout are asked for and keys are as wide as values, by
    PyTorch's fused kernel: with the logsumexp l of a query's logits, a sink s in the softmax scales what comes out
    without it by exp(l) / (exp(l) + exp(s)). Otherwise by the model's own eager function.
    """
    sinks: Tensor | None = module.sinks
    if not _is_plain(query, key, value, sinks) or kwargs.get("dropout") or kwargs.get("output_attentions"):
        eager = sys.modules[type(module).__module__].eager_attention_forward
        mask = _causal(query, key) if attention_mask is None else attention_mask
        output, weights = eager(module, query, key, value, mask, scaling=scaling, **kwargs)
        return output, weights
    causal = attention_mask is None and query.shape[2] > 1
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=_added(attention_mask, query.dtype), scale=scaling
    )
    if sinks is not None:
        output = output * torch.sigmoid(logsumexp - sinks.to(logsumexp.dtype)[:, None]).unsqueeze(-1)
    return output.transpose(1, 2).to(value.dtype).contiguous(), None


def _family(module: nn.Module) -> str:
    package, _, name = type(module).__module__.partition(".models.")
    return name.split(".")[0] if package == "transformers" else ""


def _is_plain(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> bool:
    """Whether the kernel takes these, and no gradient is wanted: the sinks' would be lost."""
    tensors = [query, key, value] if sinks is None else [query, key, value, sinks]
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return query.device.type == "cpu" and not wants_gradient and key.shape[-1] == value.shape[-1]


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as numbers to add, of the dtype of queries: with others the kernel is wrong, or refuses."""
    if mask is None or mask.dtype == dtype:
        return mask
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def _causal(query: Tensor, key: Tensor) -> Tensor | None:
    """The mask that was left out: a token sees those up to itself; a single one sees all."""
    length = query.shape[2]
    if length == 1:
        return None
    return torch.full(
        (length, key.shape[2]), torch.finfo(query.dtype).min, dtype=query.dtype, device=query.device
    ).triu(1)


def _mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor | None:
    """Transformers' mask for fused attention, as numbers to add; None where a token sees those up to itself."""
    return _added(sdpa_mask(*args, **kwargs), dtype)


AttentionInterface.register(FUSED, attend)
AttentionMaskInterface.register(FUSED, _mask)
