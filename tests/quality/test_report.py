"""A report of quality as values, table, page and picture; and the stored one, which the docs show."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from moestro import machine
from moestro.errors import InvalidInputError
from moestro.formats import FORMATS
from moestro.quality.plot import quality_plot
from moestro.quality.report import COLUMNS, Layer, Model, QualityReport, Row, Text, cells, markdown, table
from source import ROOT

LAYERS = (Layer("a.experts", 0.0625, 0.01), Layer("b.experts", 0.1875, 0.03))


def row(format: str, search: str | None, change: float, divergence: float) -> Row:
    bits = 16.0 if format == "bfloat16" else 4.25
    return Row(
        format, search, "ok", None, "float32", "float", bits, int(100 * bits), 1.25 * (1 + change), 5.0, change,
        32.0 ** (1 + change), divergence, 4 * divergence, 0.955, 0.125, 0.02, LAYERS, 1.5,
    )  # fmt: skip


@pytest.fixture
def report() -> QualityReport:
    rows = [
        row("bfloat16", None, 0.0, 0.0),
        row("mxfp4", "nearest", 0.01, 2e-3),
        row("mxfp4", "mse", 0.005, 1e-3),
        Row("int4-g128", "nearest", "skipped", "got a; needs b"),
        Row("int4-g128", "mse", "skipped", "got a; needs b"),
        Row("fp4-g128", "mse", "skipped", "got a; needs b"),
    ]
    return QualityReport(
        command="moestro quality --all-formats",
        date="2026-01-02T03:04:05+00:00",
        machine={**machine.describe(), "device": "cpu"},
        versions={"torch": "2.13.0"},
        model=Model("bundled", "Qwen3MoeForCausalLM", 2, 256, 64, 16),
        text=Text("held-out standard library", 1, 200, 800, 1024, "00"),
        baseline=Row("bfloat16", None, "ok", None, "float32", "float", 16.0, 1600, 1.25, 5.0, None, 32.0),
        rows=rows,
    )


def test_cells(report: QualityReport) -> None:
    lines = cells(report)
    assert [len(line) for line in lines] == [len(COLUMNS)] * 4
    assert lines[0] == ("baseline", "", "16.00", "1.2500", "", "32.000", "", "", "", "", "")
    assert lines[2] == (
        *("mxfp4", "nearest", "4.25", "1.2625", "+1.000%", "33.128"),
        *("2.00e-03", "8.00e-03", "95.50%", "12.500%", "2.00%"),
    )


def test_json(report: QualityReport) -> None:
    found = json.loads(json.dumps(report.as_json()))
    assert found["baseline"]["bits_per_byte"] == pytest.approx(1.25)
    assert [row["status"] for row in found["rows"]] == ["ok"] * 3 + ["skipped"] * 3
    row = found["rows"][1]
    assert found["baseline"]["kl_mean"] is None
    assert (row["bits_per_weight"], row["kl_mean"], row["kl_p99"], row["top1_agreement"]) == (4.25, 2e-3, 8e-3, 0.955)
    assert (row["expert_error"], row["routing_changed"]) == (0.125, pytest.approx(0.02))
    assert row["layers"] == [
        {"path": "a.experts", "error": 0.0625, "changed": 0.01},
        {"path": "b.experts", "error": 0.1875, "changed": 0.03},
    ]
    assert found["rows"][3]["reason"] == "got a; needs b"
    assert {key for key, value in found["rows"][3].items() if value is not None} == {
        *("format", "search", "status", "reason")
    }


def test_table_and_page(report: QualityReport) -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(table(report))
    page = markdown(report)
    for line in cells(report):
        assert f"| {' | '.join(line)} |" in page
        for cell in line:
            assert cell in console.file.getvalue()  # type: ignore[attr-defined]
    assert "- int4-g128, fp4-g128 skipped: got a; needs b\n" in page
    assert "- text: held-out standard library: 200 tokens, 800 bytes, 1 document, context 1,024\n" in page
    assert "- command: `moestro quality --all-formats`\n" in page


@pytest.mark.unpoisoned
@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_the_picture(report: QualityReport, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"picture{ending}"
    quality_plot(report, path)
    if ending == ".png":
        pixels = imread(path)
        assert pixels.shape[1] > 1000
        assert len({tuple(pixel) for pixel in pixels[::4, ::4, :3].reshape(-1, 3).tolist()}) > 20
    elif ending == ".svg":
        assert path.read_text().count("<use") > 4


@pytest.mark.unpoisoned
def test_a_picture_without_numbers_or_divergence(report: QualityReport, tmp_path: Path) -> None:
    report.rows = report.rows[:1]
    quality_plot(report, tmp_path / "same.png")
    report.rows = []
    for name in ("nothing.png", "wrong.jpg"):
        with pytest.raises(InvalidInputError):
            quality_plot(report, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["same.png"]


STORED = ROOT / "benchmarks" / "results" / "2026-11-25-quality.json"


def test_the_docs_show_the_stored_table() -> None:
    lines = [line for line in STORED.with_suffix(".md").read_text().splitlines() if line.startswith("|")]
    page = (ROOT / "docs" / "reference" / "quality.md").read_text()
    assert "\n".join(lines) in page
    assert STORED.with_suffix(".png").is_file()


def test_the_stored_table_says_what_its_json_says() -> None:
    found = json.loads(STORED.read_text())
    lines = [line.split(" | ") for line in STORED.with_suffix(".md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in found["rows"] if row["status"] == "ok"]
    assert len(lines) == 2 + len(rows)
    for (name, search, bits, per_byte, _, perplexity, kl, p99, same, error, routing), row in zip(
        lines[2:], rows, strict=True
    ):
        assert (name, search) == (f"| {row['format']}", row["search"] or "")
        assert (bits, per_byte) == (f"{row['bits_per_weight']:.2f}", f"{row['bits_per_byte']:.4f}")
        assert (perplexity, kl, p99) == tuple(
            form.format(row[key])
            for form, key in (("{:.3f}", "perplexity"), ("{:.2e}", "kl_mean"), ("{:.2e}", "kl_p99"))
        )
        assert (same, error) == (f"{row['top1_agreement']:.2%}", f"{row['expert_error']:.3%}")
        assert routing == f"{row['routing_changed']:.2%} |"


def test_the_stored_run_is_of_the_bundled_model_in_every_format() -> None:
    found = json.loads(STORED.read_text())
    assert (found["model"]["name"], found["text"]["name"]) == ("bundled", "held-out standard library")
    assert found["text"]["num_tokens"] >= 30_000
    searched = {(row["format"], row["search"]) for row in found["rows"]}
    wanted = {f for f, form in FORMATS.items() if form.bits <= 32}
    assert searched == {(f, s) for f in wanted for s in ((None,) if FORMATS[f].is_dense else ("nearest", "mse"))}
