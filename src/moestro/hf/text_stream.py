"""Tokens in, certain text out: characters stay whole, and text ends before a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from moestro.errors import invalid_input

_CONTEXT_FOR_TEXT = 8
_UNFINISHED = "\ufffd"


class TextStream:
    """Turns the new tokens of one request into text, of which each piece is given out as soon as it is certain.

    Held back are a character whose bytes are not all there yet, and text that may be the beginning of a stop string.
    Which stop string is reached does not depend on how the text is split into tokens: the one that is complete first,
    and of several that end together the longest. Neither it nor what follows is ever given out.

    Args:
        tokenizer: of Transformers.
        prompt_ids: the tokens before the new ones; they say, for one, whether a space begins the first word.
        stops: texts to end before.
        special: whether special tokens are text.

    Attributes:
        text: all that was given out.
        stopped: the stop string that was reached; None until then.
    """

    def __init__(
        self, tokenizer: Any, prompt_ids: Sequence[int] = (), stops: Iterable[str] = (), special: bool = False
    ) -> None:
        self.text = ""
        self._decode = partial(tokenizer.decode, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        self._ids = list(prompt_ids[-_CONTEXT_FOR_TEXT:])
        # Tokens before _start are settled; those up to _known are in the text already, and serve as context.
        self._start, self._known = 0, len(self._ids)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> str | None:
        return self._stops.reached

    def put(self, ids: Iterable[int]) -> str:
        """The text that has become certain with these new tokens, perhaps none."""
        self._ids.extend(ids)
        return self._give(final=False)

    def end(self) -> str:
        """No more tokens: what was held back, as it is."""
        return self._give(final=True)

    def _give(self, final: bool) -> str:
        if self.stopped is not None:
            return ""
        piece = self._stops.put(self._whole_characters(final))
        if final:
            piece += self._stops.end()
        self.text += piece
        return piece

    def _whole_characters(self, final: bool) -> str:
        known = self._decode(self._ids[self._start : self._known])
        text = self._decode(self._ids[self._start :])
        if text.endswith(_UNFINISHED) and not final:
            return ""
        self._start, self._known = self._known, len(self._ids)
        return str(text[len(known) :])


class StopStrings:
    """Text in, text out, up to the first of several strings; `reached` is that one, None until then.

    Each string is looked for by the algorithm of Knuth, Morris and Pratt, one character after the other.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.reached: str | None = None
        self._patterns = {stop: _borders(stop) for stop in check_stops(stops)}
        self._matched = dict.fromkeys(self._patterns, 0)
        self._held = ""

    def put(self, text: str) -> str:
        """The text that cannot be the beginning of a stop string any more; of what follows one, nothing."""
        if self.reached is not None:
            return ""
        if not self._patterns:
            return text
        for index, character in enumerate(text):
            self._step(character)
            complete = [stop for stop, matched in self._matched.items() if matched == len(stop)]
            if complete:
                self.reached = max(complete, key=len)
                return self._give(text[: index + 1], len(self.reached))
        return self._give(text, max(self._matched.values()))

    def end(self) -> str:
        """No more text: what was held back."""
        held, self._held = self._held, ""
        return "" if self.reached is not None else held

    def _give(self, text: str, kept: int) -> str:
        whole = self._held + text
        self._held = whole[len(whole) - kept :]
        return whole[: len(whole) - kept]

    def _step(self, character: str) -> None:
        for stop, borders in self._patterns.items():
            matched = self._matched[stop]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            self._matched[stop] = matched + (stop[matched] == character)


def check_stops(stops: Iterable[str]) -> tuple[str, ...]:
    """The stop strings; empty ones, and those that are no text, are refused."""
    found = tuple(stops)
    for stop in found:
        if not stop or any("\ud800" <= character <= "\udfff" for character in stop):
            raise invalid_input(
                "generate",
                got=f"the stop string {stop!r}",
                needs="at least one character, in UTF-8",
                fix="Leave it out, or write it in another way.",
            )
    return found


def _borders(pattern: str) -> list[int]:
    """For each beginning of a pattern, how long a shorter beginning it ends with."""
    borders = [0] * len(pattern)
    matched = 0
    for index in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[index]:
            matched = borders[matched - 1]
        matched += pattern[matched] == pattern[index]
        borders[index] = matched
    return borders
