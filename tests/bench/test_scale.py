"""How a layer grows: which points there are, the roof beside each, and memory that was measured."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from documents import check_document
from moestro import machine
from moestro.bench import LAYERS, Variant, ours
from moestro.bench import scale as module
from moestro.bench.memory import peak_of
from moestro.bench.peers import Numbers
from moestro.bench.scale import AXES, ScalePlan, ScaleReport, default_experts, default_top_k, scale
from moestro.bench.scale_report import headline, scale_plot, tables
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.machine import Roof
from tiny_layers import PEAKS, ROOF, tiny

SPEC = tiny("olmoe")


def plan(**changes: object) -> ScalePlan:
    asked = {"experts": (3, 6), "top_k": (1, 3, 6), "tokens": (1, 4), "variants": (ours("auto"),), "at_tokens": 4}
    return ScalePlan(SPEC, **{**asked, "seconds": 1e-4, "dtype": torch.float32, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def report() -> Iterator[ScaleReport]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "measure", lambda dtype, device="cpu": ROOF)
        patch.setattr(machine, "peaks", lambda: PEAKS)
        yield scale(plan(variants=(ours("auto"), ours("auto", "int8"))))


def test_one_is_varied_at_a_time(report: ScaleReport) -> None:
    found = [(p.axis, p.row.num_experts, p.row.top_k, p.row.num_tokens) for p in report.points[::2]]
    assert found == [
        ("num_experts", 3, 3, 4),
        ("num_experts", 6, 3, 4),
        ("top_k", 6, 1, 4),
        ("top_k", 6, 3, 4),
        ("top_k", 6, 6, 4),
        ("num_tokens", 6, 3, 1),
        ("num_tokens", 6, 3, 4),
    ]
    assert [p.row.variant for p in report.points] == ["moestro", "moestro-int8"] * 7
    assert {p.row.status for p in report.points} == {"ok"}
    own = [p for p in report.points if (p.row.num_experts, p.row.top_k, p.row.num_tokens) == (6, 3, 4)]
    assert len({p.row.microseconds for p in own}) == 2  # measured once, of each variant


def test_the_roof_is_that_of_bytes_and_of_operations(report: ScaleReport) -> None:
    for point in report.points:
        row, pairs = point.row, point.row.num_tokens * point.row.top_k
        each = {"moestro": 3 * 24 * 16 * 4}.get(row.variant, point.weight_bytes // row.num_experts)
        assert (point.weight_bytes, point.read_bytes) == (row.num_experts * each, row.active_experts * each)
        least = max(point.read_bytes / ROOF.bytes_per_second, 6 * 24 * 16 * pairs / ROOF.flops_per_second)
        assert point.roof_microseconds == pytest.approx(1e6 * least)
        assert row.roof_share == pytest.approx(point.roof_microseconds / row.microseconds)
        assert row.error < 0.1


@settings(max_examples=25)
@given(
    st.lists(st.integers(3, 300), max_size=4),
    st.lists(st.integers(1, 6), max_size=4),
    st.lists(st.integers(1, 10**6), min_size=1, max_size=4),
    st.integers(1, 10**6),
)
def test_every_case_is_the_layers_own_but_for_one(experts: list, top_k: list, tokens: list, at_tokens: int) -> None:
    asked = plan(experts=tuple(experts), top_k=tuple(top_k), tokens=tuple(tokens), at_tokens=at_tokens)
    own = {"num_experts": SPEC.num_experts, "top_k": SPEC.top_k, "num_tokens": at_tokens}
    given_values = {"num_experts": experts, "top_k": top_k, "num_tokens": tokens}
    cases = asked.cases()
    for axis, (spec, num_tokens) in cases:
        found = {"num_experts": spec.num_experts, "top_k": spec.top_k, "num_tokens": num_tokens}
        assert found == {**own, axis: found[axis]}
        assert replace(spec, num_experts=SPEC.num_experts, top_k=SPEC.top_k) == SPEC
    for axis, values in given_values.items():
        at = {"num_experts": 0, "top_k": 0}.get(axis)
        assert [getattr(c[0], axis) if at == 0 else c[1] for a, c in cases if a == axis] == values
    assert asked.num_different == len({case for _, case in cases})


def test_values_by_default_can_be_run() -> None:
    for spec in LAYERS.values():
        made = ScalePlan(spec, default_experts(spec), default_top_k(spec), (1,), (ours("auto"),))
        assert spec.num_experts in made.experts
        assert spec.top_k in made.top_k


@pytest.mark.unpoisoned
@pytest.mark.parametrize("count", [2**22, 2**24])
def test_memory_of_a_call_is_what_it_holds(count: int) -> None:
    """Whatever was called before: nothing that is freed is left to the next."""
    for _ in range(2):
        found = peak_of(lambda: torch.ones(count).mul(2), torch.device("cpu"))
        assert found is None or 0.95 * 8 * count < found < 8 * count + 2**20


@pytest.mark.unpoisoned
def test_memory_grows_with_tokens(known_roof: Roof) -> None:
    spec = replace(SPEC, hidden_size=256, intermediate_size=256)
    found = scale(replace(plan(), spec=spec, experts=(), top_k=(), tokens=(64, 4096))).points
    small, large = (point.workspace_bytes for point in found)  # true to half a megabyte
    assert large is None or 4096 * 256 * 4 < large < 64 * 4096 * 256 * 4
    assert large is None or small < large / 4


def test_json(report: ScaleReport) -> None:
    found = json.loads(json.dumps(report.as_json(), allow_nan=False))
    check_document(found)
    assert found["settings"]["num_experts"] == [3, 6]
    assert found["roof"]["peaks"] == PEAKS
    assert {point["axis"] for point in found["points"]} == set(AXES)
    keys = {"value", "microseconds", "roof_microseconds", "roof_share", "weight_bytes", "read_bytes", "workspace_bytes"}
    assert all(keys <= set(point) for point in found["points"])


def test_tables_and_picture(report: ScaleReport, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    for table in tables(report):
        console.print(table)
    text = console.export_text()
    assert max(map(len, map(str.rstrip, text.splitlines()))) <= 80
    assert text.count("over E: ") == text.count("over T: ") == 2
    assert "olmoe (H 24, I 16, E 6, K 3), T 4 where E or K is varied" in headline(report)
    scale_plot(report, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000
    with pytest.raises(InvalidInputError, match="without times"):
        scale_plot(ScaleReport(report.plan, report.base), tmp_path / "q.png")


def test_experts_that_memory_does_not_hold(known_roof: Roof, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "experts_that_fit", lambda spec, dtype, free, tokens: min(spec.num_experts, 4))
    found = scale(plan(experts=(3, 5), top_k=(), tokens=(1,)))
    assert [(p.value, p.row.status) for p in found.points] == [(3, "ok"), (5, "skipped"), (1, "skipped")]
    assert "5 experts of olmoe in float32; needs memory for all of them; it holds 4" in found.points[1].row.reason
    check_document(json.loads(json.dumps(found.as_json())))
    assert len(tables(found)) == 2
    with pytest.raises(UnsupportedError, match="it holds 4"):
        scale(plan(experts=(5,), top_k=(), tokens=(1,)))


def test_a_spent_budget_and_a_wrong_output(known_roof: Roof) -> None:
    good = ours("auto")
    cheat = Variant("moestro-cheat", good.refuses, lambda layer: lambda x, r: lambda: torch.zeros_like(x), good.cost)
    found = scale(plan(variants=(good, cheat), experts=(), tokens=(4,), top_k=()))
    assert [p.row.status for p in found.points] == ["ok", "wrong output"]
    assert (len(found.wrong), found.points[1].workspace_bytes) == (1, None)
    late = scale(plan(budget=1e-9))
    assert {p.row.reason for p in late.points} == {"the run's time budget was spent before this point"}


def test_a_variant_that_breaks_is_a_point_with_the_reason(known_roof: Roof) -> None:
    def broken(layer):
        raise torch.OutOfMemoryError("no memory")

    fragile = Variant("fragile", lambda spec, dtype: None, broken, ours("auto").cost, numbers=Numbers())
    (point,) = scale(plan(variants=(fragile,), experts=(), tokens=(4,), top_k=())).points
    assert (point.row.status, point.row.reason, point.workspace_bytes) == ("skipped", "no memory", None)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"top_k": (7,)}, "got top_k 7 of 6 experts; needs at most as many experts a token as there are"),
        ({"experts": (2,)}, "got top_k 3 of 2 experts"),
        ({"tokens": (0,)}, "tokens [0]; needs numbers of at least 1"),
        ({"at_tokens": 0}, "needs numbers of at least 1"),
        ({"experts": (), "top_k": (), "tokens": ()}, "needs numbers of at least 1"),
        ({"variants": ()}, "0 variants"),
        ({"dtype": torch.int8}, "got dtype torch.int8"),
        ({"device": "abacus"}, "got device 'abacus'"),
        ({"seconds": 0.0}, "got seconds per point 0.0"),
    ],
)
def test_what_cannot_be_varied(change: dict, sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        plan(**change)
    assert sentence in str(caught.value)
