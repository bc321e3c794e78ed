"""Processes of this machine that run one model together: what they measure, and what becomes of a dead one."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict, astuple
from functools import partial

import pytest
import torch

import moestro
from hf.checkpoints import Checkpoints
from moestro.bench import model
from moestro.bench.memory import Resident, file_share
from moestro.bench.model import ModelCase
from moestro.errors import CollectiveError, InvalidInputError
from moestro.hf import timed
from moestro.ops import measured
from moestro.parallel import links, processes
from moestro.planning import Load, check, sample
from parallel.planned import dies, quietly, refuses

SHORT = {"prompt_tokens": 8, "new_tokens": 4}
CALLS = {links.RANK: links.rank, sample.RANK: sample.rank, model.RANK: timed.rank}


@pytest.fixture
def two_threads(tmp_path, monkeypatch):
    """For two processes to share; what they find is not kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def two(group, two_threads, monkeypatch):
    """Two processes that are there already, in place of those that would be started; returns what they were asked."""
    seen = []

    def ask(operation, call, count, asked):
        seen.append((operation, call, count))
        answers = group(count).run(quietly, CALLS[call], asked)
        assert not any(isinstance(each, str) for each in answers), answers
        return answers

    for module in (links, model, sample):
        monkeypatch.setattr(module, "ask", ask)
    return seen


def test_a_plan_of_two_processes_is_run(two):
    """Everything is finite and counted: a link, layers in both at once, and then the model itself."""
    found = moestro.plan(devices=2, formats=[None], **SHORT)
    alone, both = sorted(found.candidates, key=lambda each: each.choice.ranks)
    assert (alone.choice.ranks, both.choice.ranks, both.choice.tp) == (1, 2, 1)
    assert all(map(math.isfinite, (*astuple(both.prompt), *astuple(both.decode))))
    assert min(both.prompt.communication, both.decode.communication) > 0
    assert alone.prompt.communication == alone.decode.communication == 0
    assert both.dispatcher == "all-reduce"
    assert both.need.experts == alone.need.experts
    (one,) = check.check(found, [both])
    assert (one.measured.case.processes, one.measured.threads) == (2, 1)
    assert [call for _, call, _ in two] == [links.RANK, sample.RANK, model.RANK]
    assert "--nproc-per-node 2" in str(moestro.planning.report.command(found.model, both, "auto"))


def test_bytes_of_two_processes(two, tmp_path_factory):
    """Experts are read on one of them, everything else on both."""
    folder = str(Checkpoints(tmp_path_factory.mktemp("checkpoints")).folder("olmoe"))
    case = ModelCase(folder, **SHORT)
    alone = timed.run({**asdict(case), "threads": 2})
    both = model.measure(ModelCase(folder, **SHORT, processes=2))
    assert both.expert_bytes == alone["expert_bytes"]
    assert both.step_bytes - both.expert_bytes == 2 * (alone["step_bytes"] - alone["expert_bytes"])


@pytest.mark.parametrize(("share", "most"), [(45, 2 * (20 + 20 + 15)), (None, 2 * 70)])
def test_pages_of_files_count_once(monkeypatch, share, most):
    """A peak 20 above what is held at the end, 20 more of no file, and 15 of files; where no one tells, all of it."""

    class Two:
        def barrier(self, where):
            assert where == "bench model"

    monkeypatch.setattr(timed, "gathered", lambda peers, operation, value: [value, value])
    monkeypatch.setattr(timed, "resident", lambda: Resident(now=150, most=170, anonymous=60))
    monkeypatch.setattr(timed, "file_share", lambda: share)
    before = Resident(now=100, most=100, anonymous=40), 30
    assert timed._Job(Two()).held(before) == (most, 2 * 20)
    assert timed._Job(None).held(before) == (70, 20)


@pytest.mark.skipif(file_share() is None, reason="the system does not tell")
def test_the_share_of_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(2**24))
    before = file_share()
    mapped = torch.from_file(str(path), size=2**22)
    assert mapped.sum() == 0
    assert file_share() - before > 0.9 * 2**24


def test_the_slowest_of_the_processes_counts(two_threads, monkeypatch):
    seen = [[3.0, 0, 0, 1.0, 1.0, 0], [1.0, 1.0, 0, 2.0, 2.0, 2.0]]
    monkeypatch.setattr(sample, "ask", lambda *_: seen)
    read = sample.read_model(None)
    found = sample.rest_of(read, Load(1, 8, 4), "auto", processes=2)
    assert found[:2] == (sample.Rest(3.0, 0, 0), sample.Rest(2.0, 2.0, 2.0))
    assert any("1 threads in each of 2 processes" in name for name in measured.read())


def test_a_link_by_hand(two_threads, monkeypatch):
    """Two processes send 2 messages each, and half of the bytes with each."""
    monkeypatch.setattr(links, "ask", lambda *_: [[0.002, 0.012], [0.002, 0.012]])
    found = links.link("plan", 2)
    assert found.seconds == pytest.approx(0.001)
    more = (links.MANY - links.FEW) * links.HIDDEN * 4
    assert more / found.bytes_per_second == pytest.approx(0.010)


@pytest.mark.parametrize(
    "call",
    [lambda: moestro.plan(devices=3), lambda: model.measure(ModelCase("folder", processes=3))],
    ids=["plan", "bench model"],
)
def test_more_processes_than_threads_are_refused(two_threads, call):
    with pytest.raises(InvalidInputError, match=r"got 3 processes on 2 threads; needs a thread for each process"):
        call()


@pytest.mark.parametrize(
    ("call", "asked", "error", "sentence"),
    [
        (dies, {"dead": 1}, CollectiveError, r"got no result from rank 1, whose process has ended; needs"),
        (refuses, {"refuses": 0}, InvalidInputError, r"got 100 processes on 1 thread; needs"),
    ],
)
def test_a_process_that_ends_is_an_error_at_once(call, asked, error, sentence, monkeypatch):
    monkeypatch.setattr(processes, "START", "forkserver")
    begin = time.monotonic()
    with pytest.raises(error, match=sentence):
        processes.run_ranks("plan", 2, partial(call, asked))
    assert time.monotonic() - begin < 60  # the barrier alone would wait for 120


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("import os; os.kill(os.getpid(), 9)", r"got no result of 2 processes, whose start was ended by signal 9"),
        (
            "import sys; print('no memory', file=sys.stderr);"
            'print(\'{"error": "CollectiveError", "text": "[plan] got no result."}\')',
            r"\[plan\] got no result\. It said at last: no memory",
        ),
        ('print(\'{"error": "InvalidInputError", "text": "[plan] got it."}\')', r"\[plan\] got it\."),
    ],
    ids=["killed", "a rank died", "a refusal"],
)
def test_what_is_said_without_a_result(program, sentence, monkeypatch):
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-ISE", "-c", program))
    with pytest.raises((CollectiveError, InvalidInputError), match=sentence):
        processes.ask("plan", links.RANK, 2, {})


def test_what_starts_the_ranks_prints_a_line_of_json(monkeypatch):
    monkeypatch.setattr(processes, "START", "forkserver")
    question = {"operation": "plan", "call": "parallel.planned:refuses", "processes": 2, "asked": {"refuses": -1}}
    assert json.loads(processes.main(json.dumps(question))) == {"results": [None, None]}
    question["asked"] = {"refuses": 1}
    assert json.loads(processes.main(json.dumps(question)))["error"] == "InvalidInputError"


def test_processes_are_started_and_asked():
    assert processes.ask("plan", "json:dumps", 2, {"a": 1}) == ['{"a": 1}'] * 2
