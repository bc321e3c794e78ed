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

MOST_MARKS = 2**16
"""That wait to be added up."""


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
    """Marks of one pass after the other. They are added up some time later, so that one costs as little as it can.

    `add_mark(now())` and `add_code(code)` are what `enter` does, with `~code` what `leave` does.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.tokens = 0
        self._phases: dict[str, Phase] = {}
        self._spans: list[tuple[int, float, float, str]] = []
        self._dropped_spans = 0
        self._places: list[Place] = []
        self._marks: list[Any] = [clock.now()]
        self._codes: list[int | tuple[str | None, int]] = []
        self.now, self.add_mark, self.add_code = clock.now, self._marks.append, self._codes.append  # looked up once
        self._open: list[tuple[int, float]] = []
        self._ended: list[tuple[int, float, float]] = []
        self._spent = dict.fromkeys(STAGES, 0.0)
        self._origin = 0.0

    def start(self) -> None:
        """From now on; what was before does not count."""
        self._marks[:], self._codes[:] = [self.clock.now()], []

    def place(self, stage: str, name: str) -> int:
        """The code of a place."""
        self._places.append(Place(stage, name))
        return len(self._places) - 1

    def enter(self, code: int) -> None:
        """The place begins."""
        self.add_mark(self.now())
        self.add_code(code)

    def leave(self, code: int) -> None:
        """The place ends, and with it those inside that did not."""
        self.add_mark(self.now())
        self.add_code(~code)

    def come(self, tokens: int) -> None:
        """So many tokens have come; a pass that never ends is added up now and then."""
        self.tokens += tokens
        if len(self._codes) > MOST_MARKS:
            self._add_up()

    @property
    def has_begun(self) -> bool:
        """Whether anything was entered since the last pass."""
        return bool(self._codes or self._open or self._ended)

    def end_pass(self, phase: str | None, at: Any = None) -> None:
        """Add all since the last pass to a phase; to none if it is None. `at` is a mark of the clock, else now."""
        self._marks.append(self.clock.now() if at is None else at)
        self._codes.append((phase, self.tokens))
        self.tokens = 0
        if len(self._codes) > MOST_MARKS:
            self._add_up()

    @property
    def phases(self) -> dict[str, Phase]:
        """What passes took, those that have ended."""
        self._add_up()
        return self._phases

    @property
    def spans(self) -> list[Span]:
        """Of all places in passes that have ended, the first `MOST_SPANS`."""
        self._add_up()
        return [Span(self._places[code], begin, end, phase) for code, begin, end, phase in self._spans]

    @property
    def dropped_spans(self) -> int:
        """Those that came later."""
        self._add_up()
        return self._dropped_spans

    def _add_up(self) -> None:
        """Give each second between two marks to the place that was innermost."""
        if not self._codes:
            return
        seconds = [self._origin + passed for passed in self.clock.seconds(self._marks)]
        for (before, after), code in zip(pairwise(seconds), self._codes, strict=True):
            stage = self._places[self._open[-1][0]].stage if self._open else "outside"
            self._spent[stage] += after - before
            if isinstance(code, tuple):
                self._end(*code)
            elif code >= 0:
                self._open.append((code, after))
            elif any(~code == each for each, _ in self._open):  # else it began before anybody looked
                self._close(~code, after)
        self._origin = seconds[-1]
        del self._marks[:-1], self._codes[:]

    def _close(self, code: int, at: float) -> None:
        while True:
            last, begin = self._open.pop()
            self._ended.append((last, begin, at))
            if last == code:
                return

    def _end(self, phase: str | None, tokens: int) -> None:
        if phase is not None:
            kept = self._phases.setdefault(phase, Phase())
            kept.passes += 1
            kept.tokens += tokens
            for stage, spent in self._spent.items():
                kept.seconds[stage] += spent
            room = max(MOST_SPANS - len(self._spans), 0)
            self._spans += [(*span, phase) for span in self._ended[:room]]
            self._dropped_spans += len(self._ended[room:])
        self._spent = dict.fromkeys(STAGES, 0.0)
        self._ended = []
