"""`benchmarks/predictions.py`: what is printed of predictions and of what was measured."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import predictions
from moestro import settings
from moestro.bench import make_layer
from moestro.ops import native
from moestro.ops.expert_mlp import cpu
from predictions import Point

pytestmark = pytest.mark.skipif(native.module is None, reason="the native engine is not there")


def point(seconds, *, predicted=1.0, chosen=True, tokens=1):
    return Point("olmoe", "dense", "float32", tokens, "cpu-one" if chosen else "torch", predicted, seconds, chosen)


def test_errors_are_shares_of_what_was_measured():
    assert [point(s).error for s in (0.5, 1.0, 2.0, None)] == [1.0, 0.0, -0.5, None]


def test_summary_says_where_the_other_was_faster():
    points = [
        *(point(1.0), point(0.99, chosen=False)),
        *(point(2.0, tokens=4), point(1.5, chosen=False, tokens=4)),
        *(point(4.0, tokens=8), point(None, chosen=False, tokens=8)),
    ]
    said = predictions.summary(points)
    assert said.startswith("of what is chosen, 3 points: off by 50% in the median, 75% at most")
    assert said.endswith("the other one was faster at 1 of them")


def test_both_are_predicted_and_timed(tiny, monkeypatch):
    layer = make_layer(tiny("olmoe"), torch.float32, 6)
    sets = [isa for isa in native.ISAS if isa.runs_here and isa.multiplies_floats and not isa.multiplies_bfloat16]
    best = f"cpu-{sets[0].name}"
    monkeypatch.setattr(cpu, "predictions", lambda *_: {best: 1e-3, "torch": 2e-3})
    found = [*predictions.measure(layer, ["dense"], (1, 3), 1e-4)]
    assert [(p.num_tokens, p.implementation, p.chosen) for p in found] == [
        (1, best, True), (1, "torch", False), (3, best, True), (3, "torch", False),
    ]  # fmt: skip
    assert all(p.seconds > 0 for p in found)
    assert predictions.table(found).row_count == 4


def test_nothing_is_printed_where_nothing_is_measured(tmp_path):
    target = tmp_path / "found.json"
    result = CliRunner().invoke(predictions.app, ["--json", str(target)])
    assert result.exit_code == 2
    assert "MOESTRO_MEASURE=0" in result.output
    assert not target.exists()


def test_what_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "MEASURES", True)
    monkeypatch.setattr(predictions, "measure", lambda *_: iter([point(2.0), point(1.0, chosen=False)]))
    monkeypatch.setattr(predictions, "make_layer", lambda *_: None)
    target = tmp_path / "found.json"
    result = CliRunner().invoke(predictions.app, ["--layers", "olmoe", "--json", str(target)])
    assert result.exit_code == 0, result.output
    assert "faster at 1 of them" in result.output
    assert [row["error"] for row in json.loads(target.read_text())["points"]] == [-0.5, 0.0]
