"""Marks in time: where stages begin and end. Every second belongs to the innermost stage that it was spent in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch

STAGES = ("router", "grouping", "experts", "combine", "dense", "attention", "other", "outside")
"""`other` is the rest of the model, `outside` what is done between its calls: sampling, gradients, the optimizer."""

MOST_SPANS = 200_000
"""That are kept for a trace; sums go on."""


class Clock(Protocol):
    """Takes marks, and says what lies between them."""

    def now(self) -> Any:
        """A mark."""
        ...

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """From the first of the marks to each."""
        ...


class HostClock:
    """Of a device that computes while the host waits."""

    now = staticmethod(time.perf_counter)

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """As of every clock."""
        return [mark - marks[0] for mark in marks]


class EventClock:
    """Of a GPU, by events on the stream in use: what its work takes, not what the host takes to launch it."""

    def __init__(self, module: Any = torch.cuda) -> None:
        self._module = module

    def now(self) -> Any:
        """As of every clock."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """As of every clock; waits for the device."""
        marks[-1].synchronize()
        total, found = 0.0, [0.0]
        for before, after in pairwise(marks):  # small differences: milliseconds come in float32
            total += before.elapsed_time(after) / 1e3
            found.append(total)
        return found


@dataclass(frozen=True)
class Place:
    """What is between two marks: a stage, and a name for it."""

    stage: str
    name: str


@dataclass(frozen=True)
class Span:
    """A place that was entered once: seconds from the first mark of all to its begin and end, and the phase."""

    place: Place
    begin: float
    end: float
    phase: str


@dataclass
class Phase:
    """What the passes of one kind took.

    Attributes:
        passes: how many.
        tokens: rows of the first expert layer.
        seconds: by stage; together they are all the time from the first pass's begin to the last one's end.
    """

    passes: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @property
    def total(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds.values())


class Marks:
    """Marks of one pass after the other. A pass is timed when it ends, so that a mark costs as little as it can."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.phases: dict[str, Phase] = {}
        self.spans: list[Span] = []
        self.dropped_spans = 0
        self.tokens = 0
        self._places: list[Place] = []
        self._codes: list[int] = []
        self._open: list[tuple[int, float]] = []
        self._origin = 0.0
        self._marks: list[Any] = [clock.now()]

    def start(self) -> None:
        """From now on; what was before does not count."""
        self._marks, self._codes = [self.clock.now()], []

    def place(self, stage: str, name: str) -> int:
        """The code of a place."""
        self._places.append(Place(stage, name))
        return len(self._places) - 1

    def enter(self, code: int) -> None:
        """The place begins."""
        self._marks.append(self.clock.now())
        self._codes.append(code)

    def leave(self, code: int) -> None:
        """The place ends, and with it those inside that did not."""
        self._marks.append(self.clock.now())
        self._codes.append(~code)

    def end_pass(self, phase: str | None, at: Any = None) -> None:
        """Add all since the last pass to a phase; to none if it is None. `at` is a mark of the clock, else now."""
        end = self.clock.now() if at is None else at
        at_seconds = [self._origin + s for s in self.clock.seconds([*self._marks, end])]
        kept = None if phase is None else self.phases.setdefault(phase, Phase())
        for before, after, code in zip(at_seconds, at_seconds[1:], [*self._codes, None], strict=False):
            if kept is not None:
                kept.seconds[self._stage] += after - before
            if code is not None:
                self._step(code, after, phase)
        if kept is not None:
            kept.passes += 1
            kept.tokens += self.tokens
        self.tokens = 0
        self._origin = at_seconds[-1]
        self._marks, self._codes = [end], []

    @property
    def _stage(self) -> str:
        return self._places[self._open[-1][0]].stage if self._open else "outside"

    def _step(self, code: int, at: float, phase: str | None) -> None:
        if code >= 0:
            self._open.append((code, at))
            return
        if ~code not in (open_code for open_code, _ in self._open):
            return  # it began before anybody looked
        while True:
            last, begin = self._open.pop()
            if phase is not None and len(self.spans) < MOST_SPANS:
                self.spans.append(Span(self._places[last], begin, at, phase))
            elif phase is not None:
                self.dropped_spans += 1
            if last == ~code:
                return
