"""What a model writes, read as it comes: content, reasoning, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moestro.hf.text_stream import StopStrings
from moestro.serve.reasoning import Piece, splitter_after
from moestro.serve.upstream import ReasoningText, response_events_to_chunks


class Reader:
    """Takes what a model writes, and gives content (str), `ReasoningText` and `ToolCall`. To this one all is content.

    Args:
        stops: strings to end before, in what the model writes.

    Attributes:
        special: whether it reads special tokens.
        unheard: tokens that it does not read in any case.
        lead: what a model writes before its content, for `JsonGrammars`; None where that cannot be said.
    """

    special = False
    unheard: frozenset[int] = frozenset()
    lead: str | None = ""

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self.stops = stops

    @property
    def stopped(self) -> bool:
        """Whether it has found a stop string itself."""
        return False

    def begin(self) -> list[Any]:
        """What the prompt began."""
        return []

    def put(self, text: str) -> list[Any]:
        """What has become certain with this text."""
        return [text]

    def end(self) -> list[Any]:
        """The rest."""
        return []


class Parsed(Reader):
    """By Transformers' parser of what this model writes."""

    special = True
    lead = None

    def __init__(self, parser: Any, stops: tuple[str, ...]) -> None:
        super().__init__(stops)
        self._parser = parser

    def begin(self) -> list[Any]:
        return list(response_events_to_chunks(self._parser.initial_events))

    def put(self, text: str) -> list[Any]:
        return list(response_events_to_chunks(self._parser.feed(text)))

    def end(self) -> list[Any]:
        return list(response_events_to_chunks(self._parser.finalize()[1]))


class Marked(Reader):
    """By the marks that models set around their reasoning. Stop strings are looked for in the content.

    Args:
        tokenizer: of the model.
        prompt_ids: the prompt's tokens, which may end with a mark.
        stops: texts to end before.
        ends: the end tokens, which are no text.
    """

    def __init__(self, tokenizer: Any, prompt_ids: tuple[int, ...], stops: tuple[str, ...], ends: Any) -> None:
        super().__init__()
        self._splitter = splitter_after(tokenizer, prompt_ids)
        self.special = self._splitter.marks.special
        self.lead = self._splitter.lead
        self.unheard = frozenset(ends if isinstance(ends, list) else [ends])
        self._stop = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        return self._stop.reached is not None

    def put(self, text: str) -> list[Any]:
        return self._read(self._splitter.put(text))

    def end(self) -> list[Any]:
        found = self._read(self._splitter.end())
        rest = self._stop.end()
        return [*found, rest] if rest else found

    def _read(self, pieces: Iterable[Piece]) -> list[Any]:
        found: list[Any] = []
        for piece in pieces:
            text = piece.text if piece.reasoning else self._stop.put(piece.text)
            if text and not (piece.reasoning and self.stopped):
                found.append(ReasoningText(text) if piece.reasoning else text)
        return found
