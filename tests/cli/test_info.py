"""`moestro info`: what it says is what the library says."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from moestro import machine, settings
from moestro.cli import app
from moestro.cli import info as command
from moestro.machine import Roof
from moestro.ops import dispatch, measured, native
from moestro.ops.expert_mlp import costs
from moestro.ops.topk import TOPK


@pytest.fixture
def roofs(monkeypatch: pytest.MonkeyPatch) -> None:
    by_dtype = {torch.float32: Roof(1.25e10, 1e11), torch.bfloat16: Roof(1.25e10, 4e11)}
    monkeypatch.setattr(machine, "measure", lambda dtype: by_dtype[dtype])
    monkeypatch.setattr(machine, "peaks", lambda: {"fma": 2.5e11, "vnni": 1e12})


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["info", *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_json() -> None:
    found = json.loads(run("--json").stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["machine"]["features"] == machine.features()
    assert found["roof"] is found["peaks"] is None


@pytest.mark.skipif(native.module is None, reason="there is no engine")
def test_what_is_measured_is_kept_and_listed(roofs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(settings, "MEASURES", True)
    monkeypatch.setattr(measured._Waits, "longest", lambda self: 0.0)  # other tests may keep the cores
    costs.costs.cache_clear()
    costs._read_rate.cache_clear()
    assert json.loads(run("--json").stdout)["costs"] == {}
    found = json.loads(run("--measure", "--json").stdout)["costs"]
    assert any("mxfp4" in name for name in found)
    kept = json.loads(run("--json").stdout)["costs"]
    assert kept.items() >= found.items()
    assert all(name.split(",")[0] in run().stdout for name in found)
    measured.forget()
    assert measured.read() == {}
    costs.costs.cache_clear()
    costs._read_rate.cache_clear()


def test_the_build_of_torch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of PyPI has version 2.13.0 and calls itself 2.13.0+cu130."""
    monkeypatch.setattr("moestro.cli.info.metadata.version", lambda name: "2.13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    found = json.loads(run("--json").stdout)["versions"]
    assert (found["torch"], found["numpy"]) == ("2.13.0+cu130", "2.13.0")
    assert "2.13.0+cu130" in run().stdout


def test_every_implementation_is_listed_in_order() -> None:
    found = json.loads(run("--json").stdout)["implementations"]
    assert {op: [e["name"] for e in entries] for op, entries in found.items()} == {
        op.name: [e.name for e in op.implementations] for op in dispatch.operations()
    }
    assert {"name": "torch", "reason": None} in found["expert_mlp"]


def test_a_reason_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    never = dispatch.Implementation("never", lambda scores, k: "it is Sunday")
    operation = replace(TOPK, implementations=(never, *TOPK.implementations))
    monkeypatch.setitem(dispatch._OPERATIONS, "topk", operation)
    assert json.loads(run("--json").stdout)["implementations"]["topk"][0] == {"name": "never", "reason": "it is Sunday"}
    assert "it is Sunday" in run().stdout


@pytest.mark.usefixtures("roofs")
def test_measured() -> None:
    measured = json.loads(run("--measure", "--json").stdout)
    assert measured["peaks"] == {"fma": 2.5e11, "vnni": 1e12}
    found = measured["roof"]
    assert found["bfloat16"] == {"bytes_per_second": 1.25e10, "flops_per_second": 4e11}
    text = run("--measure").stdout
    assert "12.5 GB/s, 100 GFLOP/s" in text
    assert "12.5 GB/s, 400 GFLOP/s" in text
    assert "250 GFLOP/s" in text
    assert "1,000 GOP/s" in text


@pytest.mark.usefixtures("roofs")
def test_without_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "peaks", dict)
    assert json.loads(run("--measure", "--json").stdout)["peaks"] == {}
    assert "the native engine is not there, or has no loops for this processor" in run("--measure").stdout


def test_a_long_name_leaves_room_for_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        measured, "read", lambda: {"beside the experts of a model " + "with long names " * 20: [1.0] * 6}
    )
    text = run().stdout
    assert "it computes on NVIDIA GPUs, and its argument is on cpu" in text or torch.cuda.is_available()
    assert "prompt 3,000.0 ms, a step 3,000.0 ms" in text


def test_links_are_no_costs_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "read", lambda: {"2 processes of 1 threads add up": [1.25e9, 4e-4]})
    text = run().stdout
    assert "1.25 GB/s, 400 us a message" in text
    assert "a weight" not in text


def test_text() -> None:
    text = run().stdout
    for part in (
        torch.__version__,
        machine.processor_name(),
        "implementations of expert_mlp",
        "moestro info --measure",
    ):
        assert part in text


def test_a_package_whose_module_belongs_to_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pytorch-triton brings the module triton."""
    version = metadata.version

    def missing(name: str) -> str:
        if name == "triton":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert json.loads(run("--json").stdout)["versions"]["triton"] is None


def test_a_gpu_is_described_and_its_rates_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for what is asked of a GPU."""
    gpu = {"name": "Some GPU", "capability": "9.0", "multiprocessors": 132}
    gpu |= {"memory_bytes": 80 << 30, "l2_bytes": 50 << 20}
    described = machine.describe()
    monkeypatch.setattr(machine, "describe", lambda: {**described, "accelerators": ["Some GPU"]})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine, "describe_gpu", lambda device: gpu)
    monkeypatch.setattr(machine, "bandwidths", lambda device: {"copy": 4e12})
    monkeypatch.setattr(machine, "matrix_rates", lambda device: {"bf16-mm": 7e14})
    monkeypatch.setattr(machine, "measure", lambda dtype: Roof(1e9, 1e9))
    monkeypatch.setattr(machine, "peaks", dict)
    asked: list[str] = []
    monkeypatch.setattr("moestro.cli.info._implementations", lambda device: asked.append(device) or {})
    found = json.loads(run("--measure", "--json").stdout)
    assert asked == ["cuda"]
    assert found["gpus"] == [gpu]
    assert found["gpu_rates"] == [{"copy": 4e12, "bf16-mm": 7e14}]
    text = run("--measure").stdout
    for line in ("cuda:0", "9.0", "132", "80.0 GiB", "50.0 MiB", "4,000 GB/s", "700 TFLOP/s"):
        assert line in text


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("beside the experts of x: y", [0.1, 0.2, 0.3, 0.001, 0.002, 0.003, 0.05], "prompt 600.0 ms, a step 6.0 ms"),
        ("2 threads read", [33.4e9], "33.4 GB/s"),
        ("cpu-avx2: most rows", [12.0], "12"),
        ("cpu-avx2: bfloat16 by int8", [1e-6, 2e-11, 1e-11], "3 numbers, 10 ps a weight at the least"),
    ],
)
def test_what_was_measured_in_words(name: str, numbers: list[float], words: str) -> None:
    assert command._numbers(name, numbers) == words
