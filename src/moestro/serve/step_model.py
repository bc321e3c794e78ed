"""A language model that reads prompts in parts and takes a step of several requests at once, tried out first."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from moestro.errors import MoestroError, UnsupportedError, unsupported
from moestro.hf.models import first_sentence
from moestro.memory.reader import ReadError
from moestro.serve import batch
from moestro.serve.cache import RequestCache, new_cache
from moestro.serve.request import OPERATION
from moestro.tolerances import LOW_PRECISION_INPUT, too_far

_TRIALS = ((0, 1, 2, 3, 4, 5), (10, 20, 30, 40, 50, 60), (9, 8, 7, 6, 5, 4))
"""Tokens of any vocabulary, to try a model out. Rounding may send a token to other experts in one trial, not in all."""
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
"""Attention in which a token sees all tokens before it, or the last ones, wherever these begin."""
_REFUSALS = (AttributeError, TypeError, RuntimeError, ValueError, IndexError, KeyError)
"""What models raise for a cache or a mask that they do not know."""


class StepModel:
    """A model of Transformers, asked for the logits of next tokens.

    Args:
        model: a causal language model.
        several: whether `step` is to take several requests.

    Attributes:
        why_not_reused: None where a part of one request's cache serves another; else what the model lacks for it. Its
            prompts are to be read at once.
        gather: how the model takes the keys of several requests.
        token_bytes: of one token's keys and values; 0 where not every layer keeps some for each token.

    Raises:
        UnsupportedError: a model with a cache of another kind, or one that cannot take several requests in a step.
        MoestroError: what the model's expert layers refuse.
    """

    def __init__(self, model: Any, several: bool = False) -> None:
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._always = {"output_router_logits": False} if "output_router_logits" in accepted else {}
        self.token_bytes = 0
        self.why_not_reused = self._why_not_reused()
        self.gather = self._find_gather() if several else batch.APART

    def new_cache(self, limit: int) -> Cache:
        """An empty cache of one request, for so many tokens."""
        return new_cache(self.model.config, limit)

    def read(self, ids: Sequence[int], cache: Cache) -> Tensor:
        """The logits [1, vocabulary] after more tokens of one request, whose cache takes them up."""
        start, device = cache.get_seq_length(), self.model.device
        output = self.model(
            input_ids=torch.tensor([list(ids)], device=device),
            position_ids=torch.arange(start, start + len(ids), device=device)[None],
            past_key_values=cache,
            use_cache=True,
            **self._last_only,
            **self._always,
        )
        return output.logits[0, -1:]  # type: ignore[no-any-return]

    def step(self, ids: Sequence[Sequence[int]], caches: Sequence[Cache]) -> Tensor:
        """The logits [N, vocabulary] after more tokens of each of N requests, whose caches take them up."""
        if len(ids) == 1:
            return self.read(ids[0], caches[0])
        return batch.step(self.model, caches, ids, self.gather, **self._last_only, **self._always)

    @torch.no_grad()
    def _why_not_reused(self) -> str | None:
        try:
            cache, _ = self._computed(_TRIALS[0])
        except MoestroError:
            raise
        except _REFUSALS as error:
            raise unsupported(
                OPERATION,
                got=f"{type(self.model).__name__} ({first_sentence(error)})",
                needs="a language model that keeps keys and values in a cache of Transformers' usual kind",
                fix="Use its own generate().",
            ) from error
        if not isinstance(cache, RequestCache):
            return "attention to all tokens, or to a window of them, in every layer"
        self.token_bytes = cache.token_bytes
        for trial in _TRIALS:
            whole, (parts, _) = self._computed(trial), self._computed(trial[:3])
            if too_far(_found(parts, self.read(trial[3:], parts)), _found(*whole), LOW_PRECISION_INPUT) is None:
                return None
        return "a prompt in two parts to give what it gives at once"

    @torch.no_grad()
    def _find_gather(self) -> batch.Gather:
        """How this model takes the keys of several requests; one that cannot is refused."""
        if self.why_not_reused is not None:
            raise self._one_by_one("a batch", self.why_not_reused)
        types = set(getattr(self.model.config.get_text_config(), "layer_types", None) or ())
        if not types <= _PLAIN_LAYERS:
            raise self._one_by_one(
                f"a batch ({', '.join(sorted(types - _PLAIN_LAYERS))})", "layers of full attention or a window"
            )
        why = ""
        for gather in (batch.APART, batch.JOINED):
            for trial in _TRIALS:
                try:
                    differences = self._differences(trial, gather)
                except ReadError:
                    raise
                except _REFUSALS as error:
                    why = first_sentence(error)
                    break
                if not differences:
                    return gather
                why = differences[0]
        raise self._one_by_one(f"a batch ({why})", "a model that computes requests together as it does one by one")

    def _differences(self, trial: Sequence[int], gather: batch.Gather) -> list[str]:
        """How two requests in one step, one with a token and one with two, differ from each by itself."""
        caches, tokens = [self._computed(trial[:2])[0], self._computed(trial[2:3])[0]], (trial[3:4], trial[4:])
        alone = [cache.first(cache.get_seq_length()) for cache in caches]
        expected = [self.read(new, cache) for new, cache in zip(tokens, alone, strict=True)]
        found = torch.split(batch.step(self.model, caches, tokens, gather, **self._last_only, **self._always), 1)
        pairs = zip(caches, found, alone, expected, strict=True)
        differences = (too_far(_found(*pair[:2]), _found(*pair[2:]), LOW_PRECISION_INPUT) for pair in pairs)
        return [difference for difference in differences if difference is not None]

    def _computed(self, ids: Sequence[int]) -> tuple[Any, Tensor]:
        """A new cache with these tokens, and the logits after them."""
        cache = new_cache(self.model.config)
        return cache, self.read(ids, cache)

    def _one_by_one(self, got: str, needs: str) -> UnsupportedError:
        name = type(self.model).__name__
        return unsupported(OPERATION, got=f"{got} with {name}", needs=needs, fix="Run requests one by one (batch=1).")


def _found(cache: RequestCache, logits: Tensor) -> Tensor:
    """What shows whether attention saw the tokens that it should have: the newest keys of the second layer.

    In later layers, rounding may have sent a token to other experts.
    """
    if len(cache.layers) == 1:
        return logits
    keys: Tensor = cache.layers[1].keys
    return keys[..., cache.layers[1].length - 1, :].flatten()[None]
