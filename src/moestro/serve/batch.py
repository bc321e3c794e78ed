"""Tokens of several requests through the model at once: attention for each by itself, all else together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moestro.errors import unsupported

PACKED = "moestro_packed"
"""The name under which Transformers' models find the attention below."""


class _OfEach(list[Tensor]):
    """The keys, or the values, that each request's tokens attend to."""


Gather = Callable[[list[Tensor]], Any]
APART: Gather = _OfEach
"""A model gets a list of each request's keys, which it must hand on to its attention as it is. Nothing is copied."""
JOINED: Gather = partial(torch.cat, dim=-2)
"""A model gets all requests' keys in one tensor, copied in each step, and may compute on them token by token."""


class _PackedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of several caches: tokens go to these in order, to each as many as `counts` says."""

    def __init__(self, layers: list[Any], counts: list[int], gather: Gather) -> None:
        super().__init__()
        self.layers = layers
        self.counts = counts
        self.gather = gather
        self.is_sliding = layers[0].is_sliding
        self.lengths: list[int] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        """Take keys and values [1, heads, tokens, head_dim] of all requests."""
        keys, values = torch.split(key_states, self.counts, dim=-2), torch.split(value_states, self.counts, dim=-2)
        updated = [layer.update(*each) for layer, *each in zip(self.layers, keys, values, strict=True)]
        self.lengths = [keys.shape[-2] for keys, _ in updated]
        return self.gather([keys for keys, _ in updated]), self.gather([values for _, values in updated])

    def get_seq_length(self) -> int:
        """No length is that of every request: a model that asks for it, beside its positions, cannot take a step."""
        raise unsupported(
            "serve",
            got="a model that asks for the one length of several caches",
            needs="one that goes by positions",
            fix="Run requests one by one.",
        )


@dataclass(frozen=True)
class _Step:
    """What attention asks for inside a step: its own name, the layers of all requests, and each request's masks."""

    attention: str
    layers: list[_PackedLayer]
    masks: list[dict[bool, Tensor | None]]


_STEP: ContextVar[_Step] = ContextVar("the step that is computed")


def step(model: Any, caches: Sequence[Cache], ids: Sequence[Sequence[int]], gather: Gather, **kwargs: Any) -> Tensor:
    """The logits [N, vocabulary] after more tokens of each of N requests, whose caches take them up.

    The model computes the tokens of all requests as one sequence, but for attention: there the model's own function is
    called for each request by itself, with that request's keys and values. `gather` is how the model gets these,
    `APART` or `JOINED`.
    """
    device, counts = model.device, [len(tokens) for tokens in ids]
    starts = [cache.get_seq_length() for cache in caches]
    positions = [start + n for start, count in zip(starts, counts, strict=True) for n in range(count)]
    layers = [
        _PackedLayer(list(each), counts, gather) for each in zip(*(cache.layers for cache in caches), strict=True)
    ]
    config = model.config.get_text_config()
    masks = [_masks(config, *each, model) for each in zip(caches, counts, strict=True)]
    ends = torch.tensor(counts, device=device).cumsum(0) - 1
    if "logits_to_keep" in kwargs:
        kwargs["logits_to_keep"] = ends
    # A mask of four dimensions is taken as it is; the attention below does not look at it.
    mask = torch.ones(1, 1, len(positions), len(positions), dtype=torch.bool, device=device)
    with _packed_attention(config, layers, masks):
        output = model(
            input_ids=torch.tensor([[token for tokens in ids for token in tokens]], device=device),
            position_ids=torch.tensor([positions], device=device),
            attention_mask=mask,
            past_key_values=Cache(layers=layers),
            use_cache=True,
            **kwargs,
        )
    logits: Tensor = output.logits[0]
    return logits if len(logits) == len(ids) else logits[ends]


def _masks(config: Any, cache: Cache, count: int, model: Any) -> dict[bool, Tensor | None]:
    """The masks of one request's new tokens, as the model's attention wants them, by whether a layer has a window."""
    if count == 1:  # a token sees all that its layer shows
        return {False: None, True: None}
    like = torch.empty(1, count, 1, dtype=model.dtype, device=model.device)
    makers = {False: create_causal_mask, True: create_sliding_window_causal_mask}
    kinds = {layer.is_sliding for layer in cache.layers}
    return {kind: makers[kind](config, like, None, past_key_values=cache) for kind in kinds}


@contextmanager
def _packed_attention(config: Any, layers: list[_PackedLayer], masks: list[Any]) -> Iterator[None]:
    """Inside, attention modules of this configuration call `_attend`, and `_attend` what they called before."""
    before = config._attn_implementation
    token = _STEP.set(_Step(before, layers, masks))
    config._attn_implementation = PACKED
    try:
        yield
    finally:
        config._attn_implementation = before
        _STEP.reset(token)


def _attend(
    module: Any, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of each request's queries to its keys and values, by the model's own function.

    query is [1, heads, tokens of all requests, head_dim].
    """
    step = _STEP.get()
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(step.attention, eager)
    layer = step.layers[module.layer_idx]
    if isinstance(key, Tensor):
        key, value = torch.split(key, layer.lengths, dim=-2), torch.split(value, layer.lengths, dim=-2)
    each = zip(torch.split(query, layer.counts, dim=-2), key, value, step.masks, strict=True)
    outputs = [attention(module, q, k, v, masks[layer.is_sliding], **kwargs)[0] for q, k, v, masks in each]
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(PACKED, _attend)
