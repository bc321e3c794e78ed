from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moestro.errors import InvalidInputError
from operations import OpBenchmark, OpCase, markdown, run_op

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "topk": ((5, 12, 3),),
    "grouping": ((7, 5, 2, 4),),
    "expert_mlp": ((3, 24, 16, 6, 2),),
    "projection": ((3, 20, 24),),
    "attention": ((2, 6, 2, 9, 8),),
}


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("registry", "run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in ("registry", "run"):
        sys.modules.pop(name, None)


def test_every_operation_has_a_benchmark(benchmarks) -> None:
    ops = {path.parent.name for path in (BENCHMARKS.parent / "src/moestro/ops").glob("*/__init__.py")}
    assert set(benchmarks("registry").BENCHMARKS) == ops == set(SMALL)


@pytest.mark.parametrize("op", SMALL)
def test_benchmarks_of_operations_run_and_agree(benchmarks, op: str) -> None:
    rows = run_op(replace(benchmarks("registry").BENCHMARKS[op], shapes=SMALL[op]), seconds=1e-4)
    assert len(rows) >= 3
    assert {row.status for row in rows} == {"ok"}
    assert [row.ratio is None for row in rows] == [True, *[False] * (len(rows) - 1)]
    assert all(row.variant in markdown(rows) for row in rows)


def test_a_wrong_implementation_is_not_timed() -> None:
    right, wrong = (torch.tensor([1, 2]),), (torch.tensor([2, 1]),)
    timed: list[str] = []

    def make(n: int) -> OpCase:
        calls = {name: [lambda name=name: timed.append(name)] for name in ("good", "bad")}
        return OpCase(f"n={n}", calls, {"good": lambda: right, "bad": lambda: wrong}, right)

    rows = run_op(OpBenchmark("op", ((2,),), make), seconds=1e-5)
    assert [(row.variant, row.status) for row in rows] == [("good", "ok"), ("bad", "wrong output")]
    assert set(timed) == {"good"}
    with pytest.raises(InvalidInputError, match="seconds"):
        run_op(OpBenchmark("op", (), make), seconds=0)


def test_the_script_writes_dated_results(benchmarks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    registry, script = benchmarks("registry"), benchmarks("run")
    monkeypatch.setitem(registry.BENCHMARKS, "topk", replace(registry.BENCHMARKS["topk"], shapes=SMALL["topk"]))
    assert script.main(["--op", "topk", "--seconds", "0.0001", "--results", str(tmp_path)]) == 0
    written = sorted(path.name for path in tmp_path.iterdir())
    assert [name[10:] for name in written] == ["-op-topk.json", "-op-topk.md"]
    assert script.main(["--layers", "nothing", "--results", str(tmp_path)]) == 2
    assert "got layer 'nothing'" in capsys.readouterr().err


def test_the_script_measures_layers(
    benchmarks, tiny, known_roof, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    script = benchmarks("run")
    monkeypatch.setattr(script, "named", tiny)
    arguments = ["--layers", "olmoe", "--tokens", "1,3", "--seconds", "0.0001", "--results", str(tmp_path)]
    assert script.main(arguments) == 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".json", ".png"}
    assert "## olmoe bfloat16" in capsys.readouterr().out
