"""Traces, comparisons of placements, and what is printed, drawn and written of them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from rich.console import Console

from moestro import Routing, machine
from moestro.errors import InvalidInputError
from moestro.parallel.simulate_links import Mesh
from moestro.parallel.simulate_plot import simulation_plot
from moestro.parallel.simulate_report import (
    COLUMNS,
    DISPATCHES,
    POLICIES,
    Batch,
    SimulationReport,
    cells,
    compare,
    headline,
    markdown,
    placements,
    table,
)
from moestro.parallel.simulate_traces import read_trace, zipf_ids
from moestro.routing import expert_counts


def loads_of(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    return expert_counts(Routing(ids, ids.float()), num_experts)


def test_tokens_draw_no_expert_twice() -> None:
    for exponent in (0.0, 0.8, 2.0):
        ids = zipf_ids(500, 12, 6, exponent).sort(-1).values
        assert ids.min() >= 0
        assert ids.max() < 12
        assert (ids.diff() > 0).all()
    assert zipf_ids(3, 4, 4, 3.0).sort(-1).values.tolist() == [[0, 1, 2, 3]] * 3


def test_experts_are_as_likely_as_asked() -> None:
    loads = loads_of(zipf_ids(200_000, 16, 1, 1.0), 16).double().sort(descending=True).values
    expected = 1 / torch.arange(1, 17.0, dtype=torch.float64)
    assert (loads / loads.sum() / (expected / expected.sum())).sub(1).abs().max() < 0.05
    even = loads_of(zipf_ids(200_000, 16, 2), 16).double()
    assert (even / even.mean()).sub(1).abs().max() < 0.05


def test_an_exponent_that_would_never_end() -> None:
    with pytest.raises(InvalidInputError, match="got top_k=8 with exponent=20"):
        zipf_ids(4, 256, 8, 20.0)


def test_seeds() -> None:
    assert torch.equal(zipf_ids(50, 8, 2, 1.0, seed=3), zipf_ids(50, 8, 2, 1.0, seed=3))
    first, second = (loads_of(zipf_ids(5000, 8, 2, 1.0, seed), 8) for seed in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first.argsort(), second.argsort())  # other tokens, the same popular experts


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_tokens", "exponent"), [(256, 32, 65_536, 0.8), (2560, 320, 327_680, 0.5)]
)
def test_an_eighth_more_slots_level_tokens_that_were_not_measured(
    num_experts: int, num_ranks: int, num_tokens: int, exponent: float
) -> None:
    """From 3 to 4 times the mean to 1.05 times, with 12.5 % redundancy and every token choosing its own replica."""
    before, ids = (zipf_ids(num_tokens, num_experts, 8, exponent, seed) for seed in (1, 0))
    loads, slots = loads_of(before, num_experts), num_experts * 9 // 8
    placed = placements(["contiguous", "balanced"], loads, num_ranks, slots)
    naive, balanced = compare(ids, Mesh(num_ranks, links="switch"), placed, ["dense"], 64)
    assert 3.0 <= naive.imbalance <= 4.0
    assert balanced.imbalance <= 1.05
    assert balanced.experts_microseconds < naive.experts_microseconds / 2.5
    assert (naive.slots, balanced.slots) == (num_experts, slots)


@pytest.mark.parametrize("name", ["t.npy", "t.json"])
def test_a_trace_comes_back(name: str, tmp_path: Path) -> None:
    ids = zipf_ids(7, 5, 2, 1.0)
    ids[0, 1] = -1
    path = tmp_path / name
    if name == "t.npy":
        np.save(path, ids.int().numpy())
    else:
        path.write_text(json.dumps(ids.tolist()))
    assert torch.equal(read_trace(path), ids)


BAD = {
    "absent.npy": None,
    "text.npy": b"no array",
    "floats.json": b"[[0.5, 1.0]]",
    "flat.json": b"[1, 2]",
    "ragged.json": b"[[1, 2], [3]]",
    "empty.json": b"[]",
    "negative.json": b"[[-2, 1]]",
    "large.json": b"[[99999999, 1]]",
    "huge.json": b"[[99999999999999999999999, 1]]",
    "cut.json": b"[[1, 2",
    "object.json": b'{"expert_ids": 3}',
    "binary.json": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_trace(name: str, tmp_path: Path) -> None:
    content = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"\[read_trace\] got .*; needs a \.npy or \.json file"):
        read_trace(tmp_path / name)


@pytest.fixture
def report() -> SimulationReport:
    ids, mesh = zipf_ids(96, 20, 3, 1.0), Mesh(4, 2)
    placed = placements(POLICIES, loads_of(ids, 20), 8, 24)
    return SimulationReport(
        command="moestro simulate",
        date="2026-01-02T03:04:05+00:00",
        machine={**machine.describe(), "device": "cpu"},
        versions={"torch": "2.13.0"},
        mesh=mesh,
        batch=Batch("zipf 1", 96, 20, 3, 64, 96),
        rows=compare(ids, mesh, placed, DISPATCHES, 64),
    )


def test_cells_and_table(report: SimulationReport) -> None:
    lines = cells(report)
    assert [line[:2] for line in lines] == [(policy, kind) for policy in POLICIES for kind in DISPATCHES]
    assert all(len(line) == len(COLUMNS) for line in lines)
    assert [line[-1] == "-" for line in lines] == [kind != "dense" for _ in POLICIES for kind in DISPATCHES]
    console = Console(file=io.StringIO(), width=160)
    console.print(*headline(report), table(report), sep="\n")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "mesh: 4x2 ring with 12.5 GB/s and 1 us a hop, 8 ranks" in text
    assert "slots: contiguous 20, eplb 24, balanced 24" in text
    assert f"│{lines[0][2].rjust(9)}│" in text


def test_numbers_of_a_row_are_the_simulations(report: SimulationReport) -> None:
    for row in report.rows:
        found = row.simulation
        parts = (
            row.columns_microseconds,
            row.dispatch_microseconds,
            row.experts_microseconds,
            row.combine_microseconds,
        )
        assert row.total_microseconds == pytest.approx(sum(parts))
        assert row.megabytes_sent == pytest.approx(2 * found.sent_rows * 64 / 1e6)
        assert row.imbalance == found.pairs.max() / found.pairs.mean()


def test_json_and_page(report: SimulationReport) -> None:
    plain = json.loads(json.dumps(report.as_json()))
    assert plain["mesh"] == {"rows": 4, "columns": 2, "links": "ring", "bytes_per_second": 12.5e9, "hop_seconds": 1e-6}
    row = plain["rows"][0]
    assert np.array(row["simulation"]["dispatch_bytes"]).shape == (2, 4, 2)
    assert sum(row["simulation"]["pairs"]) == 96 * 3
    page = markdown(report)
    assert page.startswith("# Simulation, 2026-01-02\n")
    assert f"| {' | '.join(cells(report)[3])} |" in page


def test_the_picture_shows_ranks_links_and_times(report: SimulationReport, tmp_path: Path) -> None:
    simulation_plot(report, tmp_path / "a.png")
    picture = imread(tmp_path / "a.png")
    assert picture.shape[1] == 14 * 160
    for third in np.array_split(picture[200:-80, :, :3], 3, axis=1):
        coloured = (third.max(2) - third.min(2) > 0.3).mean()
        assert coloured > 0.001
    with pytest.raises(InvalidInputError, match="needs a name ending in"):
        simulation_plot(report, tmp_path / "a.bmp")


@pytest.mark.parametrize(
    "call",
    [
        lambda: zipf_ids(0, 4, 2),
        lambda: zipf_ids(4, 4, 5),
        lambda: zipf_ids(4, 4, 0),
        lambda: zipf_ids(4, 4, 2, -1.0),
        lambda: zipf_ids(4, 4, 2, float("nan")),
        lambda: zipf_ids(4, 4, 2, 1.0, -1),
        lambda: placements(["best"], torch.ones(4), 2, 4),
        lambda: placements([], torch.ones(4), 2, 4),
        lambda: placements(["balanced"], torch.ones(4), 2, 3),
    ],
)
def test_what_is_refused(call) -> None:
    with pytest.raises(InvalidInputError, match=r"\[\w+\] got .*; needs .*\. .+"):
        call()
