"""Answers in JSON: which tokens a request may have next, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from math import prod
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moestro.errors import invalid_input, unsupported
from moestro.serve.request import OPERATION, GrammarError

_SPACES = r"[ \n\r\t]{0,40}"
"""Between the parts of a document. Without a limit a model may write spaces until its tokens are used up."""
_MOST_MULTIPLES = 100_000
"""Of all multipleOf together: llguidance makes as many states, in 4 us each, and counts them in none of its limits."""
_NO_GRAMMAR = "Leave the format out, and ask for JSON in the prompt."


class JsonGrammars:
    """Makes grammars of JSON for one model.

    Args:
        tokenizer: of the model, a fast one.
        vocabulary: the width of its logits.
        ends: its end tokens.

    Raises:
        UnsupportedError: a tokenizer of another kind, or one with tokens that the model has no logits for.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            got, needs = f"a grammar with {type(tokenizer).__name__}", "a fast tokenizer"
            raise unsupported(OPERATION, got=got, needs=needs, fix=_NO_GRAMMAR)
        try:
            known = [end for end in ends if end < len(tokenizer)]
            self._tokenizer: LLTokenizer = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=known or None)
        except ValueError as error:
            got = f"a grammar with a tokenizer of which llguidance says: {error}"
            raise unsupported(OPERATION, got=got, needs="one that fits the model", fix=_NO_GRAMMAR) from error

    def grammar(self, schema: dict[str, Any], lead: str = "") -> JsonGrammar:
        """The grammar of documents of a JSON schema.

        Args:
            schema: of the document.
            lead: what comes before it, in llguidance's kind of Lark; TEXT stands for any text.

        Raises:
            GrammarError: a schema that llguidance does not take, or not in its limits.
        """
        bounded = {**schema, "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": _SPACES}}
        multiples = prod(set(_multiples(schema)))
        if multiples > _MOST_MULTIPLES:
            raise _refused(f"with a multipleOf of {multiples:.6g}, all of them multiplied")
        try:
            found = LLMatcher.grammar_from_json_schema(bounded)
            if lead:
                found = f"start: {lead} json\njson: %json {json.dumps(bounded)}\nTEXT: /(.|\\n)*/\n"
            matcher = LLMatcher(self._tokenizer, found, log_level=0)
        except (ValueError, RecursionError) as error:
            raise _refused(f"of which llguidance says: {str(error).splitlines()[0][:200]}") from error
        matcher.compute_bitmask()  # finds what is no document at all
        if matcher.is_error():
            raise _refused(f"of which llguidance says: {_said(matcher)}")
        return JsonGrammar(matcher)


class JsonGrammar:
    """Holds one request's answer to a grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def restrict(self, logits: Tensor) -> Tensor:
        """Logits [1, vocabulary], those of tokens that cannot come next at minus infinity.

        Raises:
            GrammarError: llguidance came to a limit of its own, or nothing can come next.
        """
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        self._check()
        refused = torch.ones(logits.shape[-1], dtype=torch.bool)
        refused[: len(allowed)] = allowed[: len(refused)] == 0
        if refused.all():
            raise _refused("by which no token can come next")
        return logits.masked_fill(refused.to(logits.device), -torch.inf)

    def accept(self, token: int) -> bool:
        """Go on by a token; whether the answer is complete. Errors are those of `restrict`."""
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refused(f"of which llguidance says, in the middle of an answer: {_said(self._matcher)}")


def _multiples(schema: Any) -> Iterator[int]:
    """Every multipleOf in a schema, without its decimal point."""
    if isinstance(schema, list):
        for inner in schema:
            yield from _multiples(inner)
    elif isinstance(schema, dict):
        number = schema.get("multipleOf")
        if isinstance(number, int | float) and not isinstance(number, bool):
            digits = Decimal(str(number)).normalize()
            yield abs(int(digits.scaleb(max(0, -int(digits.as_tuple().exponent)))))
        for inner in schema.values():
            yield from _multiples(inner)


def _said(matcher: LLMatcher) -> str:
    return str(matcher.get_error()).strip().splitlines()[0][:200]


def _refused(how: str) -> GrammarError:
    needs = "a schema that it can hold an answer to, within its limits"
    return GrammarError(str(invalid_input(OPERATION, got=f"a JSON schema {how}", needs=needs, fix="Make it simpler.")))
