"""Generate text with a served model: stream it, time prompt and generation apart, and say what ran."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from moestro.errors import InvalidInputError, invalid_input
from moestro.hf.cache import appending_cache
from moestro.hf.models import first_sentence
from moestro.hf.sharding import batch_of
from moestro.hf.text_model import TextModel
from moestro.hf.text_stream import TextStream, check_stops
from moestro.ops.dispatch import Prepared, observed
from moestro.ops.expert_mlp import EXPERT_MLP

DEFAULT_NEW_TOKENS = 256
LEAST_TEMPERATURE = 1e-6
"""Logits divided by less may leave the range of float32."""
_SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p", "seed")
Prompt = str | Sequence[Mapping[str, str]]
"""A text to continue, or messages to answer, each with "role" and "content", through the tokenizer's chat template."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked, by Transformers' names; None leaves the model's own generation configuration.

    Attributes:
        max_new_tokens: at least 1; None for 256, or what the model's context leaves.
        do_sample: sample, or take the likeliest token. Temperature, top_k, top_p, min_p and seed need it.
        temperature: at least 1e-6, or 0 to take the likeliest token, which do_sample must not contradict.
        top_k: at least 0; 0 for no limit.
        top_p: above 0, at most 1.
        min_p: 0 to 1.
        repetition_penalty: above 0; 1 for none.
        seed: of the random numbers.
        stop: texts that generation ends before. They are found in the text, however tokens split them.
        no_repeat_ngram_size: of so many tokens in a row none come twice, those of the prompt included; 0 for no limit.
    """

    max_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    no_repeat_ngram_size: int | None = None

    def __post_init__(self) -> None:
        check_stops(self.stop)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if type(getattr(self, name)) is int:  # Transformers refuses a temperature of 1 that is no float
                object.__setattr__(self, name, float(getattr(self, name)))
        also = " with do_sample" if self.do_sample else ", or 0 for greedy"
        rules: dict[str, tuple[Callable[[float], bool], str]] = {
            "max_new_tokens": (lambda v: v >= 1, "at least 1"),
            "temperature": (
                lambda v: v >= LEAST_TEMPERATURE or (v == 0 and not self.do_sample),
                f"at least {LEAST_TEMPERATURE:g}{also}",
            ),
            "top_k": (lambda v: v >= 0, "at least 0 (0 for no limit)"),
            "top_p": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
            "min_p": (lambda v: 0 <= v <= 1, "0 to 1"),
            "repetition_penalty": (lambda v: v > 0, "above 0 (1 for none)"),
            "no_repeat_ngram_size": (lambda v: v >= 0, "at least 0 (0 for no limit)"),
            "seed": (lambda v: 0 <= v < 2**63, "0 to 2**63 - 1"),
        }
        for name, (holds, needs) in rules.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise invalid_input("generate", got=f"{name}={value}", needs=needs, fix="Change it, or leave it out.")


@dataclass(frozen=True)
class Ran:
    """Which implementation walked which strategy, in the prompt's pass or in the steps of generation."""

    implementation: str
    strategy: str


@dataclass(frozen=True)
class Generation:
    """What was generated, and how fast.

    Attributes:
        text: the new text, without the prompt.
        prompt_tokens, new_tokens: counts.
        prompt_seconds: from the call to the first new token: the prompt's pass.
        new_seconds: from the first new token to the last, which are new_tokens - 1 steps.
        stopped: "end" at the model's end token, "stop" at a stop string, "length" at max_new_tokens.
        prompt_ran, new_ran: what served the expert layers in either part.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    prompt_seconds: float
    new_seconds: float
    stopped: str
    prompt_ran: tuple[Ran, ...]
    new_ran: tuple[Ran, ...]

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prompt_seconds

    @property
    def new_tokens_per_second(self) -> float | None:
        """None if only one token was generated: it belongs to the prompt's pass."""
        return (self.new_tokens - 1) / self.new_seconds if self.new_tokens > 1 else None


