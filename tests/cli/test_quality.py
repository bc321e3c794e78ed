"""`moestro quality`: table, JSON, picture and page, and one line for everything that cannot be measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from moestro.cli import app
from moestro.cli.progress import bar
from moestro.quality.report import COLUMNS

TEXT = "def f(n):\n    return n\n" * 8
FOUR_PARTS = re.compile(r"\[[\w. ]+\] got .+; needs .+\. .+\.")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["quality", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_the_table(model_folder: Path, text: Path) -> None:
    result = run(model_folder, "--format", "int8", "--format", "bf16", "--text", text)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"model: {model_folder} (Qwen3MoeForCausalLM, 2 expert layers, H 16, I 8, E 4)")
    assert lines[1].startswith(f"text: {text}: ")
    assert lines[2] == "baseline: experts in float32, computed in float32; variants computed in float32"
    upper, lower = ([cell.strip() for cell in line.split("┃")[1:-1]] for line in lines[4:6])
    header = [f"{a}{'' if a.endswith('/') else ' '}{b}".strip() for a, b in zip(upper, lower, strict=True)]
    assert tuple(header) == COLUMNS
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[:2] for row in rows] == [["baseline", ""], ["int8", "nearest"], ["bfloat16", ""]]


def test_a_narrow_terminal_cuts_no_digits(model_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    result = run(model_folder, "--format", "fp8-e4m3-channel", "--text", text)
    assert "│fp8-e4m3-channel│nearest│" in result.stdout
    assert "…" not in result.stdout


def test_json_picture_and_page(model_folder: Path, text: Path, tmp_path: Path) -> None:
    more = ["--text", text, "--search", "mse", "--plot", tmp_path / "p.png", "--report", tmp_path / "p.md", "--json"]
    found = json.loads(run(model_folder, "--format", "fp8-e4m3-tensor", *more).stdout)
    (row,) = found["rows"]
    assert (row["format"], row["search"], row["status"]) == ("fp8-e4m3-tensor", "mse", "ok")
    assert found["model"]["num_layers"] == len(row["layers"]) == 2
    assert found["text"]["num_bytes"] == len(TEXT) - len("def")
    assert row["expert_error"] == pytest.approx(sum(layer["error"] for layer in row["layers"]) / 2)
    assert f"| fp8-e4m3-tensor | mse | {row['bits_per_weight']:.2f} |" in (tmp_path / "p.md").read_text()
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_all_formats_says_what_does_not_fit(model_folder: Path, text: Path) -> None:
    """Rows of 16 and of 8 weights hold no group of 32."""
    result = run(model_folder, "--all-formats", "--text", text, "--tokens", 5, "--against", "bf16")
    skipped = [line for line in result.stdout.splitlines() if " skipped: " in line]
    assert "int4-g32, int4-g32-zp, mxfp4, fp4-g32 skipped: got a matrix of 16 x 16; needs rows whose " in skipped[0]
    assert "baseline: experts in bfloat16, computed in float32" in result.stdout
    assert "5 tokens" in result.stdout


def test_dtype(model_folder: Path, text: Path) -> None:
    found = json.loads(run(model_folder, "--format", "bf16", "--text", text, "--dtype", "bfloat16", "--json").stdout)
    assert (found["baseline"]["dtype"], found["rows"][0]["dtype"]) == ("float32", "bfloat16")
    assert found["rows"][0]["kl_mean"] > 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([], "got no format"),
        (["--format", "nope"], "got format 'nope'"),
        (["--format", "mxfp4"], "multiple of 32"),
        (["--format", "int8", "--search", "best"], "search 'best'"),
        (["--format", "int8", "--against", "nope"], "got format 'nope'"),
        (["--format", "int8", "--against", "mxfp4"], "multiple of 32"),
        (["--format", "int8", "--dtype", "int8"], "dtype 'int8'"),
        (["--format", "int8", "--device", "nowhere"], "device 'nowhere'"),
        (["--format", "int8", "--tokens", "-1"], "tokens=-1"),
        (["--format", "int8", "--text", "no-such-file"], "'no-such-file' (No such file or directory)"),
        (["--format", "int8", "--text", "."], "'.' (Is a directory)"),
        (["--format", "int8", "--plot", "x.jpg"], "'x.jpg'"),
        (["--format", "int8", "--plot", "no/such/folder/x.png"], "'no/such/folder/x.png' (No such file or directory)"),
        (["--format", "int8", "--report", "."], "'.' (Is a directory)"),
    ],
)
def test_refused(model_folder: Path, text: Path, more: list[str], says: str) -> None:
    chosen = [] if "--text" in more else ["--text", str(text)]
    refused(run(model_folder, *chosen, *more, code=2), says)


def refused(result: Result, says: str) -> None:
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert FOUR_PARTS.fullmatch(line), line
    assert says in line


@pytest.mark.parametrize(("data", "says"), [(b"", "which is empty"), (b"x", "no token"), (b"\xff", "is no UTF-8")])
def test_a_text_that_cannot_be_read(model_folder: Path, tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "bad.txt").write_bytes(data)
    refused(run(model_folder, "--format", "int8", "--text", tmp_path / "bad.txt", code=2), says)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("absent", "where there is no folder"),
        ("empty", "holds no config.json"),
        ("no tokenizer", "without a tokenizer"),
        ("no weights", "needs "),
        ("cut", "needs "),
        ("missing weight", "model.norm.weight"),
        ("dense", "a dense model"),
        ("unknown", "no_such_architecture"),
    ],
)
def test_a_model_that_cannot_be_measured(broken: Callable[[str], str], text: Path, fault: str, says: str) -> None:
    refused(run(broken(fault), "--format", "int8", "--text", text, code=2), says)


def test_a_page_that_cannot_be_written_costs_no_result(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    target = tmp_path / "x.md"
    result = run(model_folder, "--format", "int8", "--text", text, "--tokens", 3, "--report", target, code=2)
    assert "int8" in result.stdout
    assert FOUR_PARTS.fullmatch(result.stderr.strip())
    assert f"{target} (No space left on device)" in result.stderr


def test_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)
    with bar("loading") as on_window:
        on_window("mxfp4 nearest", 3, 9)
    shown = capsys.readouterr()
    assert "mxfp4 nearest" in shown.err
    assert "3/9" in shown.err
    assert "left" in shown.err
    assert shown.out == ""
    with bar("loading", shown=False) as on_window:
        on_window("x", 1, 2)
    assert capsys.readouterr().err == ""
