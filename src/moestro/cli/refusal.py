"""How a command ends when it was asked for something that cannot be done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from moestro.errors import MoestroError, invalid_input


@contextmanager
def refusals() -> Iterator[None]:
    """One line on stderr and exit code 2 for an error that moestro raises on purpose; others stay tracebacks."""
    try:
        yield
    except MoestroError as error:
        typer.echo(" ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None


def check_targets(operation: str, plot: Path | None, other: Path | None) -> None:
    """Refuse before the run what could not be written after it. What is there is left as it is."""
    if plot is not None:
        from moestro.bench.plot import check_ending

        check_ending(plot)
    for path in filter(None, (plot, other)):
        existed = path.exists()
        try:
            path.open("ab").close()
        except (OSError, ValueError) as error:
            raise invalid_input(
                operation,
                got=f"{str(path)!r} ({getattr(error, 'strerror', None) or error})",
                needs="a file that can be written",
                fix="Name a file in a folder that exists.",
            ) from None
        if not existed:
            path.unlink()
