"""One request's answer: tokens from the engine's thread become text, reasoning and calls in the endpoint's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from moestro.hf.models import first_sentence
from moestro.hf.text_stream import TextStream
from moestro.memory.reader import ReadError
from moestro.serve.engine import Ticket
from moestro.serve.problem import ApiError, answered, as_told
from moestro.serve.readers import Reader
from moestro.serve.request import Ended, GrammarError, Token
from moestro.serve.upstream import ReasoningText, ToolCall

PATIENCE = 0.25
"""Seconds between two looks at whether the client is still there, while there is nothing to send."""


class Content(str):
    """Text of an answer, with the tokens whose probabilities were asked for."""

    tokens: tuple[Token, ...] = ()


class Answer:
    """Listens to the engine, and puts pieces of the response into a queue, None after the last.

    Args:
        tokenizer: of the model.
        prompt_ids: the prompt's tokens.
        reader: of what this model writes.
        make_error: what is put into the queue where the answer fails.

    Attributes:
        total_tokens: new tokens so far.
        ended: how it ended.
        problem: what it failed of.
        ticket: by which the request is cancelled.
        reader: as given.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: tuple[int, ...],
        reader: Reader,
        make_error: Callable[[ApiError], Any],
    ) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.total_tokens = 0
        self.ended: Ended | None = None
        self.problem: ApiError | None = None
        self.ticket: Ticket | None = None
        self.on_end: Callable[[Ended], object] = lambda ended: None
        self._loop = asyncio.get_running_loop()
        self.reader = reader
        self._text = TextStream(tokenizer, prompt_ids, self.reader.stops, special=self.reader.special)
        self._make_error = make_error
        self._tokens: list[Token] = []
        self._unheard = False
        self._put(self.reader.begin())

    def token(self, token: Token) -> bool:
        """A new token; True at a stop string."""
        self.total_tokens += 1
        if token.logprob is not None:
            self._tokens.append(token)
        if token.id not in self.reader.unheard:
            self._give(self._text.put([token.id]))
        return self._stopped or self.problem is not None or self._unheard

    def end(self, ended: Ended) -> None:
        """The request has ended."""
        try:
            if ended.reason in ("stop", "length"):
                self._give(self._text.end())
                self._finish(ended.reason)
            else:
                self.problem = self.problem or _problem(ended)
            self.ended = ended
            self.on_end(ended)
        except Exception as error:
            self._fail(error)
        finally:
            self._put([self._make_error(self.problem)] if self.problem is not None else [])
            self._put([None])

    def cancel(self) -> None:
        """End the request; nobody listens any more."""
        if self.ticket is not None:
            self.ticket.cancel()

    @property
    def finish_reason(self) -> str:
        """As OpenAI says it."""
        return "length" if self.ended is not None and self.ended.reason == "length" else "stop"

    async def pieces(self) -> list[Any]:
        """All pieces, after the last.

        Raises:
            ApiError: the answer failed.
        """
        pieces: list[Any] = []
        while (piece := await self.queue.get()) is not None:
            pieces.append(piece)
        problem = self.problem
        if problem is not None:
            raise problem
        return pieces

    @asynccontextmanager
    async def watched(self, gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[None]:
        """While the block is open, cancel the request once the client has gone; when it closes, in any case."""

        async def watch() -> None:
            while not await gone():
                await asyncio.sleep(PATIENCE)
            self.cancel()

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            self.cancel()

    @property
    def _stopped(self) -> bool:
        return self._text.stopped is not None or self.reader.stopped

    def _give(self, text: str) -> None:
        """Hand text on, through the reader."""
        if not text:
            return
        try:
            self._put(self.reader.put(text))
        except Exception as error:
            self._fail(error)

    def _finish(self, reason: str) -> None:
        if self.problem is not None:
            return
        try:
            self._put(self.reader.end())
        except Exception as error:
            if reason != "length" and not self._stopped:  # where nothing was cut off
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.problem = self.problem or _unreadable(error)

    def _put(self, pieces: list[Any]) -> None:
        try:
            for piece in pieces:
                self._loop.call_soon_threadsafe(self.queue.put_nowait, self._with_tokens(piece))
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._unheard = True

    def _with_tokens(self, piece: Any) -> Any:
        if not isinstance(piece, str | ToolCall) or not self._tokens:
            return piece
        tokens, self._tokens = tuple(self._tokens), []
        if isinstance(piece, ReasoningText | ToolCall):  # of which no probabilities are told
            return piece
        found = Content(piece)
        found.tokens = tokens
        return found


def _problem(ended: Ended) -> ApiError:
    if ended.reason == "cancelled":
        return answered(503, got="a request that was cancelled", fix="Send it again.", code="cancelled")
    if isinstance(ended.error, GrammarError):
        return as_told(ended.error)
    # What an error says may hold paths, and is not for clients.
    if isinstance(ended.error, ReadError):
        got = "experts that could not be read from the model's files"
    else:
        got = f"an error of the model, {type(ended.error).__name__}"
    return answered(500, got=got, fix="Look at the server's messages.", code="failed")


def _unreadable(error: Exception) -> ApiError:
    got = f"an answer that cannot be taken apart ({first_sentence(error)})"
    return answered(500, got=got, fix="Send the request again.", code="unreadable_answer")
