"""Keys and values in memory that has room for more: a token is written behind those before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

SPARE = 256
"""Tokens for which there is room beside those that made the memory grow."""


class AppendingLayer(DynamicLayer):
    """A layer's keys and values as Transformers' own layer has them, which copies all of them for each new token.

    `keys` and `values` [B, heads, tokens, head_dim] are the first tokens of memory that grows by half when it is full.
    What is put in their place, as a beam search does, is copied once. For inference: no gradient goes through a copy.
    """

    keys: Tensor
    values: Tensor
    _memory: tuple[Tensor, Tensor]

    def room(self, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Memory for the keys and the values of one more token, [B, heads, head_dim] each: whoever has written it calls
        `take`. None where there is none."""
        if not self.is_initialized or self.keys.dtype != dtype:
            return None
        used, (batch, heads, columns) = self.keys.shape[-2], shape
        for states, memory in zip((self.keys, self.values), self._memory, strict=True):
            begins = states.data_ptr() == memory.data_ptr() and states.stride() == memory.stride()
            fits = states.shape == (batch, heads, used, columns) and used < memory.shape[-2]
            if not begins or not fits or not _is_writable(memory):
                return None
        key_memory, value_memory = self._memory
        return key_memory[:, :, used], value_memory[:, :, used]

    def take(self) -> tuple[Tensor, Tensor]:
        """Count in the token for which `room` was given; the result is all that it attends to."""
        (key_memory, value_memory), length = self._memory, self.keys.shape[-2] + 1
        self.keys, self.values = key_memory[:, :, :length], value_memory[:, :, :length]
        return self.keys, self.values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; the result is all that these attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
            self._memory = self.keys, self.values
        key_memory, value_memory = self._memory
        self.keys, key_memory = _appended(key_memory, self.keys, key_states)
        self.values, value_memory = _appended(value_memory, self.values, value_states)
        self._memory = key_memory, value_memory
        return self.keys, self.values


def grown(states: Tensor, used: int, capacity: int) -> Tensor:
    """Memory for so many tokens, of which the first come from states [..., tokens, columns]."""
    memory = states.new_empty(*states.shape[:-2], capacity, states.shape[-1])
    memory[..., :used, :] = states[..., :used, :]
    return memory


def _appended(memory: Tensor, states: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """States with new ones behind them, and the memory that both lie in: where the states lie at the beginning of it,
    and there is room, that which is given."""
    used = states.shape[-2]
    length = used + new.shape[-2]
    begins = states.data_ptr() == memory.data_ptr() and states.shape[:-2] == memory.shape[:-2]
    if not begins or not _is_writable(memory) or length > memory.shape[-2]:
        memory = grown(states, used, max(length + SPARE, used + used // 2))
    memory[..., used:length, :] = new
    return memory[..., :length, :], memory


def _is_writable(memory: Tensor) -> bool:
    """What was made in inference mode cannot be written outside of it."""
    return torch.is_inference_mode_enabled() or not memory.is_inference()


def appending_cache(model: Any, config: GenerationConfig) -> dict[str, Any]:
    """The arguments of a generation by this configuration that have its keys and values appended in place.

    Empty where Transformers would not make its usual cache for the model, where a cache is named, beside which
    Transformers takes no other, or where no layer attends to all tokens: those that attend to a window hold few, and
    linear ones none.
    """
    usual = config.cache_implementation is None and config.use_cache is not False
    other = getattr(model.config, "is_encoder_decoder", False) or "mamba" in type(model).__name__.lower()
    if other or not usual or not model._supports_default_dynamic_cache():
        return {}
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    whole = [number for number, layer in enumerate(cache.layers) if type(layer) is DynamicLayer]
    for number in whole:
        cache.layers[number] = AppendingLayer()
    return {"past_key_values": cache} if whole else {}
