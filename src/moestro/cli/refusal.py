"""How a command ends when it was asked for something that cannot be done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from moestro.errors import MoestroError


@contextmanager
def refusals() -> Iterator[None]:
    """One line on stderr and exit code 2 for an error that moestro raises on purpose; others stay tracebacks."""
    try:
        yield
    except MoestroError as error:
        typer.echo(" ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None
