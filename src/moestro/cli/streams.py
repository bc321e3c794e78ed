"""Standard output and error of a command: what happens when they cannot be written."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any

from moestro.errors import invalid_input

BROKEN_PIPE = 141
"""The exit code of a command whose reader has left, as shells know it."""
REFUSED = 2
INTERRUPTED = 130


class OutputError(Exception):
    """A stream cannot be written. It is no OSError, which libraries on the way would take for one of theirs."""


class Output(io.TextIOWrapper):
    """A text stream that says by an `OutputError` that it cannot be written."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise OutputError from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise OutputError from error


def run(command: Callable[[], Any]) -> int:
    """Run a command and return its exit code: 2 with one line where its output cannot be written.

    A reader that has left ends it quietly with 141, Ctrl-C with 130. Characters that an encoding lacks are replaced.
    """
    code: Any = 0
    try:
        sys.stderr = _checked_stream(sys.stderr) if sys.stderr is not None else io.StringIO()
        if sys.stdout is None:
            return _refuse("a closed standard output")
        sys.stdout = _checked_stream(sys.stdout)
        try:
            command()
        except SystemExit as stop:
            code = stop.code
        sys.stdout.flush()
        sys.stderr.flush()
        return code if isinstance(code, int) else int(code is not None)
    except OutputError as stop:
        return _ended(stop.__cause__)
    except KeyboardInterrupt:
        return INTERRUPTED


def _checked_stream(stream: Any) -> Any:
    if type(stream) is not io.TextIOWrapper:
        return stream
    encoding, lines = stream.encoding, stream.line_buffering
    return Output(stream.detach(), encoding=encoding, errors="replace", line_buffering=lines)


def _ended(error: BaseException | None) -> int:
    """What is still held back has nowhere to go: it is dropped, here and when Python ends."""
    broken = isinstance(error, OSError) and error.errno == errno.EPIPE
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        if broken:
            os.dup2(nowhere.fileno(), 2)
    if broken:
        return BROKEN_PIPE
    return _refuse(f"a standard output that cannot be written ({getattr(error, 'strerror', error)})")


def _refuse(got: str) -> int:
    said = invalid_input("moestro", got=got, needs="a place to write to", fix="Redirect it to a file, or to /dev/null.")
    with contextlib.suppress(OutputError):
        print(said, file=sys.stderr, flush=True)
    return REFUSED
