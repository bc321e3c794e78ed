"""Kernels of plans with other tiles, timed: on a device that is none, by a profiler that says what it is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moestro
from gpu import kernel_times, tune
from gpu.first_points import Device
from gpu.items import REFUSED
from moestro.bench import LAYERS
from moestro.ops import gpu

HOPPER = gpu.Device((9, 0), 132, 227 << 10)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Kernels take as long as a tile has columns, and a plan of 32 columns computes something else."""
    plans = []

    def prepared(x, weights, how):
        def call(x, routing, weights):
            plans.append(how)
            with moestro.use(implementation="torch"):
                return moestro.expert_mlp(x, routing, weights) * (2.0 if how.gate_up.columns == 32 else 1.0)

        return call

    def profiled(calls):
        for call in calls:
            call()
        return {"gate_up_kernel": [float(plans[-1].gate_up.columns)] * len(calls), "down_kernel": [1.0] * len(calls)}

    tiny = replace(LAYERS["olmoe"], hidden_size=128, intermediate_size=128, num_experts=6, top_k=2)
    monkeypatch.setattr(kernel_times, "named", lambda name: tiny)
    monkeypatch.setattr(kernel_times, "profiled", profiled)
    monkeypatch.setattr(tune, "prepared", prepared)
    monkeypatch.setattr(gpu, "device_of", lambda tensor: HOPPER)
    return Device("cpu", None, None, None, 1 << 20, dict, lambda: 1 << 40)


def test_a_row_for_each_plan(device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    plans = ["columns=128 stages=3", "columns=32", "rows=32"]
    arguments = ["--tokens", "4", "--formats", "mxfp4", "--plans", *plans, "--json", str(path)]
    assert kernel_times.main(arguments, lambda: device) == 0
    rows = json.loads(path.read_text())
    assert [row["plan"] for row in rows] == ["as it is", *plans]
    assert [row["us"]["gate_up_kernel"] for row in rows[1:3]] == [128.0, 32.0]
    assert [row["total_us"] for row in rows[1:3]] == [129.0, 33.0]
    assert rows[2]["off"] == pytest.approx(1.0, rel=1e-3)
    assert rows[1]["off"] == 0
    assert rows[1]["flops"] == 6 * 128 * 128 * 4 * 2
    out = capsys.readouterr().out
    assert out.count("TB/s") == 4
    assert "gate_up 128.0 down 1.0, together 129.0 us" in out


def test_what_does_not_run_is_a_row(device: Device, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(calls):
        raise RuntimeError("no such tile")

    monkeypatch.setattr(kernel_times, "profiled", broken)
    assert kernel_times.main(["--tokens", "4"], lambda: device) == 1
    assert "no such tile" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["columns", "columns=wide", "programs=4", "swap=-1"])
def test_a_plan_that_is_none_is_refused(text: str, device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel_times.main(["--plans", text], lambda: device) == REFUSED
    assert f"the plan {text!r}" in capsys.readouterr().err


def test_both_products_and_the_whole_change() -> None:
    from moestro.ops.expert_mlp.triton_tuning import Plan, Tile

    plan = Plan("grouped", "", True, 16, 16, Tile(64, 128, registers=96), Tile(128, 128))
    found = kernel_times.changed(plan, kernel_times.changes("rows=64 tails=1 swap=1 columns=32"))
    assert (found.rows, found.block, found.tails) == (64, 64, 1)
    assert found.gate_up == found.down == Tile(32, 128, swap=True)
    assert kernel_times.changed(plan, {"rows": 32}).gate_up == plan.gate_up
    assert kernel_times.changed(replace(plan, ordered=False, block=1), {"rows": 32}).block == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel_times.main([]) == REFUSED
    assert capsys.readouterr().err.count("\n") == 1
