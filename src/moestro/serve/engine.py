"""The engine: requests on one model, one after the other or several in a step, each with its own settings and cache."""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextvars import copy_context

import torch
from torch import Tensor
from transformers.generation import GenerationMode

from moestro.errors import invalid_input, unsupported
from moestro.hf.text_model import TextModel
from moestro.serve.cache import Prefixes
from moestro.serve.request import OPERATION, Listener, Request, busy
from moestro.serve.step_model import StepModel
from moestro.serve.work import Work

_logger = logging.getLogger("moestro.serve")

CHUNK = 1024
"""Tokens of prompts that are computed in one step, beside one token of each request whose prompt is done."""


class Engine:
    """Runs requests on a model in a thread of its own, which works in the context that the engine was made in.

    Args:
        text_model: from `load_text_model`.
        batch: requests that share a step, each computed as if it were alone but for rounding.
        max_waiting: requests that may wait for one of these places.
        prefix_bytes: memory for keys and values of earlier requests.
        kv_bytes: memory for keys and values of the requests that are computed, each counted with all of its new tokens;
            None for no limit but the model's context.

    Attributes:
        reused: None where a prompt reuses keys and values of earlier requests that began with the same tokens; else
            what a model needs for it that this one lacks. Its prompts are computed at once.

    Raises:
        UnsupportedError: a model with a cache of another kind, or a batch of several on a model whose attention cannot
            be taken apart by request.
    """

    def __init__(
        self,
        text_model: TextModel,
        batch: int = 1,
        max_waiting: int = 64,
        prefix_bytes: int = 1 << 30,
        kv_bytes: int | None = None,
    ) -> None:
        given = {
            "batch": batch - 1,
            "max_waiting": max_waiting,
            "prefix_bytes": prefix_bytes,
            "kv_bytes": kv_bytes or 0,
        }
        for name, above in given.items():
            if above < 0:
                raise invalid_input(
                    OPERATION,
                    got=f"{name}={above + (name == 'batch')}",
                    needs="a batch of at least 1, and no number below 0",
                    fix="Change it, or leave it out.",
                )
        self.text_model = text_model
        self.batch = batch
        self.max_waiting = max_waiting
        self.prefixes = Prefixes(prefix_bytes)
        self.kv_bytes = kv_bytes
        self._model = StepModel(text_model.model, batch > 1)
        self.reused = self._model.why_not_reused
        if kv_bytes is not None and self._model.token_bytes == 0:
            needs, fix = "a cache of keys and values in every layer", "Leave kv_bytes out."
            raise unsupported(OPERATION, got=f"kv_bytes with {text_model.name}", needs=needs, fix=fix)
        self._waiting: deque[Work] = deque()
        self._running: list[Work] = []
        self._closed = False
        self._changed = threading.Condition()
        threads = torch.get_num_threads()
        context = copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run, threads), name="moestro", daemon=True)
        self._thread.start()

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values; 0 where not every layer keeps some for each token."""
        return self._model.token_bytes

    @property
    def running(self) -> int:
        """Requests that are computed."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Take up a request, from any thread. Of max_new_tokens as many count as the model's context leaves.

        Raises:
            BusyError: `max_waiting` requests wait already, or the engine is closed.
            InvalidInputError: no token, ids that are no tokens, a prompt that fills the context, more tokens than
                `kv_bytes` holds, or beams and other searches.
        """
        work = Work(request, listener, self._room(request))
        self._check_memory(work)
        with self._changed:
            if self._closed:
                raise busy("a request after the engine was closed", "an engine that runs")
            if len(self._waiting) >= self.max_waiting + self.batch - len(self._running):
                raise busy(f"a request while {len(self._waiting)} wait", f"fewer than {self.max_waiting + 1} to wait")
            self._waiting.append(work)
            self._changed.notify()
        return Ticket(work, self._changed)

    def close(self) -> None:
        """Cancel all requests and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _room(self, request: Request) -> int:
        """New tokens that a request may have."""
        length, context = len(request.prompt_ids), self.text_model.context
        most = request.config.max_new_tokens or 1
        mode = request.config.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise invalid_input(
                OPERATION, got=mode.value, needs="the likeliest token or a sampled one", fix="Leave beams out."
            )
        size = self.text_model.model.config.get_text_config().vocab_size
        if not all(0 <= token < size for token in request.prompt_ids):  # which would fail others' step
            raise invalid_input(
                OPERATION,
                got="a prompt with ids that are no tokens",
                needs=f"0 to {size - 1}",
                fix="Check the tokenizer.",
            )
        if length < 1 or (context is not None and length >= context):
            raise invalid_input(
                OPERATION,
                got=f"a prompt of {length} tokens",
                needs="at least one"
                + (f" and fewer than {context}, the context of {self.text_model.name}" if context else ""),
                fix="Shorten the prompt." if length else "Write a prompt.",
            )
        return most if context is None else min(most, context - length)

    def _check_memory(self, work: Work) -> None:
        if self.kv_bytes is not None and work.most_tokens * self._model.token_bytes > self.kv_bytes:
            raise invalid_input(
                OPERATION,
                got=f"{len(work.prompt)} tokens and {work.room} new ones",
                needs=f"at most {self.kv_bytes // self._model.token_bytes} together, for which there is memory",
                fix="Shorten the prompt, ask for fewer new tokens, or raise kv_bytes, of a server --kv-memory.",
            )

    def _fits(self, work: Work) -> bool:
        """Whether keys and values of a request have room beside those of the requests that run."""
        tokens = sum(other.most_tokens for other in (*self._running, work))
        return self.kv_bytes is None or tokens * self._model.token_bytes <= self.kv_bytes

    @torch.no_grad()
    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)
        while True:
            with self._changed:
                while not (self._waiting or self._running or self._closed):
                    self._changed.wait()
                if self._closed:
                    for work in (*self._waiting, *self._running):
                        work.cancelled = True
                self._drop_cancelled()
                if self._closed:
                    return
                while self._waiting and len(self._running) < self.batch and self._fits(self._waiting[0]):
                    self._running.append(self._waiting.popleft())
            self._advance()

    def _drop_cancelled(self) -> None:
        for queue in (self._waiting, self._running):
            for work in [work for work in queue if work.cancelled]:
                queue.remove(work)
                self._end(work, "cancelled")

    def _advance(self) -> None:
        """One step of all requests: a token of each whose prompt is computed, and as much of prompts as fits in."""
        parts, room = {}, CHUNK
        for work in list(self._running):
            try:
                tokens = self._next(work, room)
            except Exception as error:
                self._leave(work, "failed", error)
                continue
            if tokens:
                parts[work] = tokens
                room -= 0 if work.prompt_done else len(tokens)
        try:
            logits = self._model.step(list(parts.values()), [work.cache for work in parts]) if parts else ()
        except Exception as error:
            for work in parts:
                self._leave(work, "failed", error)
            return
        for (work, tokens), row in zip(parts.items(), logits, strict=True):
            self._take(work, len(tokens), row)

    def _next(self, work: Work, room: int) -> list[int]:
        """The tokens that a request has in the next step, none where its prompt finds no room."""
        if work.prompt_done:
            return [work.last]
        if work.cache is None:
            work.begin(self._model.model)
            reuse = self.reused is None and work.request.seed is None
            found = self.prefixes.find(work.prompt, work.most_tokens) if reuse else None
            work.cache = self._model.new_cache(work.most_tokens) if found is None else found
            work.done = work.cached = 0 if found is None else found.get_seq_length()
        return work.prompt[work.done :] if self.reused else work.prompt[work.done : work.done + max(0, room)]

    def _take(self, work: Work, count: int, logits: Tensor) -> None:
        """Have a request pick a token, if these logits come after its prompt's last or a later token."""
        if not work.prompt_done:
            work.done += count
            if not work.prompt_done:
                return
        try:
            reason = work.take(logits)
        except Exception as error:
            self._leave(work, "failed", error)
        else:
            if reason is not None:
                self._leave(work, reason)

    def _leave(self, work: Work, reason: str, error: Exception | None = None) -> None:
        with self._changed:
            self._running.remove(work)
        self._end(work, reason, error)

    def _end(self, work: Work, reason: str, error: Exception | None = None) -> None:
        cache = work.release()  # whoever holds the request from here on holds no keys and values
        if error is not None:
            _logger.error("a request failed", exc_info=error)
        elif self.reused is None and cache is not None:
            self.prefixes.keep(work.ids[: cache.get_seq_length()], cache)
        try:
            work.end(reason, error)
        except Exception as failure:
            _logger.error("a listener failed at the end of its request", exc_info=failure)


class Ticket:
    """A request that was taken up."""

    def __init__(self, work: Work, changed: threading.Condition) -> None:
        self._work, self._changed = work, changed

    def cancel(self) -> None:
        """End the request before its next step, from any thread; nothing happens where it has ended."""
        with self._changed:
            self._work.cancelled = True
            self._changed.notify()
