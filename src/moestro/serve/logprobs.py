"""Probabilities of tokens as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moestro.serve.request import Token

_LEAST = -9999.0
"""JSON has no infinity."""


def for_chat(tokenizer: Any, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Token, logprob and bytes of each token, and of the likeliest in its place."""
    return [
        {
            **_one(tokenizer, token.id, token.logprob),
            "top_logprobs": [_one(tokenizer, likely, logprob) for likely, logprob in token.top],
        }
        for token in tokens
    ]


def for_completions(tokenizer: Any, tokens: Sequence[Token], offset: int = 0) -> dict[str, Any]:
    """The same in lists; offsets are counted in characters of the new text."""
    texts = [tokenizer.decode([token.id]) for token in tokens]
    offsets = [offset + sum(map(len, texts[:index])) for index in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {tokenizer.decode([likely]): _finite(logprob) for likely, logprob in token.top} for token in tokens
        ],
        "text_offset": offsets,
    }


def _one(tokenizer: Any, token: int, logprob: float | None) -> dict[str, Any]:
    text = tokenizer.decode([token])
    # A part of a character has no text of its own, and its bytes are not what the replacement for it has.
    return {"token": text, "logprob": _finite(logprob), "bytes": None if "\ufffd" in text else [*text.encode()]}


def _finite(logprob: float | None) -> float:
    return max(_LEAST, logprob if logprob is not None else _LEAST)
