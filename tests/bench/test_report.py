from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from moestro import machine
from moestro.bench import Report, Row
from moestro.bench.plot import _styles, roofline
from moestro.bench.report import machine_line, tables, verdict
from moestro.errors import InvalidInputError
from moestro.machine import Roof
from page import markdown

ROW = Row(
    layer="olmoe",
    dtype="float32",
    bits=32,
    num_tokens=1,
    variant="moestro",
    format="float32",
    kind="moestro",
    status="ok",
    reason=None,
    hidden_size=2048,
    intermediate_size=1024,
    num_experts=60,
    published_num_experts=64,
    top_k=8,
    active_experts=8,
    flop_per_byte=0.5,
    samples=10,
    microseconds=12345.6,
    gigabytes_per_second=16.26,
    gigaflops=8.13,
    roof_share=0.79,
    bandwidth_share=0.81,
    peak="fma",
    peak_share=0.03,
    error=3e-7,
)
NOTHING = {
    "microseconds": None,
    "gigabytes_per_second": None,
    "gigaflops": None,
    "roof_share": None,
    "bandwidth_share": None,
    "peak_share": None,
    "samples": 0,
    "error": None,
}


def test_quartiles_far_apart_make_no_ratio() -> None:
    close = replace(ROW, ratio=1.2, ratio_low=1.0, ratio_high=1.5)
    assert verdict(close) == "1.20x (1.00-1.50)"
    assert verdict(replace(close, ratio_high=1.51)) == "unsteady (1.00-1.51)"


@pytest.fixture
def report() -> Report:
    many = replace(ROW, num_tokens=128, flop_per_byte=8.0, gigaflops=150.0)
    rows = [
        ROW,
        replace(ROW, variant="eager", kind="peer", ratio=1.26, ratio_low=1.197, ratio_high=1.3, gigaflops=6.0),
        replace(ROW, variant="batched_mm", kind="peer", status="skipped", reason="needs 9 GB", **NOTHING),
        many,
        replace(many, variant="eager", kind="peer", status="wrong output", reason="worst error 2", **NOTHING),
        replace(many, variant="batched_mm", kind="peer", status="skipped", reason="needs 9 GB", **NOTHING),
        replace(ROW, dtype="bfloat16", bits=16, status="wrong output", reason="worst error 3", **NOTHING),
        replace(ROW, dtype="bfloat16", bits=16, variant="eager", kind="peer", gigaflops=6.0),
    ]
    return Report(
        command="moestro bench layer",
        date="2026-01-02T03:04:05+00:00",
        machine={**machine.describe(), "device": "cpu"},
        versions={"torch": "2.13.0"},
        roofs={"float32": Roof(20e9, 160e9), "bfloat16": Roof(20e9, 1e12)},
        peaks={"fma": 2.5e11, "vnni": 1e12, "amx-bf16": 3.4e12},
        notes={"run": ["deepgemm skipped: no GPU"], "olmoe float32": ["60 of 64 experts: the rest does not fit"]},
        rows=rows,
    )


def test_tables(report: Report) -> None:
    console = Console(width=150, file=io.StringIO())
    for table in tables(report):
        console.print(table)
    text = console.file.getvalue()
    assert "olmoe float32 (H 2048, I 1024, E 60 of 64, K 8)" in text
    assert "60 of 64 experts: the rest does not fit" in text
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert ["1", "moestro", "12,346", "16.3", "81%", "8.1", "3%", "-"] in lines
    assert ["1", "eager", "12,346", "16.3", "81%", "6.0", "3%", "1.26x (1.20-1.30)"] in lines
    assert ["1", "batched_mm", *"-----", "skipped"] in lines
    assert ["128", "eager", *"-----", "wrong output"] in lines
    assert "T=1, 128: batched_mm skipped: needs 9 GB" in text
    assert "T=128: eager wrong output: worst error 2" in text
    assert "T=1: no ratio without it" in text


def test_tables_fit_a_narrow_terminal(report: Report) -> None:
    report.rows[1] = replace(report.rows[1], variant="torch-grouped_mm", ratio=16.5, ratio_low=16.3, ratio_high=16.7)
    console = Console(width=80, file=io.StringIO())
    console.print(tables(report)[0])
    assert "torch-grouped_mm" in console.file.getvalue()
    assert "16.50x (16.30-16.70)" in console.file.getvalue()


