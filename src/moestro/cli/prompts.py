"""The prompts of a command: arguments, standard input and files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moestro.errors import InvalidInputError, invalid_input

STANDARD_INPUT = "-"


@dataclass(frozen=True)
class NamedText:
    """A prompt, and where it comes from."""

    name: str
    text: str


def read_prompts(
    arguments: Sequence[str],
    files: Sequence[Path],
    num_ranks: int,
    operation: str = "generate",
    by: str = "as an argument",
) -> list[NamedText]:
    """The prompts in order, those of the arguments first; at least one. `by` is how a command is given them."""
    if not arguments and not files:
        raise invalid_input(
            operation, got="no prompt", needs="a text to continue", fix=f"Give it {by}, by --file, or as -."
        )
    if arguments.count(STANDARD_INPUT) > 1:
        raise invalid_input("generate", got="- twice", needs="- once", fix="Standard input is read to its end at once.")
    found = [
        NamedText("standard input", _standard_input(num_ranks))
        if argument == STANDARD_INPUT
        else NamedText(f"argument {number}", argument)
        for number, argument in enumerate(arguments, 1)
    ]
    return found + [NamedText(str(path), read_text(operation, "--file", path)) for path in files]


def read_text(operation: str, option: str, path: Path) -> str:
    """The text of a file in UTF-8, as it is."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise _unread(operation, option, path, f"no UTF-8 at byte {error.start}") from None
    except (OSError, ValueError) as error:  # a ValueError of a name with a null character
        raise _unread(operation, option, path, getattr(error, "strerror", None) or str(error)) from None


def _unread(operation: str, option: str, path: Path, why: str) -> InvalidInputError:
    return invalid_input(
        operation,
        got=f"{option} {str(path)!r} ({why})",
        needs="a file with text in UTF-8",
        fix="Name another one, or convert it.",
    )


def _standard_input(num_ranks: int) -> str:
    """Whatever the locale: bytes that are no UTF-8 are refused like those of an argument."""
    if num_ranks > 1:
        raise invalid_input(
            "generate",
            got="- with --ep or --tp",
            needs="a prompt that every rank gets: processes of torchrun share one standard input",
            fix='Pass it as the argument: "$(cat file)".',
        )
    return sys.stdin.buffer.read().decode(errors="surrogateescape") if sys.stdin is not None else ""
