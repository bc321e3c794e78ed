from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from documents import check_document
from moestro import machine
from moestro.bench import layers
from moestro.bench import peers as peers_module
from moestro.bench.peers import Variant, ours, outside
from moestro.cli.bench import QUICK_BUDGET, app
from moestro.errors import UnsupportedError
from moestro.machine import Roof


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measure", lambda dtype, device="cpu": Roof(1e10, 1e11))
    monkeypatch.setattr(machine, "peaks", lambda: {"fma": 2e11, "vnni": 8e11})
    for name, spec in layers.LAYERS.items():
        sizes = {"hidden_size": 24, "intermediate_size": 16, "num_experts": 6, "top_k": min(spec.top_k, 3)}
        monkeypatch.setitem(layers.LAYERS, name, replace(spec, **sizes))


def bench(*arguments: str):
    return CliRunner().invoke(app, ["layer", "--seconds-per-point", "0.0001", *arguments])


def test_tables_and_files(tmp_path: Path) -> None:
    found, picture = tmp_path / "found.json", tmp_path / "roof.png"
    result = bench("--layer", "olmoe,mixtral", "--tokens", "1,3", "--json", str(found), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "float32 roof: 10.0 GB/s, 100 GFLOP/s, balance 10 FLOP per byte" in result.output
    for title in ("olmoe float32", "olmoe bfloat16", "mixtral float32", "mixtral bfloat16"):
        assert f"{title} (H 24, I 16, E 6, K " in result.output
    assert picture.stat().st_size > 10_000
    document = json.loads(found.read_text())
    check_document(document)
    assert document["settings"]["tokens"] == [1, 3]
    assert document["roof"]["dtypes"]["float32"]["balance"] == 10
    rows = document["points"]
    assert {row["num_tokens"] for row in rows} == {1, 3}
    peers = {"eager", "batched_mm", "grouped_mm", "torch-grouped_mm"}
    assert {row["variant"] for row in rows} == {"moestro", "plain-read", *peers}


def test_the_help_says_what_is_taken_where_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = CliRunner().invoke(app, ["layer", "--help"]).output
    assert "else olmoe." in text
    assert "else 1,4,16,128,512,2048." in text


def test_json_alone_on_stdout() -> None:
    result = bench("--tokens", "2", "--dtype", "float32", "--peers", "none", "--variant", "grouped,auto", "--json", "-")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["points"]
    assert [row["variant"] for row in rows] == ["moestro-grouped", "moestro", "plain-read"]
    assert [row["ratio"] is None for row in rows] == [True, False, False]
    assert "olmoe float32" in result.stderr


def test_formats_are_compared_by_bits() -> None:
    arguments = ("--tokens", "2", "--dtype", "float32", "--formats", "int8,dense,fp8-e4m3-tensor", "--peers", "eager")
    result = bench(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["points"]
    assert [(row["bits"], row["variant"], row["format"]) for row in rows] == [
        (8, "moestro-int8", "int8"),
        (8, "moestro-fp8-e4m3-tensor", "fp8-e4m3-tensor"),
        (8, "plain-read-int8", "int8"),
        (8, "plain-read-fp8-e4m3-tensor", "fp8-e4m3-tensor"),
        (32, "moestro", "float32"),
        (32, "plain-read", "float32"),
        (32, "eager", "float32"),
    ]
    assert "olmoe 8 bits, x in float32 (H 24" in result.stderr


def test_all_layers_quick() -> None:
    result = CliRunner().invoke(
        app, ["layer", "--layer", "all", "--quick", "--seconds-per-point", "1e-4", "--peers", "none", "--json", "-"]
    )
    rows = json.loads(result.stdout)["points"]
    assert {row["layer"] for row in rows} == set(layers.LAYERS)
    assert {row["num_tokens"] for row in rows} == {1, 16, 128}


def test_quick_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def stop(plan, on_point):
        plans.append(plan)
        raise UnsupportedError("[bench layer] got enough")

    monkeypatch.setattr("moestro.bench.run", stop)
    for options in (["layer", "--quick"], ["layer"]):
        result = CliRunner().invoke(app, options)
        assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, "[bench layer] got enough")
    assert [plan.budget for plan in plans] == [QUICK_BUDGET, None]


def test_progress_is_said_in_words_where_no_terminal_is() -> None:
    result = bench("--tokens", "2", "--dtype", "float32", "--peers", "none")
    assert result.stderr.splitlines()[:2] == ["measuring the roof", "point 1 of 1: olmoe float32 T=2"]


def test_json_survives_a_failing_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(report, path):
        raise OSError("disk full")

    monkeypatch.setattr("moestro.bench.plot.roofline", fail)
    found = tmp_path / "found.json"
    result = bench("--tokens", "1", "--peers", "none", "--json", str(found), "--plot", str(tmp_path / "roof.png"))
    assert isinstance(result.exception, OSError)
    assert len(json.loads(found.read_text())["points"]) == 4  # in two dtypes moestro and a plain read


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_target_that_cannot_be_written_is_refused_before_the_run(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moestro.bench.run", lambda *args: pytest.fail("it ran"))
    (tmp_path / "folder.png").mkdir()
    result = bench(option, str(tmp_path / "folder.png"))
    assert result.exit_code == 2
    assert "(Is a directory); needs a file that can be written" in result.stderr
    missing = bench("--json", str(tmp_path / "new.json"), "--plot", str(tmp_path / "no" / "roof.png"))
    assert missing.exit_code == 2
    assert not (tmp_path / "new.json").exists()


def test_wrong_output_ends_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    good = ours("auto")
    cheat = Variant("cheat", good.refuses, lambda layer: lambda x, routing: lambda: torch.zeros_like(x), good.cost)
    monkeypatch.setitem(peers_module.PEERS, "cheat", cheat)
    result = bench("--tokens", "2", "--peers", "cheat", "--dtype", "float32")
    assert result.exit_code == 1
    assert "wrong output: cheat, olmoe float32 T=2" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--layer", "gpt5"], "got layer 'gpt5'; needs one of olmoe, "),
        (["--tokens", "0"], "got tokens '0'; needs whole numbers of at least 1"),
        (["--tokens", "-3"], "got tokens '-3'; needs whole numbers of at least 1"),
        (["--tokens", "1,two"], "got tokens 'two'; needs whole numbers of at least 1"),
        (["--tokens", ","], "0 token counts"),
        (["--dtype", "float12"], "got dtype float12; needs float32, bfloat16 or float16"),
        (["--dtype", "int8"], "got dtype torch.int8; needs float32, bfloat16 or float16"),
        (["--variant", "fastest"], "got strategy='fastest'"),
        (["--peers", "vllm"], "got peer 'vllm'; needs one of eager, "),
        (["--formats", "int3"], "got format 'int3'; needs one of float32, "),
        (["--formats", "bf16"], "got format 'bfloat16'; needs a quantised one, or 'dense'"),
        (["--device", "abacus"], "got device 'abacus'"),
        (["--seconds-per-point", "0"], "got seconds per point 0.0"),
        (["--plot", "roof.xyz"], "got 'roof.xyz'; needs a name ending in .png"),
        (["--json", "no/such/folder/a.json"], "(No such file or directory); needs a file that can be written"),
    ],
)
def test_bad_arguments_are_one_line_and_code_2(arguments: list[str], sentence: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(("peers", "lines"), [("all", 1), ("eager", 0)])
def test_one_line_where_there_are_no_peers_from_outside(
    peers: str, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "_folder", lambda: None)
    result = bench("--tokens", "1", "--dtype", "float32", "--peers", peers, "--json", "-")
    assert result.exit_code == 0, result.output
    notes = json.loads(result.stdout)["notes"]
    assert len([note for note in notes if "are in a checkout of moestro" in note]) == lines
    assert not any("vllm" in note for note in notes)
