"""`moestro bench scale` and `moestro bench model`: what they print and write, and what they refuse in one line."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from documents import check_document
from moestro import machine
from moestro.bench import layers, model
from moestro.cli import app
from moestro.machine import Roof

FOUR_PARTS = re.compile(r"\[[\w ]+\] got .+; needs .+\. .+\.")
FAKE = {
    "prompt_seconds": 0.5,
    "decode_seconds": 0.01,
    "peak_bytes": 7_000_000,
    "stages": {"prompt": {"experts": 0.3, "other": 0.1}, "decode": {"experts": 0.009, "outside": 0.0}},
    "step_bytes": 10_000_000,
    "threads": 2,
    "dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measure", lambda dtype, device="cpu": Roof(1e10, 1e11))
    monkeypatch.setattr(machine, "peaks", lambda: {"fma": 2e11, "vnni": 8e11})
    sizes = {"hidden_size": 24, "intermediate_size": 16, "num_experts": 6, "top_k": 3}
    monkeypatch.setitem(layers.LAYERS, "olmoe", replace(layers.LAYERS["olmoe"], **sizes))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that are found what `FAKE` says, or refused where a format is."""
    program = (
        "import json, sys; case = json.loads(sys.argv[-1]); "
        "refused = {'error': 'InvalidInputError', 'text': '[load] got it; needs less. Change it.'}; "
        f"print(json.dumps(refused if case['format'] == 'int8' else {FAKE!r}))"
    )
    monkeypatch.setattr(model, "COMMAND", (sys.executable, "-ISE", "-c", program))


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def scale(*arguments: object, code: int = 0) -> Result:
    return run("scale", "--seconds-per-point", "0.0001", *arguments, code=code)


def test_scale_writes_a_table_a_document_and_a_picture(tmp_path: Path) -> None:
    found, picture = tmp_path / "found.json", tmp_path / "p.svg"
    axes = ("--experts", "3,6", "--top-k", "3", "--tokens", "1,2", "--at-tokens", 2)
    out = scale(*axes, "--dtype", "float32", "--json", found, "--plot", picture).stdout
    assert "over E: moestro, x in float32" in out
    assert picture.stat().st_size > 10_000
    document = json.loads(found.read_text())
    check_document(document)
    points = [(point["axis"], point["value"]) for point in document["points"]]
    assert points == [("num_experts", 3), ("num_experts", 6), ("top_k", 3), ("num_tokens", 1), ("num_tokens", 2)]


def test_scale_says_how_far_it_is_and_leaves_stdout_to_json() -> None:
    result = scale("--experts", "6", "--top-k", "3", "--tokens", "2", "--at-tokens", 2, "--json", "-")
    check_document(json.loads(result.stdout))
    assert result.stderr.splitlines()[:2] == ["measuring the roof", "point 1 of 1: olmoe E=6 K=3 T=2"]
    assert "over T: moestro" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--layer", "gpt5"], "[bench scale] got layer 'gpt5'; needs one of olmoe, "),
        (["--top-k", "7"], "[bench scale] got top_k 7 of 6 experts"),
        (["--experts", "2"], "[bench scale] got top_k 3 of 2 experts"),
        (["--tokens", "0"], "[bench scale] got tokens '0'; needs whole numbers of at least 1"),
        (["--experts", "-1"], "'-1'; needs whole numbers of at least 1"),
        (["--at-tokens", "0"], "needs numbers of at least 1"),
        (["--dtype", "float12"], "[bench scale] got dtype float12"),
        (["--formats", "int3"], "got format 'int3'"),
        (["--formats", ","], "0 variants"),
        (["--device", "abacus"], "[bench scale] got device 'abacus'"),
        (["--plot", "p.gif"], "needs a name ending in .png"),
        (["--json", "no/such/folder/a.json"], "needs a file that can be written"),
    ],
)
def test_what_scale_refuses(arguments: list[str], sentence: str) -> None:
    result = scale(*arguments, code=2)
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert FOUR_PARTS.match(result.stderr)
    assert result.stdout == ""


def test_a_model_of_a_folder(model_folder: Path, forked: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model, "COMMAND", (*shlex.split(forked)[:-1], "moestro.hf.timed"))
    path = tmp_path / "found.json"
    run("model", model_folder, "--prompt-tokens", 5, "--new-tokens", 4, "--json", path)
    found = json.loads(path.read_text())
    check_document(found)
    (point,) = found["points"]
    assert (point["batch"], point["projections"], point["status"]) == (1, "auto", "ok")
    assert point["decode_tokens_per_second"] == pytest.approx(1 / point["decode_seconds"])
    assert point["roof_tokens_per_second"] == pytest.approx(1e10 / point["step_bytes"])
    assert point["stages.decode.experts"] > 0


@pytest.mark.usefixtures("fake")
def test_every_combination_is_a_case_under_the_roof(model_folder: Path) -> None:
    options = ("--format", "stored,int8", "--batch", "1,8", "--memory", "none", "--prompt-tokens", "16")
    result = run("model", model_folder, *options, "--json", "-")
    found = json.loads(result.stdout)
    check_document(found)
    assert [(p["format"], p["batch"], p["status"]) for p in found["points"]] == [
        (None, 1, "ok"),
        (None, 8, "ok"),
        ("int8", 1, "skipped"),
        ("int8", 8, "skipped"),
    ]
    assert found["points"][1]["roof_tokens_per_second"] == pytest.approx(8 * 1e10 / 1e7)
    assert found["points"][1]["roof_share"] == pytest.approx(8 / 0.01 / 8000)
    lines = result.stderr.splitlines()
    assert "every case: memory none, projections auto, prompt tokens 16, new tokens 32" in lines
    assert "format int8, batch 1: [load] got it; needs less. Change it." in lines
    assert "format stored, batch 8, decode, 9.00 ms profiled: experts 100%" in lines
    assert "point 1 of 4: format stored, batch 1" in lines
    assert max(map(len, map(str.rstrip, lines[5:]))) <= 80


@pytest.mark.usefixtures("fake")
def test_a_model_whose_every_case_is_refused(model_folder: Path) -> None:
    result = run("model", model_folder, "--format", "int8", "--batch", "1,2", code=2)
    assert result.stderr.splitlines()[-1] == "[load] got it; needs less. Change it."
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--batch", "0"),
        ("--batch", "x"),
        ("--batch", ","),
        ("--prompt-tokens", "0"),
        ("--new-tokens", "2"),
        ("--memory", "much"),
        ("--json", "no/such/folder/a.json"),
    ],
    ids=" ".join,
)
def test_what_model_refuses(model_folder: Path, arguments: tuple[str, ...]) -> None:
    result = run("model", model_folder, *arguments, code=2)
    assert result.stderr.count("\n") == 1
    assert FOUR_PARTS.match(result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize("fault", ["absent", "empty"])
def test_a_folder_that_is_no_checkpoint(
    broken: Callable[[str], str], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before anything is measured."""
    monkeypatch.setattr(machine, "measure", lambda dtype: pytest.fail("measured"))
    result = run("model", broken(fault), code=2)
    assert result.stderr.count("\n") == 1
    assert FOUR_PARTS.match(result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["layer", "parallel", "scale", "model"])
def test_help_has_an_example(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert f"moestro bench {command} --" in run(command, "--help").stdout