def generate(
    text_model: TextModel,
    prompt: Prompt,
    sampling: Sampling | None = None,
    on_text: Callable[[str], object] | None = None,
    on_time: Callable[[float], object] | None = None,
) -> Generation:
    """Continue a prompt, or answer it.

    Args:
        text_model: from `load_text_model`.
        prompt: not empty.
        sampling: how tokens are picked; the model's own way if None.
        on_text: called with each piece of new text as soon as it is certain; the pieces together are the text.
        on_time: called on the spot with time.perf_counter() where the prompt's pass begins, and at each new token.

    A model whose experts are cut over ranks is called on all of them, with the same prompt and sampling: they compare
    both, and take the tokens that rank 0's logits and random numbers give.

    Raises:
        InvalidInputError: what `check` refuses, or logits that are not finite where tokens are sampled.
        CollectiveError: ranks with another prompt or sampling, or that do not come.
    """
    sampling = Sampling() if sampling is None else sampling
    inputs = _encode(text_model, prompt)
    prompt_tokens = inputs["input_ids"].shape[1]
    config = configure(text_model, sampling, prompt_tokens)
    processors = _agree(text_model, inputs["input_ids"], sampling)
    prompt_ran: dict[Ran, None] = {}
    new_ran: dict[Ran, None] = {}
    streamer = Streamer(text_model.tokenizer, on_text or _ignore, sampling.stop, on_time or _ignore)
    stopping = StoppingCriteriaList([_AtStopString(streamer, prompt_tokens)] if sampling.stop else [])

    def tell(prepared: Prepared, arguments: tuple[Any, ...], result: Any) -> None:
        (new_ran if streamer.times else prompt_ran).setdefault(Ran(prepared.implementation, prepared.walk))

    with (
        observed(EXPERT_MLP, tell),
        torch.random.fork_rng(enabled=sampling.seed is not None),
        _finite(text_model.name),
    ):
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        start = time.perf_counter()
        streamer.tell_time(start)
        ids = text_model.model.generate(
            **inputs,
            generation_config=config,
            streamer=streamer,
            stopping_criteria=stopping,
            logits_processor=processors,
            **appending_cache(text_model.model, config),
        )
    return _generation(streamer, ids, config, (prompt_tokens, start), (prompt_ran, new_ran))


def _ignore(told: object) -> None:
    """What is told to nobody."""


def _generation(
    streamer: Streamer, ids: Tensor, config: GenerationConfig, began: tuple[int, float], ran: tuple[Any, Any]
) -> Generation:
    """What came of a prompt of so many tokens, whose pass began at that time."""
    (prompt_tokens, start), (prompt_ran, new_ran) = began, ran
    new_ids = ids[0, prompt_tokens:].tolist()
    return Generation(
        text=streamer.text,
        prompt_tokens=prompt_tokens,
        new_tokens=len(new_ids),
        prompt_seconds=streamer.times[0] - start,
        new_seconds=streamer.times[-1] - streamer.times[0],
        stopped="stop" if streamer.stopped else "end" if new_ids[-1] in _ends(config) else "length",
        prompt_ran=tuple(prompt_ran),
        new_ran=tuple(new_ran),
    )


def _agree(text_model: TextModel, ids: Tensor, sampling: Sampling) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """Where ranks run the same tokens: compare the request, take rank 0's random numbers, and its logits later."""
    peers = batch_of(text_model.model)
    if peers is None:
        return []
    prompt = blake2b(ids.cpu().numpy().tobytes(), digest_size=8).hexdigest()
    said = {"prompt": f"{ids.shape[1]} tokens, {prompt}", **{f"sampling {k}": v for k, v in vars(sampling).items()}}
    peers.agree(said, "generate", "", "Pass the same prompt and options on every rank.")
    if sampling.seed is None:
        torch.manual_seed(int(peers.broadcast(torch.randint(2**62, (1,)).to(ids.device), "seed", "generate")))
    return same_tokens(text_model.model)


