"""How far threads are apart: a cache line that they pass to one another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.test_report import ROW
from moestro import machine
from moestro.bench import Plan, ours, run
from moestro.bench.report import round_trips, tables
from moestro.ops import native
from page import markdown

needs_engine = pytest.mark.skipif(native.missing() is not None, reason="no native engine")


@pytest.fixture
def threads():
    """Sets PyTorch's threads, and sets them back."""
    had = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(had)


@needs_engine
def test_a_line_goes_to_another_thread_and_back() -> None:
    trip = native.engine().round_trip
    assert trip(1, 0.01) == 0.0
    assert trip(2, 0.01) > 0.0
    assert trip(5, 0.0) > 0.0  # of more threads than a machine may have cores


@needs_engine
@pytest.mark.parametrize("asked", [(0, 0.01), (1 << 17, 0.01), (2, -1.0), (2, float("nan"))])
def test_what_is_no_number_is_refused(asked) -> None:
    with pytest.raises(ValueError, match="out of range"):
        native.engine().round_trip(*asked)


@needs_engine
def test_of_one_thread_there_is_none(threads) -> None:
    threads(1)
    assert machine.round_trip() is None
    threads(2)
    assert machine.round_trip() > 0


@needs_engine
@pytest.mark.parametrize("count", [1, 2])
def test_each_point_has_one_before_and_one_after(tiny, threads, count) -> None:
    threads(count)
    plan = Plan(layers=(tiny("olmoe"),), tokens=(1, 4), dtypes=(torch.float32,), ours=(ours(),), peers=(), seconds=0.01)
    report = run(plan)
    assert [len(row.round_trips) for row in report.rows] == [2 * (count - 1)] * 2
    (table,) = tables(report)
    assert ("from thread to thread" in (table.caption or "")) == (count > 1)
    assert ("- a cache line from thread to thread" in markdown(report)) == (count > 1)
    assert [len(point["round_trips"]) for point in report.as_json()["points"]] == [2 * (count - 1)] * 2


def test_the_line_of_a_report() -> None:
    rows = [replace(ROW, round_trips=(53e-9, 325.4e-9)), replace(ROW, num_tokens=4, round_trips=(51e-9, 52e-9)), ROW]
    assert round_trips(rows) == [
        "a cache line from thread to thread and back, before and after, ns: T=1 53 and 325, T=4 51 and 52"
    ]
    assert round_trips([ROW]) == []
