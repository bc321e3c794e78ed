"""What is printed of a plan: lines of 80 columns whatever the sizes, and a command that runs as it stands."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import moestro
from moestro.cli import app
from moestro.formats import FORMATS
from moestro.planning import Choice, Load, Machine
from moestro.planning.predict import Times
from moestro.planning.report import COLUMNS, WIDTH, command, row

BOX = Machine("box", 10**9, 1e10, {"default": 1e12}, devices=8, link_bytes_per_second=1e9, link_seconds=1e-5)


@pytest.fixture(scope="module")
def plan():
    return moestro.plan(machine=BOX, formats=[None], batches=[1, 4])


def test_lines_of_long_names_and_large_numbers(plan):
    folder = "/models/" + "a-folder-with-a-name/" * 8
    model = replace(plan.model, name=folder, folder=folder)
    machine = replace(plan.machine, name="A Processor of a Very Long Name @ 2.40GHz " * 3, devices=16)
    form = max(FORMATS, key=len)
    large = replace(
        plan.best,
        choice=Choice(form, None, 16, 16),
        load=Load(4096, 10**6, 10**6),
        need=replace(plan.best.need, experts=1234 * 10**9),
        prompt=Times(communication=1.0),
        decode=Times(communication=1e-3),
    )
    found = replace(plan, model=model, machine=machine, candidates=(large, replace(large, choice=Choice(form, 10**9))))
    lines = str(found).splitlines()
    assert all(len(line) <= WIDTH for line in lines if folder not in line)
    assert sum(folder in line for line in lines) == 1
    assert all(f" {word} " in f" {row(large)} " for word in (form, "4096", "16 x 16", "1234.0", "GB", "communication"))
    assert len(COLUMNS) <= WIDTH


@pytest.mark.parametrize("folder", ["/models/plain", "/models/with a space", "~/models/x"])
def test_the_command_names_the_model(plan, folder, monkeypatch):
    """`moestro generate` takes a prompt first, and a model by its option."""
    asked = {}

    def load(model, dtype, place, strategy, check, how):
        asked.update(model=model, how=how)
        raise moestro.errors.invalid_input("test", got="a model", needs="none", fix="Done.")

    monkeypatch.setattr("moestro.hf.text_model.load_text_model", load)
    choice = Choice("mxfp4")
    line = command(replace(plan.model, folder=folder), replace(plan.best, choice=choice), "int8")
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert "[test]" in result.stderr, result.output
    assert asked["model"] == folder
    assert (asked["how"].format, asked["how"].projections) == ("mxfp4", "int8")


def test_commands(plan):
    model, best = replace(plan.model, folder="F"), replace(plan.best, load=Load(1, 8, 8))

    def line(choice, **changes):
        return command(model, replace(best, choice=choice, **changes), "auto")

    assert command(plan.model, replace(best, choice=Choice()), "auto") == "moestro generate PROMPT"
    assert line(Choice(memory=7)) == "moestro generate PROMPT --model F --memory 7"
    assert line(Choice(), load=Load(4, 8, 8)) == "moestro generate PROMPT --model F --batch 4"
    written = "moestro quantize F OUT --format int8 && moestro generate PROMPT --model OUT --memory 7"
    assert line(Choice("int8", 7)) == written
    ranks = "torchrun --nproc-per-node 4 -m moestro generate PROMPT --model F --ep 2 --tp 2"
    assert line(Choice(ep=2, tp=2), load=Load(4, 8, 8)) == ranks


@pytest.mark.parametrize(("threads", "begin"), [(2, "torchrun"), (8, "OMP_NUM_THREADS=4 torchrun")])
def test_processes_of_this_machine_share_its_threads(plan, threads, begin):
    """Which `torchrun` gives one each unless it is told; and one sequence at once is what `moestro generate` takes."""
    both = replace(plan.best, choice=Choice(ep=2), load=Load(4, 8, 8), dispatcher="all-reduce")
    here = replace(plan, machine=replace(plan.machine, is_here=True, devices=threads), candidates=(both,))
    said = " ".join(str(here).split())
    assert f"to run it: {begin} --nproc-per-node 2 -m moestro generate PROMPT" in said
    assert "sequences at once over ranks are for Python" in said
    assert f"box, {threads} threads;" in said
    assert "dispatcher" not in said


def test_a_dispatcher_that_generate_has_not(plan):
    ranks = replace(plan.best, choice=Choice(ep=2), dispatcher="all-to-all")
    assert "ep_implementation" in str(replace(plan, candidates=(ranks,)))
