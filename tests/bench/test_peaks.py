"""A peak below a rate of the same run is measured again, and refused where it stays below."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moestro import machine
from moestro.bench import Plan, ours, peaks, run
from moestro.bench.records import PlanPoint, Report, Row
from moestro.machine import Roof


def report(tiny, rates: dict[str, float], found: dict[str, float], *more: Row) -> Report:
    return Report(
        command="",
        date="",
        machine={},
        versions={},
        roofs={name: Roof(1e10, rate) for name, rate in rates.items()},
        peaks=found,
        rows=list(more),
    )


def row(tiny, dtype: str, peak: str, gigaflops: float) -> Row:
    place = PlanPoint(tiny("olmoe"), getattr(torch, dtype), 4, (ours(),), ())
    share = gigaflops / 2  # of a peak that was measured as 2 GFLOP/s
    return replace(
        Row.skipped(place, ours(), ""), status="ok", reason=None, peak=peak, gigaflops=gigaflops, peak_share=share
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What `machine.peaks` finds from now on, one call after the other."""
    found: list[dict[str, float]] = []
    monkeypatch.setattr(machine, "peaks", lambda: found.pop(0))
    return found


def test_a_peak_that_can_be_is_left_alone(tiny, measured: list) -> None:
    one = report(tiny, {"float32": 1e11}, {"fma": 2e11, "vnni": 8e11}, row(tiny, "float32", "fma", 150))
    peaks.settle(one)
    assert one.peaks == {"fma": 2e11, "vnni": 8e11}
    assert one.notes == {}


def test_a_peak_below_the_matmul_is_measured_again(tiny, measured: list) -> None:
    measured += [{"fma": 1.5e9, "vnni": 7e11}, {"fma": 2e11, "vnni": 8e11}]
    one = report(tiny, {"float32": 1e11}, {"fma": 1e9, "vnni": 9e11}, row(tiny, "float32", "fma", 50))
    peaks.settle(one)
    assert one.peaks == {"fma": 2e11, "vnni": 9e11}  # the best of all counts
    assert one.rows[0].peak_share == 0.25
    assert not measured
    assert one.notes == {}


def test_a_peak_that_stays_below_is_refused(tiny, measured: list) -> None:
    measured += [{"fma": 1e9, "vnni": 1e9}] * peaks.ATTEMPTS
    rows = row(tiny, "float32", "vnni", 68), row(tiny, "float32", "fma", 0.5)
    one = report(tiny, {}, {"fma": 1e9, "vnni": 1e9}, *rows)
    peaks.settle(one)
    assert one.peaks == {"fma": 1e9}
    assert [(r.peak, r.peak_share) for r in one.rows] == [(None, None), ("fma", 0.5)]
    (note,) = one.notes["run"]
    assert note.startswith("the peak vnni is refused: 1 GFLOP/s from registers")
    assert "the 68 GFLOP/s of moestro at T = 4" in note


@pytest.mark.parametrize(
    ("dtype", "peak", "found", "stands"),
    [
        ("bfloat16", "fma", {"fma": 60e9}, True),  # bfloat16 products of vectors are twice as many
        ("bfloat16", "fma", {"fma": 40e9}, False),
        ("bfloat16", "fma", {"fma": 40e9, "amx-bf16": 400e9}, True),
        ("float32", "fma", {"fma": 60e9, "amx-bf16": 400e9}, False),
        ("bfloat16", "vnni", {"vnni": 60e9}, False),
        ("bfloat16", "vnni", {"vnni": 60e9, "amx-int8": 400e9}, True),
    ],
)
def test_what_a_rate_says_of_a_peak(tiny, dtype: str, peak: str, found: dict[str, float], stands: bool) -> None:
    assert (peaks.refuted(report(tiny, {}, found, row(tiny, dtype, peak, 100))) == {}) == stands


def test_a_run_settles_its_peaks(tiny, known_roof: Roof, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "peaks", lambda: {"fma": 1.0})  # as it was seen beside other work
    monkeypatch.setattr(machine, "measure", lambda dtype, device="cpu": Roof(1e10, 1e11))
    plan = Plan(layers=(tiny("olmoe"),), tokens=(1,), dtypes=(torch.bfloat16,), ours=(ours(),), peers=(), seconds=1e-4)
    found = run(plan)
    assert found.peaks == {}
    assert all(r.peak is None for r in found.rows)
    assert any("the peak fma is refused" in note for note in found.notes["run"])