def test_markdown(report: Report) -> None:
    text = markdown(report)
    assert text.startswith("# Layer benchmark, 2026-01-02\n")
    assert "- float32 roof: 20.0 GB/s, 160 GFLOP/s, balance 8 FLOP per byte" in text
    assert "- peaks from registers: fma 250, vnni 1,000, amx-bf16 3,400 GFLOP/s" in text
    assert "| T | moestro, us | GB/s | of bw | GFLOP/s | of peak | eager | batched_mm |" in text
    assert "| 1 | 12,346 | 16.3 | 81% | 8.1 | 3% | 1.26x (1.20-1.30) | skipped |" in text
    assert "| 128 | 12,346 | 16.3 | 81% | 150.0 | 3% | wrong output | skipped |" in text
    assert "- T=1, 128: batched_mm skipped: needs 9 GB" in text
    assert "- 60 of 64 experts: the rest does not fit" in text
    assert "`moestro bench layer`" in text
    assert text.count("- deepgemm skipped: no GPU") == 1
    widths = {len(line.split("|")) for line in text.split("## ")[1].splitlines() if line.startswith("|")}
    assert widths == {10}


@pytest.fixture
def quantised(report: Report) -> Report:
    ours = replace(ROW, dtype="bfloat16", bits=4, variant="moestro-mxfp4", format="mxfp4", error=0.21)
    report.rows = [
        ours,
        replace(ours, variant="moestro-nvfp4", format="nvfp4", ratio=1.1, ratio_low=1.0, ratio_high=1.2),
        replace(
            ours,
            variant="ggml-q4_K",
            format="q4_K",
            kind="peer",
            peak="vnni",
            peak_share=0.4,
            error=0.13,
            ratio=2.0,
            ratio_low=1.9,
            ratio_high=2.1,
        ),
        replace(ours, variant="late", kind="peer", status="wrong output", reason="far", **NOTHING),
    ]
    return report


def test_masked_features_are_told(report: Report) -> None:
    machine = {**report.machine, "features": ["avx2", "avx512f"], "masked_features": ["avx512f"]}
    machine.pop("torch_kernels", None)  # as in pages of older runs
    assert machine_line(machine).endswith(", avx2, avx512f, avx512f masked")
    capable = machine_line({**machine, "torch_kernels": "AVX2"})
    assert capable.endswith(", avx2, avx512f, avx512f masked, PyTorch's kernels AVX2")
    assert "masked" not in machine_line({**machine, "masked_features": []})


def test_quantised_weights_show_formats_and_errors(quantised: Report) -> None:
    text = markdown(quantised)
    assert "## olmoe 4 bits, x in bfloat16 (H 2048" in text
    assert "| T | variant | format | us | GB/s | of bw | GFLOP/s | of peak | error | time / moestro-mxfp4's |" in text
    assert "| 1 | moestro-mxfp4 | mxfp4 | 12,346 | 16.3 | 81% | 8.1 | 3% | 2.1e-01 | - |" in text
    assert "| 1 | ggml-q4_K | q4_K | 12,346 | 16.3 | 81% | 8.1 | 40% i8 | 1.3e-01 | 2.00x (1.90-2.10) |" in text
    assert "| 1 | late | mxfp4 | - | - | - | - | - | - | wrong output |" in text
    console = Console(width=120, file=io.StringIO())
    console.print(tables(quantised)[0])
    assert "2.1e-01" in console.file.getvalue()


def test_plot_of_many_variants(quantised: Report, tmp_path: Path) -> None:
    peer = quantised.rows[2]
    quantised.rows += [replace(peer, variant=f"peer {i}", gigaflops=10.0 + i) for i in range(14)]
    styles = _styles(quantised.rows)
    assert len({(s["color"], s["marker"]) for s in styles.values()}) == len(styles) == 17
    roofline(quantised, tmp_path / "roof.png")
    assert imread(tmp_path / "roof.png").shape[0] > 500


def test_a_place_without_a_panel_is_empty(report: Report, tmp_path: Path) -> None:
    report.rows.append(replace(ROW, bits=8, variant="moestro-int8", format="int8"))
    roofline(report, tmp_path / "roof.png")
    picture = imread(tmp_path / "roof.png")[:, :, :3]
    height, width = picture.shape[:2]
    last = picture[int(height * 0.56) : int(height * 0.84), int(width * 0.52) :]
    assert last.min() == 1.0


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_plot_is_written(report: Report, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"roof{ending}"
    roofline(report, path)
    if ending == ".png":
        picture = imread(path)
        assert picture.shape[0] > 500
        assert picture.shape[1] > 1500  # two panels side by side
        assert len({tuple(pixel) for pixel in picture[::7, ::7].reshape(-1, 4).tolist()}) > 5
    else:
        assert path.stat().st_size > 5000


def test_plot_refuses_what_it_cannot_draw(report: Report, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"needs a name ending in \.png, \.svg, \.pdf"):
        roofline(report, tmp_path / "roof.xyz")
    report.rows = [row for row in report.rows if row.status != "ok"]
    with pytest.raises(InvalidInputError, match="a report without times"):
        roofline(report, tmp_path / "roof.png")
