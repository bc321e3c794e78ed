"""Where commands print tables, and how they say how far they are: in a bar, or in words where there is no terminal."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TABLE_WIDTH = 160
EVERY = 5.0
"""Seconds between two lines."""

Update = Callable[[str, int, int], None]
"""What is being done, how much of it is, and how much there is."""


def wide_console(stderr: bool = False) -> Console:
    """Where tables are printed: a narrow terminal wraps lines; digits are never cut."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    made.width = max(made.width, TABLE_WIDTH)
    return made


def named_values(rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values. Names of more than half the width wrap: values keep the other half."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", max_width=TABLE_WIDTH // 2 - 2)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def bar(start: str, shown: bool = True, in_bytes: bool = False) -> Iterator[Update]:
    """A bar on stderr with the time left; `start` stands there until it is first updated.

    What was done before the first update is no part of this run's speed.
    """
    if not shown:
        yield lambda text, done, total: None
        return
    from rich import progress as rich
    from rich.console import Console

    sizes = (rich.DownloadColumn(), rich.TransferSpeedColumn())
    counts = (rich.MofNCompleteColumn(), rich.TimeElapsedColumn(), rich.TextColumn("left"))
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        *(sizes if in_bytes else counts),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=120) as made:
        task = made.add_task(start, total=None)

        def update(text: str, done: int, total: int) -> None:
            change = made.update if made.tasks[0].total is not None else made.reset
            change(task, description=text, completed=done, total=total)

        yield update


@contextmanager
def steps(start: str, clock: Callable[[], float] = time.monotonic) -> Iterator[Update]:
    """A bar on a terminal; elsewhere a line for what begins, once some seconds have passed since the line before."""
    with bar(start, sys.stderr.isatty()) as update:
        if sys.stderr.isatty():
            yield update
            return
        said = clock()

        def line(text: str, done: int, total: int) -> None:
            nonlocal said
            if clock() - said >= EVERY:
                said = clock()
                print(f"{text}, {done} of {total} done" if total > 1 else text, file=sys.stderr, flush=True)

        yield line


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A bar on a terminal that says what is done and for how long, of work that does not say how far it is."""
    with bar(text, sys.stderr.isatty()):
        yield


@contextmanager
def points(total: int, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str], None]]:
    """Yields what is to be called with a description as each of `total` points begins."""
    count = itertools.count()
    if sys.stderr.isatty():
        with bar("measuring the roof") as update:
            yield lambda text: update(text, next(count), total)
        return
    start, said = clock(), float("-inf")

    def on_point(text: str) -> None:
        nonlocal said
        done, now = next(count), clock()
        if now - said >= EVERY:
            said = now
            left = f", about {(now - start) / done * (total - done):.0f} s left" if done else ""
            print(f"point {done + 1} of {total}: {text}{left}", file=sys.stderr, flush=True)

    print("measuring the roof", file=sys.stderr, flush=True)
    yield on_point
