"""Marks in time: every second belongs to one stage, whatever begins and ends inside."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moestro.profiling import marks
from moestro.profiling.marks import EventClock, HostClock, Marks


class Steps(HostClock):
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:  # type: ignore[override]
        return self.time


@pytest.fixture
def clock() -> Steps:
    return Steps()


@pytest.fixture
def made(clock: Steps) -> Marks:
    return Marks(clock)


def test_seconds_belong_to_the_innermost_stage(made: Marks, clock: Steps) -> None:
    whole, inside = made.place("other", "model"), made.place("experts", "layer")
    clock.time += 1  # outside
    made.enter(whole)
    clock.time += 2
    made.enter(inside)
    clock.time += 4
    made.leave(inside)
    clock.time += 8
    made.leave(whole)
    clock.time += 16
    made.end_pass("prompt")
    phase = made.phases["prompt"]
    spent = {stage: seconds for stage, seconds in phase.seconds.items() if seconds}
    assert spent == {"outside": 17, "other": 10, "experts": 4}
    assert (phase.total, phase.passes) == (31, 1)
    assert [(span.place.name, span.begin, span.end) for span in made.spans] == [("layer", 3, 7), ("model", 1, 15)]


def test_a_place_that_ends_takes_those_inside_along(made: Marks, clock: Steps) -> None:
    """A call that failed left a stage open."""
    whole, inside = made.place("other", "model"), made.place("grouping", "group_by_expert")
    made.enter(whole)
    made.enter(inside)
    clock.time += 2
    made.leave(whole)
    clock.time += 3
    made.leave(inside)  # which has ended
    clock.time += 5
    made.end_pass("forward")
    spent = {stage: seconds for stage, seconds in made.phases["forward"].seconds.items() if seconds}
    assert spent == {"grouping": 2, "outside": 8}


def test_passes_end_where_they_are_said_to(made: Marks, clock: Steps) -> None:
    code = made.place("experts", "layer")
    for seconds in (1, 2, 4):
        made.enter(code)
        clock.time += seconds
        made.leave(code)
        at = clock.time
        clock.time += 0.5
        made.end_pass(None if seconds == 2 else "decode", at)
    phase = made.phases["decode"]
    assert (phase.passes, phase.seconds["experts"], phase.seconds["outside"]) == (2, 5, 0.5)
    assert phase.total == 5.5


def test_a_stage_goes_on_through_passes(made: Marks, clock: Steps) -> None:
    code = made.place("experts", "layer")
    made.enter(code)
    clock.time += 1
    made.end_pass("prompt")
    clock.time += 2
    made.leave(code)
    made.end_pass("decode")
    assert made.phases["prompt"].seconds["experts"] == 1
    assert made.phases["decode"].seconds["experts"] == 2


def test_spans_are_kept_up_to_a_number(made: Marks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "MOST_SPANS", 3)
    code = made.place("experts", "layer")
    for _ in range(5):
        made.enter(code)
        made.leave(code)
    made.end_pass("decode")
    assert (len(made.spans), made.dropped_spans) == (3, 2)


class Event:
    """What a GPU's event is asked."""

    times = iter(range(1000))
    waited = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = next(Event.times) ** 2

    def synchronize(self) -> None:
        Event.waited += 1

    def elapsed_time(self, other: Event) -> float:
        return float(other.at - self.at)


def test_events_of_a_device() -> None:
    """Their milliseconds are added up; the device is waited for once."""
    clock = EventClock(type("module", (), {"Event": Event}))
    taken: Sequence[Event] = [clock.now() for _ in range(4)]
    assert clock.seconds(taken) == pytest.approx([0, 1e-3, 4e-3, 9e-3])
    assert Event.waited == 1
