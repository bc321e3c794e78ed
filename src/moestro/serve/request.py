"""What the engine is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from transformers import GenerationConfig

from moestro.errors import InvalidInputError, MoestroError

OPERATION = "serve"


class BusyError(MoestroError):
    """As many requests wait as may."""


class GrammarError(InvalidInputError):
    """An answer that cannot be held to what was asked for."""


def busy(got: str, needs: str) -> BusyError:
    """The error for a request that cannot be taken now."""
    return BusyError(f"[serve] got {got}; needs {needs}. Send it again later.")


class Grammar(Protocol):
    """What the answer of one request has to be."""

    def restrict(self, logits: Tensor) -> Tensor:
        """Logits [1, vocabulary], those of tokens that cannot come next at minus infinity."""

    def accept(self, token: int) -> bool:
        """Go on by a token; whether the answer is complete."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt_ids: at least one token.
        config: how tokens are picked, complete: a number for max_new_tokens, the end tokens, greedy or sampled. Stop
            strings are the listener's affair.
        seed: of this request's own random numbers; None for any. With a seed nothing of earlier requests is reused,
            since that changes how sums are rounded.
        top_logprobs: how many of the likeliest tokens are told with each token; None for no logprobs at all.
        grammar: of this request alone; None for any text.
    """

    prompt_ids: tuple[int, ...]
    config: GenerationConfig
    seed: int | None = None
    top_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True)
class Token:
    """A new token, and natural logarithms of probabilities as the model gives them, before temperature and the rest.

    Attributes:
        id: of the token.
        logprob: of this token; None where no logprobs were asked for.
        top: the likeliest tokens (id, logprob), the likeliest first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Ended:
    """How a request ended.

    Attributes:
        reason: "stop" at an end token or where the listener said so, "length", "cancelled", or "failed".
        prompt_tokens, new_tokens: counts.
        cached_tokens: so many of the prompt's tokens were not computed, because an earlier request began with them.
        waited: seconds before work on it began.
        prompt_seconds: from there to the first new token.
        new_seconds: from the first new token to the last.
        error: what it failed of.
    """

    reason: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    waited: float
    prompt_seconds: float
    new_seconds: float
    error: Exception | None = None


class Listener(Protocol):
    """Who is told of a request's tokens, on the engine's thread; it must not block."""

    def token(self, token: Token) -> bool:
        """A new token, the end token included; True ends the request."""

    def end(self, ended: Ended) -> None:
        """The request has ended; called once, last."""
