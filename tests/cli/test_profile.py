"""`moestro profile`: tables, JSON and pictures of a run, whose times are those of generate; one line for the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import moestro
from moestro.cli import app
from moestro.cli import profile as command
from moestro.hf.generate import Generation, Sampling, generate
from moestro.hf.text_model import TextModel, load_text_model
from moestro.memory import read_trace
from moestro.profiling import Profile

FOUR_PARTS = re.compile(r"\[\w+\] got .+; needs .+\. .+\.")
PROMPT = "a b c d e "


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["profile", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def text_model(model_folder: Path) -> TextModel:
    return load_text_model(model_folder)


def test_the_times_of_stages_are_those_of_generate(text_model: TextModel) -> None:
    """Added up they are its own numbers, of the same marks: no time is measured twice, or left out."""
    made, found = Profile(text_model.model), list[Generation]()
    with made.profiler.taken():
        for prompt in (PROMPT, "x"):
            found.append(command._generated(text_model, prompt, Sampling(9, do_sample=False), made, lambda: None))
    phases = made.report.phases
    assert list(phases) == ["prompt", "decode"]
    assert phases["prompt"].total == pytest.approx(sum(each.prompt_seconds for each in found), rel=1e-9)
    assert phases["decode"].total == pytest.approx(sum(each.new_seconds for each in found), rel=1e-9)
    assert [phase.passes for phase in phases.values()] == [2, 16]
    assert phases["prompt"].tokens == sum(each.prompt_tokens for each in found)


def test_loads_are_those_of_a_recorded_run(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    options = ("--max-new-tokens", 9)
    arguments = ("generate", PROMPT, "--model", model_folder, *options, "--no-do-sample", "--trace", path)
    assert CliRunner().invoke(app, [*map(str, arguments)]).exit_code == 0
    trace = read_trace(path)
    found = json.loads(run(model_folder, "--prompt", PROMPT, *options, "--json").stdout)
    for index, layer in enumerate(found["layers"]):
        ids = trace.layer_ids(index)
        assert layer["loads"] == [int((ids == expert).sum()) for expert in range(4)]
        assert (layer["tokens"], layer["dropped"]) == (len(ids), 0)
    assert found["phases"]["decode"]["passes"] == 8
    assert found["phases"]["prompt"]["total_seconds"] == pytest.approx(
        sum(found["phases"]["prompt"]["seconds"].values())
    )
    assert found["model"] == str(model_folder)


def test_table_picture_and_trace(model_folder: Path, tmp_path: Path) -> None:
    targets = ("--plot", tmp_path / "p.png", "--chrome-trace", tmp_path / "t.json")
    out = run(model_folder, "--prompt", PROMPT, "--prompt", "x", "--max-new-tokens", 5, *targets).stdout
    lines = out.splitlines()
    assert lines[0] == f"model: {model_folder}; 2 expert layers (4 experts, top 2)"
    assert lines[1].startswith("prompt: 2 passes, ")
    assert max(map(len, lines[1:])) <= 80
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_within_a_memory_budget(model_folder: Path) -> None:
    """Of each token the experts of both layers are looked up; a prompt counts as one from 33 tokens on."""
    options = ("--memory", "8KB", "--max-new-tokens", 5, "--json")
    found = json.loads(run(model_folder, "--prompt", 4 * PROMPT, *options).stdout)
    memory = found["memory"]
    assert memory["decode"]["lookups"] == 4 * 2 * 2
    used = [sum(load > 0 for load in layer["loads"]) for layer in found["layers"]]
    assert 4 <= memory["prompt"]["lookups"] <= sum(used)
    assert memory["bytes_from_files"] > 0
    out = run(model_folder, "--prompt", 4 * PROMPT, *options[:-1]).stdout
    assert re.search(r"memory, decode: [\d.]+% of 16 lookups hit", out)


def test_memory_is_what_was_counted_inside(model_folder: Path) -> None:
    """Not what the model did after the profile."""
    model, ids = moestro.load(model_folder, memory="8KB"), torch.arange(2)[None]
    with torch.no_grad(), moestro.profile(model) as p:
        model(ids)
    before = p.report.memory
    with torch.no_grad():
        model(ids)
    assert before is not None
    assert before["decode"]["lookups"] > 0
    assert p.report.memory == before


def test_the_first_reading_of_a_prompt_is_no_part_of_it(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def watched(text_model: TextModel, prompt: str, sampling: Sampling, **options: object) -> Generation:
        asked.append(sampling.max_new_tokens)
        return generate(text_model, prompt, sampling, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("moestro.hf.generate.generate", watched)
    run(model_folder, "--prompt", "x", "--max-new-tokens", 5)
    assert asked == [2, 5]


def test_progress_in_words_where_it_takes_long(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "EVERY", 0.0)
    result = run(model_folder, "--prompt", "x", "--max-new-tokens", 3)
    assert "token 1 of at most 3" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--prompt", ""),
        ("--prompt", "x", "--max-new-tokens", 0),
        ("--prompt", "x", "--max-new-tokens", 1000),
        ("--prompt", "x", "--plot", "p.gif"),
        ("--prompt", "x", "--chrome-trace", "no/such/folder.json"),
        ("--file", "no such file"),
        ("--prompt", "x", "--strategy", "none"),
        ("--prompt", "x", "--chat"),
    ],
    ids=lambda a: " ".join(map(str, a)),
)
def test_what_is_refused(model_folder: Path, arguments: tuple[object, ...]) -> None:
    result = run(model_folder, *arguments, code=2)
    assert result.stderr.count("\n") == 1
    assert FOUR_PARTS.match(result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize("fault", ["absent", "dense"])
def test_models_that_are_refused(broken: Callable[[str], str], fault: str) -> None:
    result = run(broken(fault), "--prompt", "x", code=2)
    assert result.stderr.count("\n") == 1


def test_help_has_an_example() -> None:
    assert "moestro profile --prompt" in " ".join(run("--help").stdout.split())
