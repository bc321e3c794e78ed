"""Where a chat is read and shown: a terminal with markdown, or plain text."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import typer

from moestro.errors import invalid_input

if TYPE_CHECKING:
    from moestro.serve.reasoning import Piece

ASK = "> "
MORE = "... "
BLOCK = '"""'
"""Begins and ends an input of several lines."""
REFRESH = 0.08
"""Seconds between two pictures of an answer that is coming."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class View(Protocol):
    """Shows the pieces of one answer."""

    def show(self, piece: Piece) -> None:
        """A piece more."""

    def end(self) -> None:
        """The answer has ended, or was left."""


def harmless(text: str) -> str:
    """Without characters that a terminal would obey."""
    return _CONTROLS.sub("\ufffd", text.replace("\r", ""))


def note(text: str) -> None:
    """Say something that is no part of an answer."""
    typer.secho(harmless(text), err=True, dim=True)


def read(interactive: bool) -> str:
    """What the user says next: a line, or the lines between two of three quotation marks.

    Raises:
        EOFError: the user has left.
        KeyboardInterrupt: the line is to be forgotten.
    """
    line = _line(ASK if interactive else "")
    if not line.lstrip().startswith(BLOCK):
        return _checked(line)
    lines = [line.lstrip().removeprefix(BLOCK)]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(_line(MORE if interactive else ""))
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return _checked("\n".join(lines).strip("\n"))


def _line(prompt: str) -> str:
    if prompt and not sys.stdout.isatty():  # where input() would write it
        sys.stderr.write(prompt)
        sys.stderr.flush()
        prompt = ""
    with contextlib.suppress(ImportError):  # which Python has on some systems only; it edits lines
        import readline  # noqa: F401
    try:
        return input(prompt)
    except UnicodeDecodeError as error:
        raise _no_text() from error


def _checked(text: str) -> str:
    """Text in UTF-8, whatever the locale."""
    try:
        return text.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise _no_text() from None


def _no_text() -> ValueError:
    return invalid_input(
        "chat", got="bytes that are no text", needs="UTF-8", fix="Set a locale such as LC_ALL=C.UTF-8, or convert them."
    )


@dataclass
class PlainView:
    """Text as it comes, on stdout; reasoning goes to stderr, or dim onto a terminal."""

    terminal: bool
    _reasoning: bool = False
    _shown: bool = False

    def show(self, piece: Piece) -> None:
        """A piece more."""
        if self._shown and piece.reasoning != self._reasoning:
            typer.echo("\n", err=self._reasoning and not self.terminal)
        self._reasoning, self._shown = piece.reasoning, True
        text = harmless(piece.text) if self.terminal else piece.text
        if piece.reasoning:
            typer.secho(text, dim=True, err=not self.terminal, nl=False)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    def end(self) -> None:
        """The answer has ended, or was left."""
        if self._shown:
            typer.echo("", err=self._reasoning and not self.terminal)


class MarkdownView:
    """Markdown on a terminal. Paragraphs that are complete are printed for good, and only the last is drawn anew."""

    def __init__(self, console: Any) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._live.start()
        self._text = ""
        self._reasoning = False
        self._drawn = 0.0

    def show(self, piece: Piece) -> None:
        """A piece more."""
        if piece.reasoning != self._reasoning:
            self._print(len(self._text))
            self._reasoning = piece.reasoning
        self._text += harmless(piece.text)
        self._print(complete(self._text))
        now = time.monotonic()
        if now - self._drawn >= REFRESH:
            self._drawn = now
            self._live.update(_Bottom(self._rendered(self._text)), refresh=True)

    def end(self) -> None:
        """The answer has ended, or was left."""
        self._live.update("")
        self._live.stop()
        self._print(len(self._text))

    def _print(self, length: int) -> None:
        """For good, so many characters."""
        text, rest = self._text[:length], self._text[length:]
        if text.strip():
            self._text = rest
            self._live.update("")
            self._console.print(self._rendered(text), end="\n" if rest or self._reasoning else "")

    def _rendered(self, text: str) -> Any:
        from rich.markdown import Markdown
        from rich.text import Text

        return Text(text.strip("\n"), style="dim") if self._reasoning else Markdown(text)


def complete(markdown: str) -> int:
    """How many characters of a text that still grows are paragraphs which will not change."""
    end = position = 0
    fence = ""
    for line in markdown.splitlines(keepends=True):
        position += len(line)
        content = line.strip()
        marks = re.match(r"`{3,}|~{3,}", content)
        if fence:
            if marks and content == marks[0] and content.startswith(fence):
                fence = ""
        elif marks:
            fence = marks[0]
        elif not content and line.endswith("\n"):
            end = position
    return end


@dataclass
class _Bottom:
    """As many of the last lines of something as a terminal shows."""

    shown: Any

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for line in console.render_lines(self.shown, options, pad=False)[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def view_of(plain: bool) -> View:
    """What shows the next answer: markdown where stdout is a terminal and `plain` is not asked for."""
    terminal = sys.stdout.isatty()
    if plain or not terminal:
        return PlainView(terminal)
    from rich.console import Console

    return MarkdownView(Console(highlight=False))


def show_all(pieces: Iterable[Piece], view: View, said: list[str]) -> None:
    """Show an answer; `said` is given its text without reasoning, piece by piece."""
    try:
        for piece in pieces:
            if not piece.reasoning:
                said.append(piece.text)
            view.show(piece)
    finally:
        view.end()
