"""`moestro plan`: a table, JSON or a picture; one line and exit code 2 for what cannot be planned."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from moestro.cli import app
from moestro.cli.progress import steps
from moestro.memory import read_trace
from moestro.planning import machine_names

SHORT = ("--prompt-tokens", 8, "--new-tokens", 4)
FOUR_PARTS = re.compile(r"\[\w+\] got .+; needs .+\. .+\.?")


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_this_machine(model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    picture = tmp_path / "plan.png"
    result = run(model_folder, "--batch", "1,2", "--prompt-tokens", 8, "--new-tokens", 4, "--plot", picture)
    assert "to run it: moestro generate" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines()[3:])) <= 80
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = json.loads(run(model_folder, "--prompt-tokens", 8, "--new-tokens", 4, "--json").stdout)
    assert {each["choice"]["format"] for each in again["candidates"]} >= {None}
    assert again["planned_machine"]["is_here"]


def test_a_described_machine_and_a_configuration(model_folder, tmp_path):
    path = model_folder / "config.json"
    found = json.loads(run(path, *SHORT, "--machine", "h200", "--devices", 2, "--json").stdout)
    assert {(c["choice"]["ep"], c["choice"]["tp"]) for c in found["candidates"]} == {(1, 1), (2, 1), (1, 2)}
    assert run("--machine", "list").stdout.split() == list(machine_names())


def test_a_recorded_run(model_folder, tmp_path):
    path = tmp_path / "run.npz"
    recorded = CliRunner().invoke(
        app, ["generate", "a b c", "--model", str(model_folder), "--max-new-tokens", "4", "--trace", str(path)]
    )
    assert recorded.exit_code == 0, recorded.output
    assert read_trace(path).decoded
    run(model_folder, *SHORT, "--machine", "h200", "--trace", path)
    assert FOUR_PARTS.search(run("--machine", "h200", "--trace", path, code=2).stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere/at/all"],
        ["--batch", "none"],
        ["--batch", "0"],
        ["--machine", "h999"],
        ["--memory", "1MB", "--machine", "h200"],
        ["--memory", "much"],
        ["--disk", "fast"],
        ["--load", "zipf:x"],
        ["--load", "uniform", "--trace", "x.npz"],
        ["--format", "int3", "--machine", "h200"],
        ["--plot", "plan.txt"],
        ["--devices", "3"],
        ["--machine", "h200", "--check"],
        ["--machine", "h200", "--new-tokens", "1000"],
        ["--machine", "h200", "--projections", "int3"],
        ["--format", ","],
    ],
)
def test_one_line_for_what_cannot_be_planned(arguments):
    result = run(*arguments, code=2)
    assert result.stdout == ""
    assert FOUR_PARTS.fullmatch(result.stderr.strip())


def test_help_has_an_example():
    assert "moestro plan FOLDER" in " ".join(run("--help").stdout.split())


def test_what_is_being_done_is_said_in_words_where_there_is_no_terminal(capsys):
    now = [0.0]
    with steps("begin", clock=lambda: now[0]) as say:
        for now[0], text in ((1.0, "soon"), (6.0, "timing"), (7.0, "too early"), (12.0, "running")):
            say(text, 1, 3 if text == "running" else 1)
    assert capsys.readouterr().err == "timing\nrunning, 1 of 3 done\n"
