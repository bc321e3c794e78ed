"""Which part of a model's text is reasoning, by the marks that models set around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from moestro.hf.text_stream import StopStrings


@dataclass(frozen=True)
class Piece:
    """A piece of an answer."""

    text: str
    reasoning: bool = False


@dataclass(frozen=True)
class Marks:
    """What stands in a text between its parts and is shown in neither.

    Attributes:
        meaning: by mark, whether what follows it is reasoning; None leaves that as it is.
        special: whether the marks are special tokens, which text does not have otherwise.
        lead: what a model writes before its content, in llguidance's kind of Lark, where TEXT is any text.
    """

    meaning: dict[str, bool | None]
    special: bool = False
    lead: str = ""


THINK = Marks({"<think>": True, "</think>": False})
HARMONY = Marks(
    {
        "<|channel|>analysis<|message|>": True,
        "<|channel|>commentary<|message|>": True,
        "<|channel|>final<|message|>": False,
        "<|start|>assistant": None,
        "<|end|>": None,
        "<|return|>": None,
    },
    special=True,
    lead='(<|channel|> "analysis" <|message|> TEXT <|end|> <|start|> "assistant")? <|channel|> "final" <|message|>',
)
"""Of gpt-oss: https://developers.openai.com/cookbook/articles/openai-harmony."""


_TAIL = 8
"""Tokens of a prompt in which a mark is looked for."""


def marks_of(tokenizer: Any) -> Marks:
    """The marks of a tokenizer's model, by the tokens that it has."""
    return HARMONY if {"<|channel|>", "<|message|>"} <= tokenizer.get_vocab().keys() else THINK


@dataclass
class Splitter:
    """Cuts text that comes in pieces into pieces of answer and of reasoning.

    Attributes:
        reasoning: whether what comes is reasoning; a prompt may end with the mark that begins it.
        lead: what the model writes before its content, as `Marks` has it; None where the prompt has begun that.
    """

    marks: Marks
    reasoning: bool = False
    lead: str | None = ""
    _search: StopStrings = field(init=False)
    _started: bool = True

    def __post_init__(self) -> None:
        self._search = StopStrings(self.marks.meaning)

    def put(self, text: str) -> Iterator[Piece]:
        """What is certain to be no part of a mark."""
        certain = ""
        for character in text:
            certain += self._search.put(character)
            mark = self._search.reached
            if mark is None:
                continue
            yield from self._piece(certain)
            certain = ""
            meaning = self.marks.meaning[mark]
            if meaning is not None and meaning != self.reasoning:
                self.reasoning, self._started = meaning, False
            self._search = StopStrings(self.marks.meaning)
        yield from self._piece(certain)

    def end(self) -> Iterator[Piece]:
        """What was held back."""
        yield from self._piece(self._search.end())

    def _piece(self, text: str) -> Iterator[Piece]:
        """Without the empty lines that models write behind a mark."""
        text = text if self._started else text.lstrip("\n")
        if text:
            self._started = True
            yield Piece(text, self.reasoning)


def splitter_after(tokenizer: Any, prompt_ids: Sequence[int]) -> Splitter:
    """A splitter of what a tokenizer's model writes behind a prompt, which may end with a mark."""
    marks = marks_of(tokenizer)
    tail = tokenizer.decode(prompt_ids[-_TAIL:]).rstrip()
    opened = next((meaning for mark, meaning in marks.meaning.items() if tail.endswith(mark)), None)
    lead = {None: marks.lead, False: "", True: None}[opened]
    return Splitter(marks, bool(opened), lead)
