"""What is measured: how much of the processors other programs took meanwhile, and whose numbers are taken."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from moestro import machine
from moestro.ops import measured


@pytest.fixture
def made_machine(monkeypatch):
    """A call of 10 seconds on 4 of 8 processors, in which this process takes 20 processor seconds."""
    state = SimpleNamespace(now=0.0, busy=100.0, own=5.0)
    monkeypatch.setattr(measured.time, "perf_counter", lambda: state.now)
    monkeypatch.setattr(machine, "busy_seconds", lambda: state.busy)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "times", lambda: (state.own / 2, 0.0, 0.0, state.own / 2, 0.0))
    return state


@pytest.mark.parametrize(("others", "share"), [(0.0, 0.0), (40.0, 0.0), (60.0, 0.5), (80.0, 1.0), (200.0, 1.0)])
def test_what_others_leave_is_enough_or_not(made_machine, others, share):
    """Of 8 processors for 10 seconds: 40 seconds are not asked for."""

    def call():
        made_machine.now += 10.0
        made_machine.own += 20.0
        made_machine.busy += 20.0 + others
        return "result"

    assert measured.taken_by_others(call) == ("result", pytest.approx(share))


@pytest.mark.parametrize(("threads", "share"), [(1, 0.0), (2, 0.0), (4, 0.5), (8, 0.5)])
def test_threads_that_are_not_there_want_no_cores(made_machine, monkeypatch, threads, share):
    """Of 4 cores that it may use, as OMP_NUM_THREADS has it; others leave two of 8."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    def call():
        made_machine.now += 10.0
        made_machine.busy += 60.0

    assert measured.taken_by_others(call) == (None, pytest.approx(share))


def test_a_system_that_does_not_tell(made_machine, monkeypatch):
    monkeypatch.setattr(machine, "busy_seconds", lambda: None)
    assert measured.taken_by_others(lambda: 7) == (7, 0.0)


def test_busy_seconds(tmp_path):
    """All but idle and waiting, in ticks of the system; guests are in what the user takes."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu  100 20 30 9000 800 4 5 6 70 80\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert machine.busy_seconds(tmp_path) == pytest.approx(165 / os.sysconf("SC_CLK_TCK"))
    (tmp_path / "proc/stat").write_text("intr 1 2 3\n")
    assert machine.busy_seconds(tmp_path) is None
    assert machine.busy_seconds(tmp_path / "nowhere") is None
    assert machine.busy_seconds() is None or machine.busy_seconds() > 0


def test_another_build_of_the_engine_is_measured_anew(monkeypatch, tmp_path):
    """Its kernels take other times; going back to a build finds what was measured with it."""
    monkeypatch.setattr(measured.settings, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(measured, "_machine", measured._machine.__wrapped__)
    taken = iter([[1.0], [2.0]])

    def asked() -> list[float]:
        return measured.kept("name", lambda: next(taken), lambda _: True)

    assert asked() == asked() == [1.0]
    with monkeypatch.context() as patched:
        patched.setattr(measured.native, "digest", lambda: "other")
        assert asked() == asked() == [2.0]
    assert asked() == [1.0]
