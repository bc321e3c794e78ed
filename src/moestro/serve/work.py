"""One request while it is computed: its tokens, its settings and how it ends."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor

from moestro.hf.generate import not_finite
from moestro.serve.request import Ended, Listener, Request, Token

_PENALTIES = {
    "no_repeat_ngram_size": 0,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "remove_invalid_values": False,
}
"""What may forbid tokens that a grammar needs, switched off."""


class Work:
    """A request that waits or is computed.

    Attributes:
        prompt, ids: the prompt's tokens, and these with the new ones.
        done: tokens of the prompt whose keys and values are in the cache; `cached` of them came from earlier requests.
    """

    def __init__(self, request: Request, listener: Listener, room: int) -> None:
        self.request = request
        self.listener = listener
        self.room = room
        self.prompt = list(request.prompt_ids)
        self.ids = list(request.prompt_ids)
        self.cache: Any = None
        self.done = self.cached = 0
        self.cancelled = False
        self._seen: Any = None
        self._processors: Any = None
        self._submitted = time.perf_counter()
        self._begun = self._first = self._latest = 0.0

    @property
    def prompt_done(self) -> bool:
        return self.cache is not None and self.done == len(self.prompt)

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - len(self.prompt)

    @property
    def most_tokens(self) -> int:
        """Tokens that its keys and values may be of."""
        return len(self.prompt) + self.room

    @property
    def last(self) -> int:
        return self.ids[-1]

    def begin(self, model: Any) -> None:
        """Make ready what picks tokens: Transformers' own processors of logits, and random numbers."""
        self._begun = self._first = self._latest = time.perf_counter()
        device = model.device
        config, _ = model._prepare_generation_config(self.request.config)  # a copy, with Transformers' defaults
        config.max_new_tokens = self.room
        model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=device)
        self._processors = model._get_logits_processor(config, input_ids_seq_length=len(self.prompt), device=device)
        if self.request.grammar is not None:
            without = copy.deepcopy(config)
            without.update(**_PENALTIES)
            self._warpers = model._get_logits_processor(without, input_ids_seq_length=len(self.prompt), device=device)
        self._sampled = bool(config.do_sample)
        ends = config.eos_token_id
        self._ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self._generator = torch.Generator(device)
        if self.request.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(self.request.seed)
        self._seen = torch.empty(1, len(self.prompt) + self.room, dtype=torch.long, device=device)
        self._seen[0, : len(self.prompt)] = torch.tensor(self.prompt)

    def take(self, logits: Tensor) -> str | None:
        """Pick the next token from logits [vocabulary] and tell it; the reason if the request ends here."""
        logits = logits[None].to(torch.float32, copy=True)
        told = self.request.top_logprobs
        logprobs = None if told is None else logits.log_softmax(-1)[0]
        token = self._pick(logits)
        self._seen[0, len(self.ids)] = token
        self.ids.append(token)
        self._latest = time.perf_counter()
        if self.new_tokens == 1:
            self._first = self._latest
        grammar = self.request.grammar
        complete = grammar is not None and grammar.accept(token)
        if self.listener.token(_token(token, logprobs, told)) or token in self._ends or complete:
            return "stop"
        return "length" if self.new_tokens == self.room else None

    def _pick(self, logits: Tensor) -> int:
        seen = self._seen[:, : len(self.ids)]
        if self.request.grammar is None:
            scores = self._processors(seen, logits)
        else:
            logits = self.request.grammar.restrict(logits)
            scores = self._processors(seen, logits.clone())
            if not (scores[torch.isfinite(logits)] > torch.finfo(scores.dtype).min).any():
                scores = self._warpers(seen, logits)  # tokens that may not come again were all that the grammar has
        if not self._sampled:
            return int(scores.argmax(-1))
        probabilities = scores.softmax(-1)
        if not torch.isfinite(probabilities).all():
            raise not_finite("the model")
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def release(self) -> Any:
        """Give up the cache, and what picked tokens; returns the cache, None where work had not begun."""
        cache, self.cache = self.cache, None
        self._seen = self._processors = self._warpers = None
        return cache

    def end(self, reason: str, error: Exception | None = None) -> None:
        """Tell the listener how the request ended."""
        begun = self._begun or time.perf_counter()
        self.listener.end(
            Ended(
                reason,
                prompt_tokens=len(self.prompt),
                cached_tokens=self.cached,
                new_tokens=self.new_tokens,
                waited=begun - self._submitted,
                prompt_seconds=self._first - self._begun,
                new_seconds=self._latest - self._first,
                error=error,
            )
        )


def _token(token: int, logprobs: Tensor | None, top: int | None) -> Token:
    if logprobs is None:
        return Token(token)
    values, ids = logprobs.topk(min(top or 0, len(logprobs)))
    return Token(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
