"""Transformers' three handlers on moestro's engine: what they leave out or leave open is decided here."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse
from openai.types.chat import ChatCompletionMessageToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function
from openai.types.completion_usage import CompletionUsage, PromptTokensDetails
from starlette.types import Receive, Scope, Send

from moestro.serve.answer import Answer, Content
from moestro.serve.fields import Asked
from moestro.serve.logprobs import for_chat, for_completions
from moestro.serve.messages import Prompts, for_template
from moestro.serve.problem import ApiError, answered
from moestro.serve.readers import Marked, Parsed, Reader
from moestro.serve.service import OneManager, OneModel, Service
from moestro.serve.upstream import (
    BaseGenerateManager,
    ChatCompletionHandler,
    CompletionHandler,
    ReasoningText,
    ResponseHandler,
    StreamError,
    ToolCall,
    begins_in,
)

DONE = "data: [DONE]\n\n"


def check_model(service: Service, name: object) -> None:
    """Refuse a model that is not the one."""
    if name != service.name:
        fix = f"Ask for {service.name}, as /v1/models says."
        raise answered(404, got=f"the model {name!r:.100}", fix=fix, code="model_not_found")


def accepted(request: HttpRequest) -> bool:
    """Whether the engine has taken a request up."""
    return getattr(request.state, "accepted", False)


class Failed(str):
    """The event that says in a stream why it ends."""


class _Stream(StreamingResponse):
    """Events, after which the request is cancelled, however they end."""

    def __init__(self, events: AsyncIterator[str], answer: Answer) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()


class _OneRequest(BaseGenerateManager):  # type: ignore[misc]
    """Transformers' generation manager, for one request: it hands it to the engine."""

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[Any, Answer]:
        answer = self._handler.begin(inputs, response_parser)
        return answer.queue, answer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        answer = self._handler.begin(inputs, None)
        async with answer.watched(self._handler.gone):
            pieces = self._handler.pieces = await answer.pieces()
        return "".join(pieces), inputs["input_ids"].shape[-1], [0] * answer.total_tokens

    def stop(self) -> None:
        """Nothing to stop."""


class _Handler:
    """One request to an endpoint.

    Args:
        service: that answers.
        asked: what was asked.
        http_request: how.
    """

    answer: Answer

    def __init__(self, service: Service, asked: Asked, http_request: HttpRequest) -> None:
        prompts = Prompts(service.text_model.tokenizer, asked.effort)
        super().__init__(OneModel(service, prompts), OneManager(_OneRequest(self)))  # type: ignore[call-arg]
        self.service = service
        self.asked = asked
        self._request = http_request
        self.gone = http_request.is_disconnected
        self.pieces: list[Any] = []
        self._failed = False

    def begin(self, inputs: Any, parser: Any) -> Answer:
        """Hand the request to the engine."""
        ids = tuple(inputs["input_ids"].flatten().tolist())
        tokenizer = self.service.text_model.tokenizer
        self.answer = Answer(tokenizer, ids, self._reader(parser, ids), self._error)
        self.service.begin(self.asked, ids, self.answer)
        self._request.state.accepted = True
        return self.answer

    def _reader(self, parser: Any, ids: tuple[int, ...]) -> Reader:
        """By Transformers' parser, if it does not take the prompt for a part of the answer; else by the marks."""
        model, stops = self.service.text_model, self.asked.stops
        if parser is not None and begins_in(parser, model.tokenizer.decode(ids)):
            return Parsed(parser, stops)
        return Marked(model.tokenizer, ids, stops, model.model.generation_config.eos_token_id)

    async def respond(self, prefix: str) -> Any:
        """The response."""
        return await self.handle_request(self.asked.body, f"{prefix}{uuid.uuid4().hex}")  # type: ignore[attr-defined]

    @property
    def usage(self) -> Any:
        """The counts of tokens."""
        ended = self.answer.ended
        assert ended is not None
        return CompletionUsage(
            prompt_tokens=ended.prompt_tokens,
            completion_tokens=ended.new_tokens,
            total_tokens=ended.prompt_tokens + ended.new_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=ended.cached_tokens),
        )

    def _error(self, problem: ApiError) -> Any:
        return Failed(problem.event)

    def _validate_request(self, body: dict[str, Any]) -> None:
        """Nothing that `fields.read` has not seen to."""

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        """The one model, or 404 for another."""
        check_model(self.service, body.get("model", self.service.name))
        return self.service.name, *self.model_manager.load_model_and_processor()  # type: ignore[attr-defined]

    def _build_generation_config(self, body: dict[str, Any], model_generation_config: Any, use_cb: bool = False) -> Any:
        """The model's own, which no handler reads anything from that this class does not decide."""
        return model_generation_config

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Any) -> list[dict[str, Any]]:
        """Messages for the chat template, with all that they hold."""
        return for_template(messages)

    def _stream_of(self, response: StreamingResponse, done: str = "") -> _Stream:
        async def events() -> AsyncIterator[str]:
            async for part in response.body_iterator:
                if part:
                    yield str(part)
            if done and not self._failed:
                yield done

        return _Stream(events(), self.answer)

    def _event(self, text: str | None, event: str, finished: bool) -> str:
        """An event that Transformers made, or what takes its place once the answer has failed."""
        if isinstance(text, Failed):
            self._failed = True
            return str(text)
        if self._failed:
            return ""
        return event + self._usage_event(event) if finished and self.asked.include_usage else event

    def _usage_event(self, event: str) -> str:
        last = json.loads(event.removeprefix("data: "))
        return _as_event({**last, "choices": [], "usage": self.usage.model_dump(exclude_none=True)})


def _as_event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


