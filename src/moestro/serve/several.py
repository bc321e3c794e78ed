"""Several prompts in one run: each continued by itself, results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from moestro.hf.generate import Generation, Prompt, Ran, Sampling, configure, encode, generate
from moestro.hf.text_model import TextModel
from moestro.hf.text_stream import TextStream
from moestro.ops.dispatch import Prepared, observed
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.serve.engine import Engine
from moestro.serve.request import Ended, Request, Token

OnText = Callable[[int, str], object]
"""Called with the index of a prompt and a piece of its text. All pieces of one prompt come before those of the next."""

OnEnd = Callable[[int, Generation], object]

_Told = tuple[int, str | Ended]


def generate_several(
    text_model: TextModel, prompts: Sequence[tuple[Prompt, Sampling]], batch: int, on_text: OnText, on_end: OnEnd
) -> None:
    """Continue prompts, each with its own sampling, `batch` of them in a step.

    Args:
        text_model: from `load_text_model`.
        prompts: none that `moestro.hf.generate.check` refuses.
        batch: 1 for one after the other, with the bits that each has by itself.
        on_text: see `OnText`.
        on_end: called with the index of a prompt and all that came of it, after its last piece of text.

    Raises:
        UnsupportedError: a batch of several on a model that computes requests only one by one.
        InvalidInputError: logits that are not finite where tokens are sampled.
    """
    if batch > 1:
        _in_steps(text_model, prompts, min(batch, len(prompts)), on_text, on_end)
        return
    for index, (prompt, sampling) in enumerate(prompts):
        on_end(index, generate(text_model, prompt, sampling, partial(on_text, index)))


def _in_steps(
    text_model: TextModel, prompts: Sequence[tuple[Prompt, Sampling]], batch: int, on_text: OnText, on_end: OnEnd
) -> None:
    prompt_ran: dict[Ran, None] = {}
    new_ran: dict[Ran, None] = {}

    def tell(prepared: Prepared, arguments: tuple[Any, ...], result: Any) -> None:
        ran = new_ran if arguments[0].shape[0] <= batch else prompt_ran
        ran.setdefault(Ran(prepared.implementation, prepared.walk))

    def finish(index: int, ended: Ended) -> None:
        found = _generation(ended, listeners[index].stream)
        on_end(index, replace(found, prompt_ran=tuple(prompt_ran), new_ran=tuple(new_ran)))

    told: SimpleQueue[_Told] = SimpleQueue()
    listeners: list[_Listener] = []
    with observed(EXPERT_MLP, tell):
        engine = Engine(text_model, batch, max_waiting=len(prompts), prefix_bytes=0)
    for ran in (prompt_ran, new_ran):  # the engine computes something to see whether a batch can be
        ran.clear()
    try:
        for index, (prompt, sampling) in enumerate(prompts):
            ids = encode(text_model.name, text_model.tokenizer, prompt)
            listeners.append(_Listener(index, TextStream(text_model.tokenizer, ids, sampling.stop), told))
            config = configure(text_model, sampling, len(ids))
            engine.submit(Request(tuple(ids), config, sampling.seed), listeners[-1])
        _in_order(told, len(prompts), on_text, finish)
    finally:
        engine.close()


class _Listener:
    """Turns the tokens of one prompt into text."""

    def __init__(self, index: int, stream: TextStream, told: SimpleQueue[_Told]) -> None:
        self.index, self.stream, self._told = index, stream, told

    def token(self, token: Token) -> bool:
        self._told.put((self.index, self.stream.put([token.id])))
        return self.stream.stopped is not None

    def end(self, ended: Ended) -> None:
        self._told.put((self.index, self.stream.end()))
        self._told.put((self.index, ended))


def _in_order(told: SimpleQueue[_Told], count: int, on_text: OnText, finish: Callable[[int, Ended], object]) -> None:
    """Hand on the text of the first prompt that has not ended, and keep that of the others until they are first."""
    kept: list[deque[str | Ended]] = [deque() for _ in range(count)]
    first = 0
    while first < count:
        index, what = told.get()
        if isinstance(what, Ended) and (error := what.error) is not None:
            raise error
        kept[index].append(what)
        while first < count and kept[first]:
            what = kept[first].popleft()
            if isinstance(what, Ended):
                finish(first, what)
                first += 1
            elif what:
                on_text(first, what)


def _generation(ended: Ended, stream: TextStream) -> Generation:
    return Generation(
        text=stream.text,
        prompt_tokens=ended.prompt_tokens,
        new_tokens=ended.new_tokens,
        prompt_seconds=ended.prompt_seconds,
        new_seconds=ended.new_seconds,
        stopped="stop" if stream.stopped else "length" if ended.reason == "length" else "end",
        prompt_ran=(),
        new_ran=(),
    )
