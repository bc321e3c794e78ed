"""What all requests share: the model, its engine, what it is called, and what is counted."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from moestro.errors import InvalidInputError, MoestroError
from moestro.hf.memory import expert_memory, hits_line
from moestro.hf.text_model import TextModel
from moestro.serve.answer import Answer
from moestro.serve.engine import Engine
from moestro.serve.fields import Asked
from moestro.serve.grammar import JsonGrammar, JsonGrammars
from moestro.serve.metrics import Metrics, experts_told
from moestro.serve.problem import as_told, refused
from moestro.serve.request import BusyError, Ended, Request
from moestro.serve.sampling import DEFAULT_NEW_TOKENS, configure
from moestro.serve.upstream import GenerationState, Modality, ModelManager

_logger = logging.getLogger("moestro.serve")

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    Attributes:
        max_body: bytes of a request's body.
        body_seconds: in which a body has to arrive.
        max_new_tokens: of a request that says none.
        grace: seconds that requests may still take when the server is told to stop.
    """

    max_body: int = 4 * MEGABYTE
    body_seconds: float = 30.0
    max_new_tokens: int = DEFAULT_NEW_TOKENS
    grace: float = 10.0


class Service:
    """A model that answers requests.

    Args:
        text_model: from `load_text_model`.
        engine: on that model.
        name: what clients call it.
        limits: what is taken.

    Attributes:
        stopping: no request is taken any more.
        memory: what has the experts, where they are within a budget.
    """

    def __init__(
        self,
        text_model: TextModel,
        engine: Engine,
        name: str,
        limits: Limits | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.text_model = text_model
        self.engine = engine
        self.name = name
        self.limits = limits or Limits()
        self.metrics = metrics or Metrics()
        self.metrics.watch(engine)
        self.created = int(time.time())
        self.stopping = False
        self.memory = expert_memory(text_model.model)
        self._answers: set[Answer] = set()

    def begin(self, asked: Asked, prompt_ids: tuple[int, ...], answer: Answer) -> None:
        """Hand a request to the engine.

        Raises:
            ApiError: the prompt leaves no room in the context, as many requests wait as may, or JSON was asked for that
                the answer cannot be held to.
        """
        config = configure(self.text_model, asked, self._default_length(len(prompt_ids)))
        grammar = None if asked.schema is None else self._grammar(asked.schema, answer.reader.lead)
        request = Request(prompt_ids, config, asked.sampling.seed, asked.top_logprobs, grammar)
        answer.on_end = partial(self._ended, answer)
        self._answers.add(answer)
        try:
            answer.ticket = self.engine.submit(request, answer)
        except BusyError as error:
            self._answers.discard(answer)
            problem = as_told(error, 429, code="busy")
            problem.headers["Retry-After"] = str(self.metrics.seconds_to_wait(self.engine))
            raise problem from None
        except InvalidInputError as error:
            self._answers.discard(answer)
            raise as_told(error, param="prompt", code="context_length_exceeded") from None

    def _grammar(self, schema: dict[str, Any], lead: str | None) -> JsonGrammar:
        if lead is None:
            needs = "a prompt that leaves reasoning to the model, and a model whose answer moestro takes apart itself"
            fix = "Turn reasoning off (chat_template_kwargs), or ask for JSON in the prompt."
            raise refused(None, got="JSON for an answer that begins with something else", needs=needs, fix=fix)
        try:
            return self._grammars.grammar(schema, lead)
        except MoestroError as error:
            raise as_told(error) from None

    @cached_property
    def _grammars(self) -> JsonGrammars:
        """Made when the first JSON is asked for: it takes about a second for 200,000 tokens."""
        model = self.text_model
        ends = model.model.generation_config.eos_token_id
        listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
        return JsonGrammars(model.tokenizer, model.config.get_text_config().vocab_size, listed)

    def _default_length(self, prompt_tokens: int) -> int:
        """New tokens of a request that says none: no more than there is memory for."""
        engine, most = self.engine, self.limits.max_new_tokens
        if engine.kv_bytes is None or not engine.token_bytes:
            return most
        return max(1, min(most, engine.kv_bytes // engine.token_bytes - prompt_tokens))

    def _ended(self, answer: Answer, ended: Ended) -> None:
        self._answers.discard(answer)
        self.metrics.ended(ended)
        if self.memory is not None and _logger.isEnabledFor(logging.INFO):
            _logger.info("experts so far: %s", hits_line(self.text_model.model))

    def health(self) -> dict[str, object]:
        """What a probe is told: that requests are answered, and what was read of experts within a memory budget."""
        status: dict[str, object] = {"status": "ok"}
        return status if self.memory is None else {**status, "experts": experts_told(self.memory)}

    def cancel_all(self) -> None:
        """End all requests."""
        for answer in list(self._answers):
            answer.cancel()

    def close(self) -> None:
        """End all requests and the engine."""
        self.stopping = True
        self.engine.close()

    def describe(self) -> dict[str, object]:
        """The model as /v1/models lists it."""
        context = self.text_model.context
        described = {"id": self.name, "object": "model", "created": self.created, "owned_by": "moestro"}
        return described if context is None else {**described, "max_model_len": context}


class OneModel(ModelManager):  # type: ignore[misc]
    """Transformers' manager of models, with one model that is there already and stays."""

    def __init__(self, service: Service, processor: object) -> None:
        self._loaded = (service.text_model.model, processor)

    def load_model_and_processor(self, *args: object, **kwargs: object) -> tuple[object, object]:
        """The model, and what makes token ids for it."""
        return self._loaded

    @staticmethod
    def get_model_modality(*args: object, **kwargs: object) -> object:
        """Text."""
        return Modality.LLM


class OneManager(GenerationState):  # type: ignore[misc]
    """Transformers' keeper of generation managers, with one for one request."""

    def __init__(self, manager: object) -> None:
        super().__init__()
        self._manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> object:
        """That one."""
        return self._manager
