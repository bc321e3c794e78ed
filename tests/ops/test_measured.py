"""What is measured: how much of the processors other programs took meanwhile, and whose numbers are taken."""

from __future__ import annotations

import os
import threading
import time
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
        return measured.kept("name", lambda: next(taken), lambda _: True)[0]

    assert asked() == asked() == [1.0]
    with monkeypatch.context() as patched:
        patched.setattr(measured.native, "digest", lambda: "other")
        assert asked() == asked() == [2.0]
    assert asked() == [1.0]


class Clock:
    """Calls take the seconds of a list, one after the other, in which threads wait so many for a core."""

    def __init__(self, monkeypatch, rounds):
        self.now = self.waited = 0.0  # of the round
        self.rounds = iter(rounds)
        self.calls = 0
        monkeypatch.setattr(measured.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(measured._Waits, "longest", lambda _: self.waited)

    def __call__(self):
        seconds, waited = next(self.rounds)
        self.now += seconds
        self.waited = waited
        self.calls += 1


def kept_of(clock, seconds=0.0):
    return measured.kept("name", lambda: measured.fastest((clock,), seconds), lambda _: True)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(measured.settings, "cache_folder", lambda: tmp_path)
    return tmp_path


CALM, BUSY = (0.001, 0.00004), (0.007, 0.006)


@pytest.mark.parametrize(
    ("rounds", "seconds", "calls"),
    [
        ([CALM] * 9, 0.0, 3),
        ([CALM] * 9, 0.0045, 5),
        ([BUSY, CALM, BUSY, CALM, CALM, CALM], 0.0, 5),
        ([(0.2, 0.001)] * 9, 0.0, 3),  # long calls, with the moments that any system takes
        ([BUSY] * 3 + [CALM] * 9, 0.0, 6),
    ],
)
def test_rounds_that_waited_for_a_core_do_not_count(folder, monkeypatch, rounds, seconds, calls):
    clock = Clock(monkeypatch, rounds)
    assert kept_of(clock, seconds) == ([pytest.approx(min(rounds)[0])], True)
    assert clock.calls == calls
    assert measured.read() == {"name": [pytest.approx(min(rounds)[0])]}
    assert kept_of(clock) == ([pytest.approx(min(rounds)[0])], True)
    assert clock.calls == calls


@pytest.mark.parametrize(
    ("rounds", "calls"),
    [([BUSY] * 99, 6), ([(0.2, 0.2)] * 9, 6), ([BUSY, CALM, CALM, *[BUSY] * 99], 7)],
)
def test_what_a_busy_machine_took_is_not_kept(folder, monkeypatch, rounds, calls):
    """Its time is limited: six calls, and not many more than fit into what `PATIENCE` adds."""
    clock = Clock(monkeypatch, rounds)
    assert kept_of(clock) == ([pytest.approx(min(rounds[:calls])[0])], False)
    assert clock.calls == calls
    assert measured.read() == {}
    later = Clock(monkeypatch, [CALM] * 3)
    assert kept_of(later) == ([pytest.approx(0.001)], True)
    assert measured.read() == {"name": [pytest.approx(0.001)]}


def test_the_longest_wait_of_a_thread(monkeypatch, tmp_path):
    """By the second number of each, in nanoseconds; one that begins or ends has waited for nothing then."""

    def thread(name, waited):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "schedstat").write_text(f"775395 {waited} 3\n")

    monkeypatch.setattr(measured, "_TASKS", tmp_path)
    thread("1", 2_000_000)
    (tmp_path / "3").mkdir()  # it ends before it is read
    with measured._Waits() as waits:
        assert waits.longest() == 0.0
        thread("2", 1_000_000)
        assert waits.longest() == 0.0
        thread("1", 4_000_000)
        thread("2", 4_000_000)
        assert waits.longest() == pytest.approx(3e-3)
        assert waits.longest() == 0.0
        thread("1", 5_000_000)
        (tmp_path / "2/schedstat").write_text("")
        assert waits.longest() == pytest.approx(1e-3)
    monkeypatch.setattr(measured, "_TASKS", tmp_path / "nowhere")
    with measured._Waits() as waits:
        assert waits.longest() == 0.0


def tells():
    """Whether the system counts: zeros stand where it does not."""
    own = measured._TASKS / str(os.getpid()) / "schedstat"
    return own.exists() and own.read_text().split()[0] != "0"


@pytest.mark.skipif(not tells(), reason="the system does not tell")
def test_waits_of_this_process():
    """More threads than cores, which all want to run, wait for each other."""
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            torch.ones(1 << 16).sum()  # outside the interpreter's lock

    threads = [threading.Thread(target=spin) for _ in range(2 * (os.cpu_count() or 1) + 2)]
    with measured._Waits() as waits:
        for each in threads:
            each.start()
        waits.longest()
        time.sleep(0.5)
        assert waits.longest() > 0.0
        stop.set()
        for each in threads:
            each.join()
        assert waits.longest() >= 0.0