class Chat(_Handler, ChatCompletionHandler):  # type: ignore[misc]
    """/v1/chat/completions."""

    def _streaming(self, *args: Any, **kwargs: Any) -> _Stream:
        return self._stream_of(super()._streaming(*args, **kwargs), DONE)

    async def _non_streaming(self, request_id: str, *args: Any, **kwargs: Any) -> JSONResponse:
        super()._streaming(request_id, *args, **kwargs)  # begins the request with its parser; no event is read
        async with self.answer.watched(self.gone):
            self.pieces = await self.answer.pieces()
        calls = [piece for piece in self.pieces if isinstance(piece, ToolCall)]
        thoughts = [piece for piece in self.pieces if isinstance(piece, ReasoningText)]
        texts = [piece for piece in self.pieces if not isinstance(piece, ToolCall | ReasoningText)]
        completion = self._build_completion(
            request_id,
            "".join(texts),
            self.service.name,
            finish_reason="tool_calls" if calls else self.answer.finish_reason,
            usage=self.usage,
            tool_calls=[_call(f"{request_id}_tool_call_{index}", call) for index, call in enumerate(calls)] or None,
            reasoning_content="".join(thoughts) or None,
        )
        if self.asked.top_logprobs is not None:
            told = [entry for piece in texts for entry in self._told(piece)]
            completion["choices"][0]["logprobs"] = {"content": told}
        return JSONResponse(completion)

    def _build_chunk_sse(self, *args: Any, content: str | None = None, **kwargs: Any) -> str:
        finished = kwargs.get("finish_reason") is not None
        if finished:
            kwargs["usage"] = None  # in an event of its own, where it was asked for
            if kwargs["finish_reason"] != "tool_calls":
                kwargs["finish_reason"] = self.answer.finish_reason
        event = "" if isinstance(content, Failed) else super()._build_chunk_sse(*args, content=content, **kwargs)
        if isinstance(content, Content):
            chunk = json.loads(event.removeprefix("data: "))
            chunk["choices"][0]["logprobs"] = {"content": self._told(content)}
            event = _as_event(chunk)
        return self._event(content, event, finished)

    def _told(self, piece: str) -> list[dict[str, Any]]:
        tokens = piece.tokens if isinstance(piece, Content) else ()
        return for_chat(self.service.text_model.tokenizer, tokens)


def _call(call_id: str, call: Any) -> Any:
    function = Function(name=call.name, arguments=call.arguments)
    return ChatCompletionMessageToolCall(id=call_id, type="function", function=function)


class Completions(_Handler, CompletionHandler):  # type: ignore[misc]
    """/v1/completions."""

    def _streaming(self, *args: Any, **kwargs: Any) -> _Stream:
        return self._stream_of(super()._streaming(*args, **kwargs), DONE)

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> JSONResponse:
        response = await super()._non_streaming(*args, **kwargs)
        completion = json.loads(response.body)
        completion["usage"] = self.usage.model_dump(exclude_none=True)
        completion["choices"][0]["finish_reason"] = self.answer.finish_reason
        if self.asked.top_logprobs is not None:
            tokens = [token for piece in self.pieces if isinstance(piece, Content) for token in piece.tokens]
            completion["choices"][0]["logprobs"] = for_completions(self.service.text_model.tokenizer, tokens)
        return JSONResponse(completion)

    def _build_chunk_sse(self, *args: Any, text: str = "", **kwargs: Any) -> str:
        finished = kwargs.get("finish_reason") is not None
        if finished:
            kwargs.update(usage=None, finish_reason=self.answer.finish_reason)
        event = "" if isinstance(text, Failed) else super()._build_chunk_sse(*args, text=text, **kwargs)
        if isinstance(text, Content):
            chunk = json.loads(event.removeprefix("data: "))
            told = for_completions(self.service.text_model.tokenizer, text.tokens, self._offset)
            chunk["choices"][0]["logprobs"] = told
            event = _as_event(chunk)
        self._offset += len(text)
        return self._event(text, event, finished)

    def _reader(self, parser: Any, ids: tuple[int, ...]) -> Reader:
        """A text that goes on is all content."""
        return Reader(self.asked.stops)

    _offset = 0


class Responses(_Handler, ResponseHandler):  # type: ignore[misc]
    """/v1/responses."""

    def _error(self, problem: ApiError) -> Any:
        return StreamError(str(problem))

    def _streaming(self, *args: Any, **kwargs: Any) -> _Stream:
        response = super()._streaming(*args, **kwargs)
        response.body_iterator = self._corrected(response.body_iterator)
        return self._stream_of(response)

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> JSONResponse:
        """What a stream says last."""
        stream = self._streaming(*args, **kwargs)
        last = ""
        async with self.answer.watched(self.gone):
            async for part in stream.body_iterator:
                last = str(part)
        problem = self.answer.problem
        if problem is not None:
            raise problem
        return JSONResponse(json.loads(last.removeprefix("data: "))["response"])

    async def _corrected(self, parts: AsyncIterator[str]) -> AsyncIterator[str]:
        """The events, the last of which says what Transformers leaves out: why it ended, and counts of tokens."""
        async for part in parts:
            if self.answer.ended is None or '"type":"response.completed"' not in part:
                yield part
                continue
            last = json.loads(part.removeprefix("data: "))
            last["response"]["usage"]["input_tokens_details"]["cached_tokens"] = self.answer.ended.cached_tokens
            if self.answer.finish_reason == "length":
                last["type"] = "response.incomplete"
                details = {"reason": "max_output_tokens"}
                last["response"].update(status="incomplete", incomplete_details=details)
            yield _as_event(last)


HANDLERS: dict[str, tuple[type[_Handler], str]] = {
    "chat": (Chat, "chatcmpl-"),
    "completions": (Completions, "cmpl-"),
    "responses": (Responses, ""),
}
