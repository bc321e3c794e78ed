"""Attention on a CPU: of one token of each sequence by the engine, with sinks by PyTorch's fused kernel, where
Transformers has eager operations only."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from moestro.ops.attention import attention

FUSED = "moestro_fused"
"""The name of `attend` in a model's configuration; Transformers calls what it stands in for "eager"."""

STEPS = "moestro_steps"
"""That of `attend_steps`, which stands in for "sdpa"."""

NAME_READERS = (
    "axk2",
    "deepseek_v32",
    "dots3_note",
    "falcon",
    "gemma4",
    "gemma4_unified",
    "glm5_next",
    "glm_moe_dsa",
    "hy_v4",
    "minimax_m3_vl",
    "mistral_large4",
)
"""Transformers' names of the models whose code asks whether that name is "sdpa": they keep it."""

SINK_FAMILIES = ("flint", "gpt_oss", "granitemoe_swa", "mimo_v2_flash")
"""Transformers' names of the models whose eager attention is a softmax over a query's logits and one sink of its head,
which attends to nothing."""


def serve_attention(model: nn.Module) -> None:
    """Have attention of one token run in the engine, and with sinks of many fused, by the configuration, in place.

    `model.config._attn_implementation` then is "moestro_steps" where it was "sdpa", and "moestro_fused" of models with
    sinks where it was "eager"; `model.set_attn_implementation` takes it back. A configuration with output_attentions,
    and one whose name the model's code reads, is left alone. One around that of the text has its name too, and parts
    beside the text keep theirs: continuous batching looks for "sdpa" in both, and is to refuse before it starts.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        family = _family(module)
        if not family or not hasattr(module, "layer_idx") or getattr(config, "output_attentions", True):
            continue
        if family in SINK_FAMILIES and hasattr(module, "sinks"):
            if config._attn_implementation == "eager":
                config._attn_implementation = FUSED
        elif family not in NAME_READERS and config._attn_implementation == "sdpa":
            config._attn_implementation = STEPS
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _family(module) not in ("", *NAME_READERS):
            text = module.config.get_text_config(decoder=True)
            if module.config._attn_implementation == "sdpa" and text._attn_implementation == STEPS:
                module.config._attn_implementation_internal = STEPS


def attend_steps(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as Transformers' "sdpa" has it.

    query [B, heads, Q, D], key [B, groups, T, D] and value [B, groups, T, V] -> [B, Q, heads, V].
    Where Q is 1, on a CPU, without gradients, dropout, a bias of positions or a mask for each head, by
    `moestro.ops.attention`; otherwise by that function itself.
    """
    others = any(kwargs.get(name) for name in ("dropout", "softcap", "cache", "output_attentions"))
    if others or kwargs.get("position_bias") is not None or not is_step(query, key, value, attention_mask):
        output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output, weights
    scale = kwargs.get("scaling")
    return _step(query, key, value, attention_mask, query.shape[-1] ** -0.5 if scale is None else scale), None


def is_step(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None = None) -> bool:
    """Whether `moestro.ops.attention` takes these, and is the faster: one token of each sequence on a CPU."""
    if query.shape[2] != 1 or query.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, sinks) if t is not None):
        return False
    if torch.is_autocast_enabled("cpu") or not query.dtype == key.dtype == value.dtype:
        return False
    batch, groups, num_keys = key.shape[:3]
    if mask is not None and not is_one_row(mask, batch, num_keys, query.dtype):
        return False
    return num_keys > 0 and query.shape[1] % groups == 0 and batch == len(query) and key.shape[:3] == value.shape[:3]


def is_one_row(mask: Tensor, batch: int, num_keys: int, dtype: torch.dtype) -> bool:
    """Whether a mask says of each key the same to every head, for one token of each sequence or for all of them."""
    if mask.dtype not in (torch.bool, torch.float32, dtype):
        return False
    return tuple(mask.shape[1:]) == (1, 1, num_keys) and len(mask) in (1, batch)


def _step(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None = None
) -> Tensor:
    return attention(query[:, :, 0], key, value, scale, added_rows(mask, query), sinks).unsqueeze(1)


def added_rows(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask [1 or B, 1, 1, T] as what is added to the logits [B, T] of a query [B, ...], in its dtype."""
    added = _added(mask, query.dtype, -torch.inf)
    return None if added is None else added[:, 0, 0].expand(len(query), -1)


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
    if is_step(query, key, value, attention_mask, sinks):
        return _step(query, key, value, attention_mask, scaling, sinks), None
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


def _added(mask: Tensor | None, dtype: torch.dtype, unseen: float | None = None) -> Tensor | None:
    """A mask as numbers to add, of the dtype of queries: with others the kernel is wrong, or refuses."""
    if mask is None or mask.dtype == dtype:
        return mask
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    least = torch.finfo(dtype).min if unseen is None else unseen
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, least)


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
AttentionInterface.register(STEPS, attend_steps)
AttentionMaskInterface.register(STEPS, sdpa_mask)