def same_tokens(model: Any) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """What has all ranks that run the same tokens take those of rank 0's logits, as Transformers' logits processors."""
    peers = batch_of(model)
    return [] if peers is None else [lambda _, logits: peers.broadcast(logits, "logits", "generate")]


@contextmanager
def _finite(name: str) -> Iterator[None]:
    """Say in a sentence that logits cannot be sampled from."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor" not in str(error):  # what torch.multinomial says of NaN
            raise
        raise not_finite(name) from error


def not_finite(name: str) -> InvalidInputError:
    """The error for a model whose logits cannot be sampled from."""
    return invalid_input(
        "generate",
        got=f"logits of {name} that are not finite",
        needs="finite logits to sample from",
        fix="Try dtype float32; if it stays so, the weights hold NaN or numbers that are too large.",
    )


class Streamer(BaseStreamer):
    """Hands on the certain text of new tokens as they come.

    `text` is all text so far, `times` have time.perf_counter() at each new token.
    """

    def __init__(
        self,
        tokenizer: Any,
        on_text: Callable[[str], object],
        stops: Sequence[str] = (),
        tell_time: Callable[[float], object] = lambda now: None,
    ) -> None:
        self.times: list[float] = []
        self.tell_time = tell_time
        self._on_text = on_text
        self._make = lambda prompt_ids: TextStream(tokenizer, prompt_ids, stops)
        self._stream: TextStream | None = None
        self._read = 0

    @property
    def text(self) -> str:
        return "" if self._stream is None else self._stream.text

    @property
    def stopped(self) -> str | None:
        """The stop string that was reached."""
        return None if self._stream is None else self._stream.stopped

    def put(self, value: Tensor) -> None:
        """The prompt's ids [1, T] first, then each new id [1]."""
        ids = value.flatten().tolist()
        if self._stream is None:
            self._stream = self._make(ids)
            return
        self.times.append(time.perf_counter())
        self.tell_time(self.times[-1])
        if self._read < len(self.times):
            self._take(ids)

    def read(self, new_ids: Sequence[int]) -> None:
        """All new tokens so far, perhaps before they are put."""
        self._take(new_ids[self._read :])

    def end(self) -> None:
        """No more tokens: what was held back comes as it is."""
        if self._stream is not None:
            self._tell(self._stream.end())

    def _take(self, ids: Sequence[int]) -> None:
        if self._stream is not None:
            self._read += len(ids)
            self._tell(self._stream.put(ids))

    def _tell(self, piece: str) -> None:
        if piece:
            self._on_text(piece)


class _AtStopString(StoppingCriteria):
    """Ends generation at a stop string. Transformers asks it before it puts a token to the streamer."""

    def __init__(self, streamer: Streamer, prompt_tokens: int) -> None:
        self._streamer, self._prompt_tokens = streamer, prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._streamer.read(input_ids[0, self._prompt_tokens :].tolist())
        return torch.full((1,), self._streamer.stopped is not None, device=input_ids.device)


def check_prompt(prompt: Prompt) -> None:
    """Refuse a prompt without text, or whose bytes are no text, before a model is loaded for it."""
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise invalid_input(
                "generate",
                got="a prompt with bytes that are no text in this locale's encoding",
                needs="UTF-8",
                fix="Set a locale such as LC_ALL=C.UTF-8, or convert the prompt.",
            ) from None
    if not texts or not texts[-1].strip():
        raise invalid_input("generate", got="an empty prompt", needs="some text to continue", fix="Write a prompt.")


def check(text_model: TextModel, prompt: Prompt, sampling: Sampling) -> None:
    """Refuse an empty prompt, a missing chat template, too many tokens, an option of sampling where none is done."""
    configure(text_model, sampling, len(encode(text_model.name, text_model.tokenizer, prompt)))


