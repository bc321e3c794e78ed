"""The tables of docs/benchmarks.md from stored results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from moestro.bench.schema import SCHEMA, flat
from source import ROOT

ROW = {"layer": "olmoe", "dtype": "bfloat16", "bits": 4, "num_tokens": 1, "status": "ok", "kind": "peer", "ratio": None}


@pytest.fixture(scope="module")
def summary() -> ModuleType:
    spec = importlib.util.spec_from_file_location("summary", ROOT / "benchmarks" / "summary.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, name: str, *rows: dict) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"rows": [{**ROW, **row} for row in rows]}))


def ours(name: str, **more: object) -> dict:
    return {"variant": name, "kind": "moestro", **more}


def peer(name: str, mxfp4: float, nvfp4: float, **more: object) -> dict:
    return {"variant": name, "ratio": mxfp4, "ratios": {"moestro-mxfp4": mxfp4, "moestro-nvfp4": nvfp4}, **more}


def test_every_format_against_the_fastest_peer_of_its_bits(summary: ModuleType, tmp_path: Path) -> None:
    both = (ours("moestro-mxfp4"), ours("moestro-nvfp4"))
    write(
        tmp_path,
        "2026-01-01-a",
        *both,
        peer("slow", 3.0, 2.5),
        peer("fast", 1.5, 1.25),
        peer("cheat", 0.1, 0.1, status="wrong output"),
        peer("other bits", 0.2, 0.2, bits=8),
        peer("other layer", 0.2, 0.2, layer="mixtral"),
        ours("moestro", bits=16),
        {"variant": "eager", "bits": 16, "ratio": 2.0},
    )
    assert summary.against_best(tmp_path) == {
        ("olmoe", "mxfp4", "bfloat16"): {1: (1.5, "fast")},
        ("olmoe", "nvfp4", "bfloat16"): {1: (1.25, "fast")},
        ("olmoe", "bfloat16", "bfloat16"): {1: (2.0, "eager")},
    }
    write(tmp_path, "2026-01-02-a", *both, peer("fast", 1.75, 1.5))  # the latest counts
    table = summary.formats_table(tmp_path).splitlines()
    assert table[0] == "| layer | weights | x | T = 1 | T = 16 | T = 128 | T = 512 | T = 2048 |"
    assert table[2:] == [
        "| olmoe | bfloat16 | bfloat16 | 2.00x eager |  |  |  |  |",
        "| olmoe | mxfp4 | bfloat16 | 1.75x fast |  |  |  |  |",
        "| olmoe | nvfp4 | bfloat16 | 1.50x fast |  |  |  |  |",
    ]


def test_the_points_of_one_result_beside_peers_of_no_more_error(summary: ModuleType, tmp_path: Path) -> None:
    write(
        tmp_path,
        "a",
        ours("moestro-mxfp4", error=0.1, bandwidth_share=0.854),
        ours("moestro-nvfp4", error=0.2),
        ours("moestro-int4", status="wrong output", error=None),
        peer("rough", 0.8, 0.7, error=0.15),
        peer("near", 1.0, 0.9, error=0.11),
        peer("wrong", 0.1, 0.1, error=None, status="wrong output"),
        peer("shaky", 1.5, 0.5, error=0.2, ratio_low=0.1, ratio_high=0.9),
    )
    lines = summary.by_error(tmp_path / "a.json").splitlines()
    assert lines[2:] == [
        "| olmoe | bfloat16 | 4 | 1 | moestro-mxfp4 | 85% | 1.00x near | 0.80x rough |",
        "| olmoe | bfloat16 | 4 | 1 | moestro-nvfp4 |  | 0.50x shaky, unsteady |  |",
    ]
    write(tmp_path, "b", ours("moestro-mxfp4", error=0.1), peer("rough", 0.8, 0.7, error=0.15))
    assert summary.by_error(tmp_path / "b.json").splitlines()[2].endswith("|  | 0.80x rough |")
    assert summary.main([str(tmp_path / "b.json")]) == 0


@pytest.mark.parametrize(
    ("text", "said"), [(None, "No such file"), ("{", "is no result"), ('{"rows": []}', "no layers")]
)
def test_a_file_that_is_no_result_is_one_plain_line(summary: ModuleType, tmp_path: Path, capsys, text, said) -> None:
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    assert summary.main([str(tmp_path / "a.json")]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_what_moestro_has_no_time_for_has_no_number(summary: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "a", ours("moestro-mxfp4", status="wrong output"), {"variant": "fast", "ratio": None})
    assert summary.against_best(tmp_path) == {}


def test_short_calls_of_peers_with_other_threads_do_not_count(summary: ModuleType, tmp_path: Path) -> None:
    both = (ours("moestro-mxfp4"), ours("moestro-nvfp4"))
    few = (peer("ggml-q4_0", 1.1, 1.1), peer("ort-int4-g32", 1.2, 1.2), peer("vllm-int4", 1.5, 1.25))
    write(tmp_path, "a", *both, *few, *({**row, "num_tokens": 16} for row in (*both, *few)))
    found = summary.against_best(tmp_path)["olmoe", "mxfp4", "bfloat16"]
    assert found == {1: (1.5, "vllm-int4"), 16: (1.1, "ggml-q4_0")}


def test_stored_results_of_before_and_after_there_was_a_schema(summary: ModuleType, tmp_path: Path) -> None:
    """The same rows, as they are stored now, make the same tables."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    both = (ours("moestro-mxfp4", ratio=None), ours("moestro-nvfp4", ratio=1.5, ratios={"moestro-mxfp4": 1.5}))
    write(old, "a", *both, peer("fast", 1.5, 1.25), peer("slow", 3.0, 2.5))
    rows = json.loads((old / "a.json").read_text())["rows"]
    (new / "a.json").write_text(json.dumps({"schema": SCHEMA, "points": [flat(row) for row in rows]}))
    assert summary.against_best(old) == summary.against_best(new)
    assert summary.against_best(new)["olmoe", "nvfp4", "bfloat16"] == {1: (1.25, "fast")}
    assert len(summary.against_best(summary.RESULTS)) > 10


def test_where_the_fastest_peers_quartiles_are_far_apart_there_is_no_number(
    summary: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = {"variant": "eager", "bits": 16, "ratio": 1.1, "ratio_low": 0.9, "ratio_high": 1.6}
    other = {"variant": "grouped_mm", "bits": 16, "ratio": 2.0, "ratio_low": 1.9, "ratio_high": 2.1}
    line = ("olmoe", "bfloat16", "bfloat16")
    write(tmp_path, "a", ours("moestro", bits=16), {**eager, "ratio_high": 1.3}, other)
    assert summary.against_best(tmp_path) == {line: {1: (1.1, "eager")}}
    write(tmp_path, "b", ours("moestro", bits=16), eager, other)  # the latest counts, and says nothing
    assert summary.against_best(tmp_path) == {line: {}}
    found = list(summary.points(tmp_path))
    monkeypatch.setattr(summary, "points", lambda: found[:1])
    assert summary.best_ratios("bfloat16") == {("olmoe", 1): 1.1}
    monkeypatch.setattr(summary, "points", lambda: found)
    assert summary.best_ratios("bfloat16") == {}
