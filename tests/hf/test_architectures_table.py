"""The command that prints the table."""

from __future__ import annotations

import json
import sys

import pytest

import architectures
from architectures import Row


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["architectures", *arguments])
    return architectures.main(), capsys.readouterr().out


def test_json(monkeypatch, capsys):
    code, out = run(monkeypatch, capsys, "mixtral", "vitpose_backbone", "--json")
    mixtral, vitpose = json.loads(out)
    assert code == 0
    assert mixtral["architecture"] == "mixtral"
    assert mixtral["seam"] == "interface"
    assert 0 <= mixtral["float32"] <= architectures.FLOAT32
    assert mixtral["generate"] is True
    assert mixtral["reason"] is None
    assert vitpose["float32"] is None
    assert "single linear projections" in vitpose["reason"]


def test_markdown(monkeypatch, capsys, tmp_path):
    page = tmp_path / "page.md"
    _, out = run(monkeypatch, capsys, "gpt_oss", "dbrx", "--markdown", str(page))
    assert page.read_text() == out.removesuffix("\n")
    assert "2 architectures served" in out
    assert "| gpt_oss | GptOssForCausalLM | interface | transposed, interleaved, biases, silu (alpha 1.702" in out
    assert "| dbrx | DbrxForCausalLM | adapter (DBRX) | three matrices over all experts |" in out


def test_fails_when_something_served_disagrees(monkeypatch, capsys):
    wrong = Row("mixtral", "M", "interface", float32=1e-3, bfloat16=1e-3, influence=0.5, generate=True, seed=0)
    monkeypatch.setattr(architectures, "rows", lambda names: iter([wrong]))
    code, _ = run(monkeypatch, capsys, "mixtral")
    assert code == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"float32": 1.1e-5},
        {"bfloat16": 2.1e-2},
        {"influence": 0.9e-2},
        {"generate": False},
        {"float32": None},
        {"seed": None},
        {"float32": float("inf")},
    ],
)
def test_a_row_agrees_only_if_everything_does(changed):
    right = {"float32": 1e-6, "bfloat16": 1e-2, "influence": 0.5, "generate": None, "seed": 0}
    assert Row("a", "A", **right).agrees
    assert not Row("a", "A", **(right | changed)).agrees