def check_length(name: str, tokenizer: Any, context: int | None, request: tuple[Prompt, Sampling]) -> None:
    """Refuse a request (prompt, sampling) that tokenizer or context cannot take, before weights are read."""
    prompt, sampling = request
    _new_tokens(name, context, sampling, len(encode(name, tokenizer, prompt)))


def encode(name: str, tokenizer: Any, prompt: Prompt) -> list[int]:
    """The tokens of a prompt, for the model of this name.

    Raises:
        InvalidInputError: an empty prompt, or messages that the tokenizer's chat template does not take.
    """
    return _tokens(name, tokenizer, prompt)["input_ids"][0].tolist()  # type: ignore[no-any-return]


def _encode(text_model: TextModel, prompt: Prompt) -> dict[str, Tensor]:
    encoded = _tokens(text_model.name, text_model.tokenizer, prompt)
    device = text_model.model.device
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _tokens(name: str, tokenizer: Any, prompt: Prompt) -> Any:
    from jinja2 import TemplateError

    check_prompt(prompt)
    if isinstance(prompt, str):
        return tokenizer(prompt, return_tensors="pt")
    if not tokenizer.chat_template:
        raise invalid_input(
            "generate",
            got=f"chat with {name}, whose tokenizer has no chat template",
            needs="an instruction-tuned model",
            fix="Leave chat out to continue the text instead.",
        )
    messages = [dict(message) for message in prompt]
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise invalid_input(
            "generate",
            got=f"messages of {roles} ({first_sentence(error)})",
            needs=f"what the chat template of {name} takes",
            fix="Leave the system prompt out, or change the order of the messages.",
        ) from error


def _new_tokens(name: str, context: int | None, sampling: Sampling, prompt_tokens: int) -> int:
    """How many tokens to generate at most: what was asked for, or what the context leaves."""
    room = DEFAULT_NEW_TOKENS if context is None else context - prompt_tokens
    new_tokens = sampling.max_new_tokens or min(DEFAULT_NEW_TOKENS, room)
    if context is not None and (room < 1 or new_tokens > room):
        raise invalid_input(
            "generate",
            got=f"{prompt_tokens} prompt tokens and max_new_tokens={max(new_tokens, 1)}",
            needs=f"at most {context} together, the context of {name}",
            fix="Shorten the prompt, or lower max_new_tokens.",
        )
    return new_tokens


def configure(text_model: TextModel, sampling: Sampling, prompt_tokens: int) -> GenerationConfig:
    """The model's generation configuration with what was asked for on top, complete for a prompt of so many tokens.

    Raises:
        InvalidInputError: too many tokens, or an option of sampling where none is done.
    """
    asked = {name: value for name, value in vars(sampling).items() if value is not None and name != "stop"}
    if asked.get("temperature") == 0:
        del asked["temperature"]
        asked["do_sample"] = False
    if not asked.get("do_sample", text_model.model.generation_config.do_sample):
        for name in _SAMPLING_ONLY:
            if name in asked:
                raise invalid_input(
                    "generate",
                    got=f"{name} without do_sample",
                    needs="do_sample, since greedy generation takes the likeliest token whatever the rest",
                    fix=f"Add do_sample=True (--do-sample), or drop {name}.",
                )
            asked[name] = None
    asked.pop("seed", None)
    asked["max_new_tokens"] = _new_tokens(text_model.name, text_model.context, sampling, prompt_tokens)
    return completed(text_model, asked)


def completed(text_model: TextModel, values: Mapping[str, Any]) -> GenerationConfig:
    """The model's generation configuration with these values on top, for one sequence, with a token to pad with."""
    config = copy.deepcopy(text_model.model.generation_config)
    for name, value in {**values, "num_beams": 1, "max_length": None}.items():
        setattr(config, name, value)
    if config.pad_token_id is None:
        config.pad_token_id = _ends(config)[0]
    return config


def _ends(config: GenerationConfig) -> list[int | None]:
    return config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
