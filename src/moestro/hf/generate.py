"""Generate text with a served model: stream it, time prompt and generation apart, and say what ran."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from moestro.errors import invalid_input
from moestro.hf.text_model import TextModel
from moestro.ops.dispatch import Prepared, observed
from moestro.ops.expert_mlp import EXPERT_MLP

DEFAULT_NEW_TOKENS = 256
LEAST_TEMPERATURE = 1e-6
"""Logits divided by less may leave the range of float32."""
_SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p", "seed")
_CONTEXT_FOR_TEXT = 8
_UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked, by Transformers' names; None leaves the model's own generation configuration.

    Attributes:
        max_new_tokens: at least 1; None for 256, or what the model's context leaves.
        do_sample: sample, or take the likeliest token. The five below, but for repetition_penalty, need it.
        temperature: at least 1e-6, or 0 to take the likeliest token, which do_sample must not contradict.
        top_k: at least 0; 0 for no limit.
        top_p: above 0, at most 1.
        min_p: 0 to 1.
        repetition_penalty: above 0; 1 for none.
        seed: of the random numbers.
    """

    max_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
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
        stopped: "end" at the model's end token, "length" at max_new_tokens.
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
    prompt: str,
    sampling: Sampling | None = None,
    on_text: Callable[[str], object] | None = None,
    chat: bool = False,
) -> Generation:
    """Continue a prompt, or answer it.

    Args:
        text_model: from `load_text_model`.
        prompt: not empty.
        sampling: how tokens are picked; the model's own way if None.
        on_text: called with each piece of new text as soon as it is certain; the pieces together are the text.
        chat: put the prompt through the tokenizer's chat template, as the user's message.

    Raises:
        InvalidInputError: what `check` refuses, or logits that are not finite where tokens are sampled.
    """
    sampling = Sampling() if sampling is None else sampling
    inputs = _encode(text_model, prompt, chat)
    config = _configure(text_model, sampling, inputs["input_ids"].shape[1])
    prompt_ran: dict[Ran, None] = {}
    new_ran: dict[Ran, None] = {}
    streamer = Streamer(text_model.tokenizer, on_text or (lambda piece: None))

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
        ids = text_model.model.generate(**inputs, generation_config=config, streamer=streamer)
    new_ids = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return Generation(
        text=streamer.text,
        prompt_tokens=inputs["input_ids"].shape[1],
        new_tokens=len(new_ids),
        prompt_seconds=streamer.times[0] - start,
        new_seconds=streamer.times[-1] - streamer.times[0],
        stopped="end" if new_ids[-1] in _ends(config) else "length",
        prompt_ran=tuple(prompt_ran),
        new_ran=tuple(new_ran),
    )


def share_random_numbers(place: str | DeviceMesh) -> None:
    """Have all ranks of a mesh draw the same random numbers from here on, so that they sample the same tokens."""
    if not isinstance(place, DeviceMesh):
        return
    seed = [torch.seed()]
    dist.broadcast_object_list(seed)
    torch.manual_seed(seed[0])


@contextmanager
def _finite(name: str) -> Iterator[None]:
    """Say in a sentence that logits cannot be sampled from."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor" not in str(error):  # what torch.multinomial says of NaN
            raise
        raise invalid_input(
            "generate",
            got=f"logits of {name} that are not finite",
            needs="finite logits to sample from",
            fix="Try dtype float32; if it stays so, the weights hold NaN or numbers that are too large.",
        ) from error


class Streamer(BaseStreamer):
    """Turns tokens into pieces of text as they come, holding back a character whose bytes are not all there yet.

    `text` is all pieces so far, `times` have time.perf_counter() at each new token.
    """

    def __init__(self, tokenizer: Any, on_text: Callable[[str], object]) -> None:
        self.decode = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.on_text = on_text
        self.text = ""
        self.times: list[float] = []
        self._ids: list[int] = []
        self._prompt_seen = False
        # Tokens before _start are settled; those up to _known are in the text already, and serve as context.
        self._start = self._known = 0

    def put(self, value: Tensor) -> None:
        """The prompt's ids [1, T] first, then each new id [1]."""
        if not self._prompt_seen:
            self._prompt_seen = True
            self._ids = value.flatten()[-_CONTEXT_FOR_TEXT:].tolist()
            self._known = len(self._ids)
            return
        self._ids.extend(value.flatten().tolist())
        self.times.append(time.perf_counter())
        self._emit(final=False)

    def end(self) -> None:
        """No more tokens: what was held back comes as it is."""
        self._emit(final=True)

    def _emit(self, final: bool) -> None:
        known = self.decode(self._ids[self._start : self._known])
        text = self.decode(self._ids[self._start :])
        if text.endswith(_UNFINISHED) and not final:
            return
        piece = text[len(known) :]
        self._start, self._known = self._known, len(self._ids)
        if piece:
            self.text += piece
            self.on_text(piece)


