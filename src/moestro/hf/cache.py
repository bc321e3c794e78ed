"""Keys and values in memory that has room for more: a token is written behind those before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

SPARE = 256
"""Tokens for which there is room beside those that made the memory grow."""

Place = tuple[int, int, int]
"""Of memory for a token of each sequence: the address, and how many elements sequences and heads are apart."""

Both = tuple[Tensor, Tensor]
"""Of keys and of values."""


class AppendingLayer(DynamicLayer):
    """A layer's keys and values as Transformers' own layer has them, which copies all of them for each new token.

    `keys` and `values` [B, heads, tokens, head_dim] are the first tokens of memory that grows by half when it is full.
    What is put in their place, as a beam search does, is copied once. For inference: no gradient goes through a copy.
    """

    keys: Tensor
    values: Tensor
    _memory: Both
    _taken: tuple[Tensor | None, Tensor | None] = None, None

    def room(self, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Place, Place] | None:
        """Where the keys and the values of one more token go, [B, heads, head_dim] each: whoever writes them calls
        `take`. None where there is no memory for them."""
        if not self.is_initialized or self.keys.dtype != dtype:
            return None
        return _room((self.keys, self.values), self._memory, self._taken, (*shape, self.keys.shape[-2]))

    def take(self) -> Both:
        """Count in the token for which `room` was given; the result is all that it attends to."""
        (key_memory, value_memory), length = self._memory, self.keys.shape[-2] + 1
        self.keys, self.values = key_memory.narrow(2, 0, length), value_memory.narrow(2, 0, length)
        self._taken = self.keys, self.values
        return self._taken

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


class AppendingWindow(DynamicSlidingWindowLayer):
    """The same of a layer that attends to a window of tokens: the window moves through memory that has room behind it,
    and begins anew in other memory where that is full."""

    keys: Tensor
    values: Tensor
    _memory: Both | None = None
    _taken: tuple[Tensor | None, Tensor | None] = None, None
    _end = 0

    def room(self, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Place, Place] | None:
        """As `AppendingLayer.room`."""
        if not self.is_initialized or self.record_past or self._memory is None or self.keys.dtype != dtype:
            return None
        return _room((self.keys, self.values), self._memory, self._taken, (*shape, self._end))

    def take(self) -> Both:
        """As `AppendingLayer.take`."""
        assert self._memory is not None  # there was room
        first, self._end = self._end - self.keys.shape[-2], self._end + 1
        self.cumulative_length += 1
        seen = [memory[:, :, first : self._end] for memory in self._memory]
        self.keys, self.values = (states[:, :, 1 - self.sliding_window :] for states in seen)
        self._taken = self.keys, self.values
        return seen[0], seen[1]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; the result is all that these attend to."""
        if not self._takes(key_states, value_states):
            found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return found
        batch, heads, _, columns = key_states.shape
        if self._memory is None or self.room((batch, heads, columns), key_states.dtype) is None:
            kept, states = self.keys.shape[-2], (self.keys, self.values)
            key_memory, value_memory = (grown(each, kept, kept + SPARE) for each in states)
            self._memory, self._end = (key_memory, value_memory), kept
        key_memory, value_memory = self._memory
        key_memory[:, :, self._end] = key_states[:, :, 0]
        value_memory[:, :, self._end] = value_states[:, :, 0]
        return self.take()

    def _takes(self, keys: Tensor, values: Tensor) -> bool:
        """Whether they are those of one token behind others, and alike."""
        if not self.is_initialized or self.record_past or self.sliding_window < 2 or keys.shape[-2] != 1:
            return False
        same = keys.dtype == values.dtype == self.keys.dtype and keys.shape == values.shape
        return same and keys.shape[:2] == self.keys.shape[:2]


def _room(
    states: Both,
    both: Both,
    taken: tuple[Tensor | None, Tensor | None],
    size: tuple[int, int, int, int],
) -> tuple[Place, Place] | None:
    """Where the token at `end` goes in memory for keys and for values, if states are the tokens in front of it there.

    Those that were taken last are, unless they lie elsewhere now. size: batch, heads, columns of a head, end.
    """
    batch, heads, columns, end = size
    for each, last, memory in zip(states, taken, both, strict=True):
        if memory.dim() != 4 or (each is not last and not _is_part(each, memory, states[0])):
            return None
        sequences, groups, capacity, width = memory.shape
        if (sequences, groups, width) != (batch, heads, columns) or end >= capacity or not _is_writable(memory):
            return None
        first = memory.data_ptr() + (end - each.shape[-2]) * memory.stride(2) * memory.element_size()
        if each.data_ptr() != first:
            return None
    return _place(both[0], end), _place(both[1], end)


def _is_part(states: Tensor, memory: Tensor, keys: Tensor) -> bool:
    """Whether states have the form of some tokens of memory, as many as keys are."""
    same = states.stride() == memory.stride() and states.shape == keys.shape
    return same and states.shape[:2] == memory.shape[:2] and states.shape[3] == memory.shape[3]


def _place(memory: Tensor, token: int) -> Place:
    sequence, head, row, _ = memory.stride()
    return memory.data_ptr() + token * row * memory.element_size(), sequence, head


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
    Transformers takes no other, or where no layer keeps keys and values: linear ones do not.
    """
    usual = config.cache_implementation is None and config.use_cache is not False
    other = getattr(model.config, "is_encoder_decoder", False) or "mamba" in type(model).__name__.lower()
    if other or not usual or not model._supports_default_dynamic_cache():
        return {}
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    served = False
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[number], served = AppendingLayer(), True
        elif type(layer) is DynamicSlidingWindowLayer:
            cache.layers[number], served = AppendingWindow(layer.sliding_window), True
    return {"past_key_values": cache} if served else {}
