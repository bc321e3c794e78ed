"""Who answers in a chat: a model of this process, or an endpoint that speaks OpenAI's protocol."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, Protocol
from urllib.parse import urlsplit

from moestro.errors import InvalidInputError, MoestroError, UnsupportedError, invalid_input, unsupported
from moestro.hf.generate import Sampling, configure, encode
from moestro.hf.memory import expert_memory, hits_line, memory_line
from moestro.hf.models import first_sentence
from moestro.hf.text_model import TextModel
from moestro.hf.text_stream import TextStream
from moestro.machine import available_bytes
from moestro.serve.conversation import OPERATION, Message
from moestro.serve.engine import Engine
from moestro.serve.reasoning import Piece, splitter_after
from moestro.serve.request import Ended, Request, Token

WITHOUT_CONTEXT = 4096
"""New tokens of an answer, where a model does not say what it was made for."""


@dataclass
class Usage:
    """What an answer took. None for what is not known.

    Attributes:
        prompt_tokens, cached_tokens, new_tokens: counts; the second are those of the first that were not computed.
        first_seconds: to the first piece.
        new_seconds: from there to the last.
        reason: "stop", "length" at the limit that was asked for, "context" where the context is full, or "interrupted".
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    new_tokens: int | None = None
    first_seconds: float = 0.0
    new_seconds: float = 0.0
    reason: str = "interrupted"

    @property
    def tokens_per_second(self) -> float | None:
        steps = (self.new_tokens or 0) - 1
        return steps / self.new_seconds if steps > 0 and self.new_seconds else None


class Partner(Protocol):
    """Answers messages."""

    name: str
    context: int | None

    def answer(self, messages: Sequence[Message], usage: Usage) -> Iterator[Piece]:
        """The pieces of an answer as they come. When they end, or are left, `usage` says what they took."""

    def experts(self) -> list[str]:
        """Two lines of experts within a memory budget: what it holds, and what was read. None of others."""

    def close(self) -> None:
        """End what runs."""


