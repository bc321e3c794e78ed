"""Keys and values of one request, and those of earlier requests that a prompt may begin with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from moestro.hf.cache import SPARE, grown


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A layer's keys and values [1, heads, tokens, head_dim] in memory that grows by half when it is full.

    A token is written behind those before it, where Transformers' own layer copies all of them. With a window a layer
    shows as many tokens as it attends to, and keeps the others, for a prompt that begins with a part of them.

    Args:
        window: tokens that a token attends to, itself included; None for all.
        limit: memory is for so many tokens at most; more than that are not written.
    """

    def __init__(self, window: int | None = None, limit: int = sys.maxsize) -> None:
        super().__init__()
        self.window = window
        self.limit = limit
        self.is_sliding = window is not None
        self.length = 0

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes if self.is_initialized else 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; the result is all that these attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        start, self.length = self.length, self.length + key_states.shape[-2]
        if self.length > self.keys.shape[-2]:
            capacity = min(max(self.length + SPARE, start + start // 2), self.limit)
            self.keys, self.values = grown(self.keys, start, capacity), grown(self.values, start, capacity)
        self.keys[..., start : self.length, :] = key_states
        self.values[..., start : self.length, :] = value_states
        seen = slice(self._offset(start), self.length)
        return self.keys[..., seen, :], self.values[..., seen, :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        offset = self._offset(self.length)
        return self.length + query_length - offset, offset

    def get_seq_length(self) -> int:
        return self.length

    def first(self, num_tokens: int, limit: int = sys.maxsize) -> GrowingLayer:
        """A copy of the first tokens, which may grow to `limit`."""
        copy = GrowingLayer(self.window, limit)
        if self.is_initialized:
            copy.update(self.keys[..., :num_tokens, :], self.values[..., :num_tokens, :])
        return copy

    def _offset(self, length: int) -> int:
        return 0 if self.window is None else max(0, length - self.window + 1)


class RequestCache(Cache):  # type: ignore[misc]
    """The keys and values of one request in growing layers."""

    def __init__(self, layers: list[GrowingLayer]) -> None:
        super().__init__(layers=layers)

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        layers = [layer for layer in self.layers if layer.is_initialized]
        return sum(layer.num_bytes // layer.keys.shape[-2] for layer in layers)

    def first(self, num_tokens: int, limit: int = sys.maxsize) -> RequestCache:
        """A copy of the first tokens, which may grow to `limit`."""
        return RequestCache([layer.first(num_tokens, limit) for layer in self.layers])


def new_cache(config: object, limit: int = sys.maxsize) -> Cache:
    """A cache for so many tokens of a model of this configuration: a `RequestCache` where all of its layers attend to
    all tokens or to a window of them, else Transformers' own, of which no prefix can be taken."""
    cache = DynamicCache(config=config)
    layers = [_growing(layer, limit) for layer in cache.layers]
    grow = [layer for layer in layers if layer is not None]
    return RequestCache(grow) if layers and len(grow) == len(layers) else cache


def _growing(layer: Any, limit: int) -> GrowingLayer | None:
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowingLayer(layer.sliding_window, limit)
    return GrowingLayer(limit=limit) if type(layer) is DynamicLayer else None


@dataclass(eq=False)
class _Prefix:
    ids: Tensor
    cache: RequestCache


class Prefixes:
    """Keys and values of earlier requests, the latest used last, within so many bytes.

    Attributes:
        lookups, hits: requests that asked, and those that found at least one token.
        hit_tokens: tokens that were not computed again.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.lookups = self.hits = self.hit_tokens = 0
        self._kept: list[_Prefix] = []

    @property
    def num_bytes(self) -> int:
        return sum(prefix.cache.num_bytes for prefix in self._kept)

    @property
    def entries(self) -> int:
        return len(self._kept)

    def find(self, ids: Sequence[int], limit: int = sys.maxsize) -> RequestCache | None:
        """A copy of what is kept of a prompt's longest beginning, its last token left out; None for nothing.

        The copy may grow to `limit` tokens.
        """
        self.lookups += 1
        wanted = torch.tensor(ids[:-1])
        lengths = [_common(wanted, prefix.ids) for prefix in self._kept]
        longest = max(lengths, default=0)
        if longest == 0:
            return None
        last = max(n for n, length in enumerate(lengths) if length == longest)  # others need not be near the end for it
        prefix = self._kept.pop(last)
        self._kept.append(prefix)
        self.hits += 1
        self.hit_tokens += longest
        return prefix.cache.first(longest, limit)

    def keep(self, ids: Sequence[int], cache: RequestCache) -> None:
        """Keep a cache, which nothing writes to any more; `ids` are of the tokens in it.

        What it begins with is forgotten, and what was used least lately, as far as the bytes ask for it.
        """
        new = _Prefix(torch.tensor(ids), cache)
        if not ids or cache.num_bytes > self.budget:
            return
        if any(_common(new.ids, prefix.ids) == len(new.ids) for prefix in self._kept):
            return
        self._kept = [prefix for prefix in self._kept if _common(new.ids, prefix.ids) < len(prefix.ids)]
        self._kept.append(new)
        while self.num_bytes > self.budget:
            self._kept.pop(0)

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()


def _common(one: Tensor, other: Tensor) -> int:
    """How many tokens two sequences have in common from the first on."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length
