"""`moestro simulate`: table, JSON, picture and page, and one line for everything that cannot be simulated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from moestro.cli import app, simulate
from moestro.memory import LayerSize, Recorder
from moestro.parallel.simulate_report import COLUMNS

FOUR_PARTS = re.compile(r"\[\w+\] got .+; needs .+\. .+\.")


@pytest.fixture(autouse=True)
def short_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "HISTORY", 2000)


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_the_table() -> None:
    lines = run("--tokens", 256, "--dispatch", "dense,unicast,sparse").stdout.splitlines()
    assert lines[:3] == [
        "mesh: 4x8 ring with 12.5 GB/s and 1 us a hop, 32 ranks",
        "batch: zipf 0.8, 256 tokens, 256 experts, top-k 8, 14,336 bytes a row",
        "placed by the loads of 2,000 other tokens; slots: contiguous 256, balanced 288",
    ]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[:2] for row in rows] == [
        [p, d] for p in ("contiguous", "balanced") for d in ("dense", "unicast", "sparse")
    ]
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert float(rows[0][2]) > 2 > float(rows[3][2])


def test_json_picture_and_page(tmp_path: Path) -> None:
    options = ("--mesh", "4x2", "--experts", 20, "--top-k", 2, "--tokens", 64, "--redundant", 4, "--load", "uniform")
    files = ("--plot", tmp_path / "p.png", "--report", tmp_path / "p.md")
    found = json.loads(run(*options, *files, "--policy", "eplb", "--row-bytes", 64, "--json").stdout)
    assert found["batch"] == {
        "name": "uniform", "num_tokens": 64, "num_experts": 20, "top_k": 2, "row_bytes": 64, "history": 2000,
    }  # fmt: skip
    assert [(row["placement"], row["dispatch"], row["slots"]) for row in found["rows"]] == [
        ("eplb", "dense", 24),
        ("eplb", "sparse", 24),
    ]
    assert len(found["rows"][0]["simulation"]["pairs"]) == 8
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "| eplb | sparse |" in (tmp_path / "p.md").read_text()


def test_a_trace_is_run_after_its_first_half(tmp_path: Path) -> None:
    path = tmp_path / "trace.npy"
    np.save(path, np.array([[0, 1]] * 8 + [[2, 3]] * 6))
    options = ("--trace", path, "--mesh", "2", "--redundant", 0, "--policy", "contiguous", "--json")
    found = json.loads(run(*options).stdout)
    assert (found["batch"]["num_tokens"], found["batch"]["history"], found["batch"]["num_experts"]) == (7, 7, 4)
    assert found["rows"][0]["simulation"]["pairs"] == [2, 12]
    more = json.loads(run(*options, "--experts", 8).stdout)
    assert more["rows"][0]["simulation"]["pairs"] == [14, 0]


def test_a_layer_of_a_recorded_run(tmp_path: Path) -> None:
    recorder, size = Recorder("m"), LayerSize(6, 2, 1)
    for ids in ([[0, 1]] * 5, [[2, 3], [4, 5]], [[1, 0]]):
        recorder.add(0, size, np.array([[5, 4]]))
        recorder.add(1, size, np.array(ids))
    recorder.trace().write(tmp_path / "run.npz")
    options = ("--trace", tmp_path / "run.npz", "--mesh", "2", "--policy", "contiguous", "--json")
    found = json.loads(run(*options, "--trace-layer", 1).stdout)
    assert (found["batch"]["num_tokens"], found["batch"]["history"]) == (4, 4)
    assert found["rows"][0]["simulation"]["pairs"] == [5, 3]
    assert json.loads(run(*options).stdout)["batch"]["num_tokens"] == 2
    assert "got layer 2 of a trace of 2; needs 0 to 1" in run(*options, "--trace-layer", 2, code=2).stderr
    np.save(tmp_path / "ids.npy", np.array([[0, 1]] * 4))
    assert "got layer 1 of" in run("--trace", tmp_path / "ids.npy", "--trace-layer", 1, code=2).stderr


def test_one_rank() -> None:
    found = json.loads(run("--mesh", 1, "--experts", 8, "--tokens", 5, "--json").stdout)
    assert {(row["slots"], row["imbalance"], row["megabytes_sent"]) for row in found["rows"]} == {(8, 1.0, 0.0)}


def test_links_and_rates() -> None:
    fast, slow = (
        json.loads(
            run("--mesh", 4, "--tokens", 64, "--bandwidth", rate, "--hop", 0, "--links", "line", "--json").stdout
        )
        for rate in (10, 1)
    )
    assert slow["mesh"]["links"] == "line"
    times = [found["rows"][0]["dispatch_microseconds"] for found in (fast, slow)]
    assert times[1] == pytest.approx(10 * times[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--mesh", "4x"], "got '4x'; needs ROWSxCOLUMNS or ROWS"),
        (["--mesh", "0x4"], "got 0x4 ring"),
        (["--links", "star"], "needs 1 to 4096 rows and columns, ring, line or switch"),
        (["--bandwidth", "0"], "got 4x8 ring with 0 GB/s"),
        (["--hop", "-1"], "-1 us a hop; needs"),
        (["--experts", "0"], "needs at least one token, 1 <= top_k <= num_experts"),
        (["--experts", "4"], "num_experts=4, top_k=8"),
        (["--top-k", "0"], "top_k=0"),
        (["--tokens", "0"], "num_tokens=0"),
        (["--tokens", "-5"], "num_tokens=-5"),
        (["--seed", "-1"], "seed=-1"),
        (["--load", "pareto"], "got load 'pareto'; needs uniform, or zipf:EXPONENT"),
        (["--load", "zipf:much"], "got load 'zipf:much'"),
        (["--load", "zipf:nan"], "exponent=nan"),
        (["--policy", "best"], "got policies ['best']; needs some of contiguous, eplb, balanced"),
        (["--policy", ","], "got policies []"),
        (["--redundant", "-1"], "num_slots=255"),
        (["--policy", "eplb", "--redundant", "1"], "needs groups that divide the experts"),
        (["--groups", "3", "--nodes", "2"], "nodes that divide groups"),
        (["--nodes", "0"], "num_nodes=0"),
        (["--dispatch", "loose"], "dispatch='loose'; needs as many ranks, and one of dense, unicast, sparse"),
        (["--dispatch", ","], "dispatch [], 288 slots; needs 1 to 2147483648 bytes, a dispatch"),
        (["--row-bytes", "0"], "row_bytes=0"),
        (["--row-bytes", "99999999999999999999"], "row_bytes=99999999999999999999"),
        (["--mesh", "99999"], "got 99999x1 ring"),
        (["--bandwidth", "inf"], "got 4x8 ring with inf GB/s"),
        (["--hop", "nan"], "nan us a hop"),
        (["--tokens", "999999999"], "at most 268,435,456 pairs"),
        (["--experts", "99999999"], "and 1,048,576 experts"),
        (["--redundant", "99999999"], "at most 8192 slots"),
        (["--trace", "no.npy"], "got 'no.npy' (No such file or directory); needs a .npy or .json file with ids"),
        (["--plot", "a.xyz"], "got 'a.xyz'; needs a name ending in .png"),
        (["--report", "no/such/folder/a.md"], "needs a file that can be written"),
    ],
)
def test_bad_arguments_are_one_line_and_code_2(arguments: list[str], sentence: str) -> None:
    result = run(*arguments, code=2)
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert FOUR_PARTS.match(result.stderr.strip())
    assert result.stdout == ""


def test_a_trace_that_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text("[[0, 1]]")
    assert (
        "of one token; needs a recording of at least two tokens" in run("--trace", tmp_path / "one.json", code=2).stderr
    )
    (tmp_path / "two.json").write_text("[[0, 5], [1, 5]]")
    assert "got --tokens with" in run("--trace", tmp_path / "two.json", "--tokens", 3, code=2).stderr
    assert (
        "got --top-k --load --seed with"
        in run(*("--trace", tmp_path / "two.json", "--top-k", 8, "--load", "uniform", "--seed", 0), code=2).stderr
    )
    assert "some outside" in run("--trace", tmp_path / "two.json", "--experts", 4, "--mesh", 2, code=2).stderr