class LocalModel:
    """A model in this process. What an answer has in common with the turns before it is not computed again.

    Args:
        text_model: with a chat template.
        sampling: with a seed, each answer has one more than that before it, and computes all turns anew.
    """

    def __init__(self, text_model: TextModel, sampling: Sampling) -> None:
        self.name, self.context = text_model.name, text_model.context
        self._text_model, self._sampling = text_model, sampling
        self._answers = 0
        memory = expert_memory(text_model.model)
        slots = 0 if memory is None else memory.slot_bytes  # which the system gives as they are filled
        self._engine = Engine(text_model, prefix_bytes=max(0, available_bytes() - slots) // 2)

    def answer(self, messages: Sequence[Message], usage: Usage) -> Iterator[Piece]:
        """See `Partner`.

        Raises:
            InvalidInputError: messages that fill the context, or that the template does not take.
        """
        tokenizer, told = self._text_model.tokenizer, _Listener()
        ids = encode(self.name, tokenizer, messages)
        request = self._request(ids)
        splitter = splitter_after(tokenizer, ids)
        told.stream = TextStream(tokenizer, ids, self._sampling.stop, special=splitter.marks.special)
        told.ends = frozenset(_listed(request.config.eos_token_id))
        ticket = self._engine.submit(request, told)
        self._answers += 1
        left = True
        try:
            while not isinstance(what := told.queue.get(), Ended):
                yield from splitter.put(what)
            left = False
            yield from splitter.end()
        finally:
            ticket.cancel()
            while told.ended is None:
                told.queue.get()
            self._say(usage, told.ended, left)
        if isinstance(error := told.ended.error, MoestroError):
            raise error
        if error is not None:
            raise _failed(self.name, error) from error

    def experts(self) -> list[str]:
        lines = memory_line(self._text_model.model), hits_line(self._text_model.model)
        return [line for line in lines if line is not None]

    def close(self) -> None:
        self._engine.close()

    def _request(self, ids: list[int]) -> Request:
        room = WITHOUT_CONTEXT if self.context is None else self.context - len(ids)
        if room < 1:
            raise invalid_input(
                OPERATION,
                got=f"a conversation of {len(ids)} tokens",
                needs=f"fewer than {self.context}, the context of {self.name}",
                fix="Keep it with /save FILE, and begin anew with /reset.",
            )
        seed = self._sampling.seed
        sampling = replace(
            self._sampling,
            max_new_tokens=min(self._sampling.max_new_tokens or room, room),
            seed=None if seed is None else (seed + self._answers) % 2**63,
        )
        return Request(tuple(ids), configure(self._text_model, sampling, len(ids)), sampling.seed)

    def _say(self, usage: Usage, ended: Ended, left: bool) -> None:
        usage.prompt_tokens, usage.cached_tokens = ended.prompt_tokens, ended.cached_tokens
        usage.new_tokens = ended.new_tokens
        usage.first_seconds, usage.new_seconds = ended.waited + ended.prompt_seconds, ended.new_seconds
        full = self.context is not None and ended.prompt_tokens + ended.new_tokens >= self.context
        usage.reason = "interrupted" if left else "context" if ended.reason == "length" and full else ended.reason


def _failed(name: str, error: Exception) -> UnsupportedError:
    return unsupported(
        OPERATION,
        got=f"{type(error).__name__} from {name} ({first_sentence(error)})",
        needs="a model that computes an answer",
        fix="Keep the chat with /save FILE, and try another dtype or format.",
    )


class _Listener:
    """Turns tokens into text on the engine's thread; end tokens are none."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[str | Ended] = SimpleQueue()
        self.stream: TextStream
        self.ends: frozenset[int] = frozenset()
        self.ended: Ended | None = None

    def token(self, token: Token) -> bool:
        if token.id not in self.ends:
            self.queue.put(self.stream.put([token.id]))
        return self.stream.stopped is not None

    def end(self, ended: Ended) -> None:
        self.ended = ended
        self.queue.put(self.stream.end())
        self.queue.put(ended)


def _listed(ends: int | list[int] | None) -> list[int]:
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


class Endpoint:
    """A server somewhere, by the `openai` client.

    Args:
        url: of the server; /v1 is added where the url has no path.
        model: a name that it serves; None for the first that it lists.
        key: that opens it, if it asks for one.
        sampling: top_k, min_p, repetition_penalty and no_repeat_ngram_size are sent by these names, which are not
            OpenAI's.
    """

    context: int | None = None

    def __init__(self, url: str, model: str | None, key: str | None, sampling: Sampling) -> None:
        try:
            import openai
        except ImportError:
            raise invalid_input(
                OPERATION, got="--url without the package openai", needs="it", fix='pip install "moestro[serve]"'
            ) from None
        self.url = _base_url(url)
        self._errors: tuple[type[Exception], ...] = (openai.OpenAIError, ValueError, TypeError, AttributeError)
        self._client = openai.OpenAI(base_url=self.url, api_key=key or "none", max_retries=0)
        self._create: Any = self._client.chat.completions.create
        self._asked = _fields(sampling)
        self.name = model or self._first()

    def answer(self, messages: Sequence[Message], usage: Usage) -> Iterator[Piece]:
        """See `Partner`.

        Raises:
            InvalidInputError: what the server refused, and connections that broke.
        """
        start = time.perf_counter()
        stream, latest = None, 0.0
        try:
            stream = self._create(
                model=self.name,
                messages=list(messages),
                stream=True,
                stream_options={"include_usage": True},
                **self._asked,
            )
            for chunk in stream:
                _count(usage, chunk.usage)
                for choice in chunk.choices[:1]:
                    for piece in _pieces(choice.delta):
                        latest = time.perf_counter() - start
                        usage.first_seconds = usage.first_seconds or latest
                        yield piece
                    if choice.finish_reason is not None:
                        usage.reason = choice.finish_reason
        except self._errors as error:
            raise self._failed(error) from error
        finally:
            usage.new_seconds = max(0.0, latest - usage.first_seconds)
            if stream is not None:
                stream.close()

    def experts(self) -> list[str]:
        return []

    def close(self) -> None:
        self._client.close()

    def _first(self) -> str:
        try:
            names = [str(model.id) for model in self._client.models.list()]
        except self._errors as error:
            raise self._failed(error) from error
        if not names:
            raise self._failed(ValueError("it lists no model"))
        return names[0]

    def _failed(self, error: Exception) -> InvalidInputError:
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""
        return invalid_input(
            OPERATION,
            got=" ".join(f"{self.url} ({error}{cause})".split()),
            needs="an endpoint of OpenAI's protocol that answers",
            fix="Check --url, --model and --api-key, or shorten the conversation with /reset.",
        )


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise invalid_input(OPERATION, got=f"--url {url!r}", needs="http://HOST:PORT or https://...", fix="Change it.")
    return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1"


def _fields(sampling: Sampling) -> dict[str, Any]:
    """A sampling in OpenAI's words."""
    if sampling.do_sample:
        raise invalid_input(
            OPERATION, got="--do-sample with --url", needs="--temperature, by which endpoints sample", fix="Give that."
        )
    extra = {name: getattr(sampling, name) for name in ("top_k", "min_p", "repetition_penalty", "no_repeat_ngram_size")}
    found = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": 0.0 if sampling.do_sample is False else sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        "extra_body": {name: value for name, value in extra.items() if value is not None} or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _pieces(delta: Any) -> Iterator[Piece]:
    for name in ("reasoning_content", "reasoning"):
        if text := getattr(delta, name, None):
            yield Piece(str(text), reasoning=True)
            break
    if delta.content:
        yield Piece(delta.content)


def _count(usage: Usage, told: Any) -> None:
    if told is None:
        return
    usage.prompt_tokens, usage.new_tokens = told.prompt_tokens, told.completion_tokens
    details = getattr(told, "prompt_tokens_details", None)
    usage.cached_tokens = getattr(details, "cached_tokens", None)