def check_prompt(prompt: str) -> None:
    """Refuse a prompt without text, or whose bytes are no text, before a model is loaded for it."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise invalid_input(
            "generate",
            got="a prompt with bytes that are no text in this locale's encoding",
            needs="UTF-8",
            fix="Set a locale such as LC_ALL=C.UTF-8, or convert the prompt.",
        ) from None
    if not prompt.strip():
        raise invalid_input("generate", got="an empty prompt", needs="some text to continue", fix="Write a prompt.")


def check(text_model: TextModel, prompt: str, sampling: Sampling, chat: bool = False) -> None:
    """Refuse an empty prompt, a missing chat template, too many tokens, an option of sampling where none is done."""
    _configure(text_model, sampling, _encode(text_model, prompt, chat)["input_ids"].shape[1])


def check_length(name: str, tokenizer: Any, context: int | None, request: tuple[str, Sampling, bool]) -> None:
    """Refuse a request (prompt, sampling, chat) that tokenizer or context cannot take, before weights are read."""
    prompt, sampling, chat = request
    _new_tokens(name, context, sampling, _tokens(name, tokenizer, prompt, chat)["input_ids"].shape[1])


def _encode(text_model: TextModel, prompt: str, chat: bool) -> dict[str, Tensor]:
    encoded = _tokens(text_model.name, text_model.tokenizer, prompt, chat)
    device = text_model.model.device
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _tokens(name: str, tokenizer: Any, prompt: str, chat: bool) -> Any:
    check_prompt(prompt)
    if chat and not tokenizer.chat_template:
        raise invalid_input(
            "generate",
            got=f"chat with {name}, whose tokenizer has no chat template",
            needs="an instruction-tuned model",
            fix="Leave chat out to continue the text instead.",
        )
    if chat:
        message = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    return tokenizer(prompt, return_tensors="pt")


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


def _configure(text_model: TextModel, sampling: Sampling, prompt_tokens: int) -> GenerationConfig:
    """The model's generation configuration with what was asked for on top."""
    config = copy.deepcopy(text_model.model.generation_config)
    asked = {name: value for name, value in vars(sampling).items() if value is not None}
    if asked.get("temperature") == 0:
        del asked["temperature"]
        asked["do_sample"] = False
    if not asked.get("do_sample", config.do_sample):
        for name in _SAMPLING_ONLY:
            if name in asked:
                raise invalid_input(
                    "generate",
                    got=f"{name} without do_sample",
                    needs="do_sample, since greedy generation takes the likeliest token whatever the rest",
                    fix=f"Add do_sample=True (--do-sample), or drop {name}.",
                )
            if name != "seed":
                setattr(config, name, None)
    asked.pop("seed", None)
    asked["max_new_tokens"] = _new_tokens(text_model.name, text_model.context, sampling, prompt_tokens)
    for name, value in {**asked, "num_beams": 1, "max_length": None}.items():
        setattr(config, name, value)
    if config.pad_token_id is None:
        config.pad_token_id = _ends(config)[0]
    return config


def _ends(config: GenerationConfig) -> list[int | None]:
    return config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
