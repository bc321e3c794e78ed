"""How far a benchmark is: a bar on a terminal, lines of words where standard error is a pipe or a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 5.0
"""Seconds between two lines."""


@contextmanager
def points(total: int, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str], None]]:
    """Yields what is to be called with a description as each of `total` points begins."""
    with _bar(total) if sys.stderr.isatty() else _lines(total, clock) as on_point:
        yield on_point


@contextmanager
def _lines(total: int, clock: Callable[[], float]) -> Iterator[Callable[[str], None]]:
    done, start, said = -1, clock(), float("-inf")

    def on_point(text: str) -> None:
        nonlocal done, said
        done, now = done + 1, clock()
        if now - said >= EVERY:
            said = now
            left = f", about {(now - start) / done * (total - done):.0f} s left" if done else ""
            print(f"point {done + 1} of {total}: {text}{left}", file=sys.stderr, flush=True)

    print("measuring the roof", file=sys.stderr, flush=True)
    yield on_point


@contextmanager
def _bar(total: int) -> Iterator[Callable[[str], None]]:
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=120) as bar:
        task = bar.add_task("measuring the roof", total=total)
        started = False

        def on_point(text: str) -> None:
            nonlocal started
            bar.update(task, description=text, advance=1 if started else 0)
            started = True

        yield on_point
