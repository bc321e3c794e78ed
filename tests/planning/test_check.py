"""A check compares what was predicted with what a process found, and says whether the recommendation was right."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import moestro
from moestro.bench.model import FEWEST_NEW_TOKENS, ModelPoint
from moestro.errors import UnsupportedError
from moestro.formats import FORMATS
from moestro.planning import Choice, check, machines
from moestro.planning.predict import Times

HERE = replace(machines.read_machine("h200"), is_here=False, name="box")


@pytest.fixture
def plan():
    return moestro.plan(machine=HERE, batches=[1, 4], new_tokens=40)


@pytest.fixture
def cases(monkeypatch):
    """What was asked of processes; each finds twice the seconds, a quarter more memory."""
    asked = []

    def measure(case):
        asked.append(case)
        return ModelPoint(case, prompt_seconds=0.2, decode_seconds=0.1 / case.batch, peak_bytes=10**8)

    monkeypatch.setattr(check, "measure", measure)
    return asked


def test_the_first_and_two_others_are_run(plan, cases):
    here = replace(plan, machine=replace(plan.machine, is_here=True))
    found = check.check(here)
    assert len(found) == len(cases) == 3
    assert found[0].candidate is plan.best
    kinds = [(case.format, case.batch) for case in cases]
    assert len(set(kinds)) == 3
    for case, one in zip(cases, found, strict=True):
        candidate = one.candidate
        assert (case.format, case.memory, case.batch) == (
            candidate.choice.format,
            candidate.choice.memory,
            candidate.load.batch,
        )
        assert (case.prompt_tokens, case.new_tokens, case.projections) == (128, check.MOST_NEW_TOKENS, "auto")
        assert one.prompt_error == pytest.approx(candidate.prompt.total / 0.2 - 1)
        assert one.decode_error == pytest.approx(candidate.decode.total / (0.1 / case.batch) - 1)
        assert one.memory_error == pytest.approx(candidate.need.device / 1e8 - 1)
        assert one.rate == pytest.approx(case.batch * 40 / (0.2 + 39 * 0.1 / case.batch))
        json.dumps(one.as_json())
    text = check.text(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "of the fastest of these" in text


@pytest.mark.parametrize("change", [{}, {"checkpoint": None}])
def test_what_cannot_be_run_is_refused(plan, cases, change):
    other = replace(plan, machine=replace(plan.machine, is_here=True), model=replace(plan.model, **change))
    with pytest.raises(UnsupportedError, match="Leave --check out"):
        check.check(other if change else plan)
    assert cases == []


def test_a_format_within_a_budget_is_refused_or_passed_over(plan, cases):
    """`load` takes no format beside a budget: files have to have it."""
    here = replace(plan, machine=replace(plan.machine, is_here=True))
    written = replace(plan.best, choice=Choice("int8", 10**7))
    with pytest.raises(UnsupportedError, match="moestro quantize FOLDER OUT"):
        check.check(replace(here, candidates=(written, *here.candidates)))
    assert cases == []
    found = check.check(replace(here, candidates=(plan.best, written, *plan.candidates[1:])))
    assert all(one.candidate.why_not_run is None for one in found)
    assert len(found) == 3


def test_what_a_process_is_given(plan, cases):
    """The folder that was found, whatever it was called, and as many new tokens as can be timed."""
    model = replace(plan.model, name="bundled", folder="/models/of mine")
    short = replace(plan.best, load=replace(plan.best.load, new_tokens=1))
    here = replace(plan, machine=replace(plan.machine, is_here=True), model=model, candidates=(short,))
    check.check(here)
    assert [(case.folder, case.new_tokens) for case in cases] == [("/models/of mine", FEWEST_NEW_TOKENS)]


def test_lines_of_large_numbers(plan):
    best = replace(plan.best, choice=Choice(max(FORMATS, key=len)), prompt=Times(dense=999.0))
    point = ModelPoint(None, prompt_seconds=900.0, decode_seconds=0.01, peak_bytes=10**8)
    lines = check.text([check.Checked(best, point)]).splitlines()
    assert max(map(len, lines)) <= 80
    assert "999,000" in lines[2].split()
    both = replace(best, choice=replace(best.choice, ep=2))
    line = check.text([check.Checked(both, point)]).splitlines()[2]
    assert len(line) == len(lines[2]) <= 80
    assert line.startswith(f"{both.choice.format} x2 ")
