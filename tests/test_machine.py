from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from moestro import machine
from moestro.machine import Roof
from moestro.ops import native


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PROBE_BYTES", 1 << 24)
    monkeypatch.setattr(machine, "_SECONDS_PER_PROBE", 1e-3)
    machine._roof.cache_clear()
    yield
    machine._roof.cache_clear()


def test_roof_arithmetic() -> None:
    roof = Roof(bytes_per_second=20e9, flops_per_second=160e9)
    assert roof.balance == 8
    assert roof.seconds(flops=160e9, nbytes=20e9) == 1  # at the balance both take equally long
    assert roof.seconds(flops=160e9, nbytes=40e9) == 2
    assert roof.seconds(flops=640e9, nbytes=40e9) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measure_finds_rates_a_machine_can_have(small_probe: None, dtype: torch.dtype) -> None:
    roof = machine.measure(dtype)
    assert 1e7 < roof.bytes_per_second < 1e14
    assert 1e7 < roof.flops_per_second < 1e17


def test_sixteen_bits_are_never_below_float32(monkeypatch: pytest.MonkeyPatch, small_probe: None) -> None:
    rates = {torch.float32: 5.0, torch.float16: 1.0, torch.float64: 2.0}
    monkeypatch.setattr(machine, "_matmul_rate", lambda dtype, device: rates[dtype])
    monkeypatch.setattr(machine, "bandwidths", lambda device: {"sum": 1.0})
    assert machine.measure(torch.float16).flops_per_second == 5.0
    assert machine.measure(torch.float64).flops_per_second == 2.0


def test_products_that_would_take_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without instructions for a dtype multiplies it at a hundredth of its rate."""
    multiplied = []

    def timings(call: partial, device: torch.device) -> list[float]:
        multiplied.append(len(call.args[0]))
        return [2 * multiplied[-1] ** 3 / rate]

    monkeypatch.setattr(machine, "_timings", timings)
    for rate, sizes in ((1.1e9, [256]), (2e10, [256, 1024]), (1e11, [256, 1024, 2048])):
        multiplied.clear()
        assert machine._matmul_rate(torch.bfloat16, torch.device("cpu")) == pytest.approx(rate)
        assert multiplied == sizes


def test_roof_is_measured_once(small_probe: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(machine, "measure", lambda dtype, device: calls.append((dtype, device)) or Roof(1.0, 2.0))
    assert machine.roof(torch.float32) is machine.roof(torch.float32, torch.device("cpu"))
    machine.roof(torch.bfloat16)
    assert calls == [(torch.float32, "cpu"), (torch.bfloat16, "cpu")]


def test_no_part_of_the_buffer_is_read_twice_in_a_row(small_probe: None, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real_sum, real_mv = torch.sum, torch.Tensor.__matmul__
    monkeypatch.setattr(torch, "sum", lambda part: read.append(part.data_ptr()) or real_sum(part))
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: read.append(a.data_ptr()) or real_mv(a, b), raising=True
    )
    machine.bandwidths("cpu")
    parts = len(set(read))
    assert parts == 4
    for i in range(len(read) - parts + 1):
        assert len(set(read[i : i + parts])) == parts


def test_probe_is_bounded_by_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, expected in ((64 << 30, 1 << 30), (1 << 30, 256 << 20), (0, 1 << 24)):
        monkeypatch.setattr(machine, "available_bytes", lambda device="cpu", free=free: free)
        assert machine.probe_bytes() == expected


def test_processor_facts_are_read_from_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x86 = "model name\t: Chip 9\nflags\t\t: fpu avx2 avx512_bf16 sse\n"
    monkeypatch.setattr(machine, "_read", lambda path: x86)
    assert machine.processor_name() == "Chip 9"
    assert machine.features() == ["avx2", "avx512_bf16"]
    monkeypatch.undo()
    for index, (level, kind, size) in enumerate((("1", "Data", "48K"), ("2", "Unified", "2M"), ("3", "Unified", ""))):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    monkeypatch.setattr(machine, "_CACHES", tmp_path)
    assert machine.cache_bytes() == {"L1d": 48 * 1024, "L2": 2 * 2**20}


def test_describe_is_json() -> None:
    facts = json.loads(json.dumps(machine.describe()))
    assert facts["threads"] == torch.get_num_threads()
    assert 0 < facts["memory_available_bytes"] <= facts["memory_bytes"]
    assert facts["probe_bytes"] <= 1 << 30
    assert facts["processor"]
    assert set(facts) == {
        "processor",
        "architecture",
        "features",
        "masked_features",
        "torch_kernels",
        "cores",
        "threads",
        "cache_bytes",
        "memory_bytes",
        "memory_available_bytes",
        "probe_bytes",
        "accelerators",
        "system",
    }


def test_peaks_are_of_this_processor_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_SECONDS_PER_PEAK", 1e-3)
    found, listed = machine.peaks(), set(machine.features())
    if native.module is None or machine.describe()["architecture"] != "x86_64":
        assert found == {}
        return
    needs = {"fma": {"fma"}, "vnni": {"avx512_vnni", "avx_vnni"}, "amx-bf16": {"amx_bf16"}, "amx-int8": {"amx_int8"}}
    assert set(found) <= {name for name, features in needs.items() if features & listed}
    assert {"fma", "vnni"} & set(found) == {name for name in ("fma", "vnni") if needs[name] & listed}
    assert all(1e8 < rate < 1e16 for rate in found.values())


def test_no_peaks_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moestro._native", None)
    assert machine.peaks() == {}


@pytest.mark.skipif(native.module is None, reason="the native engine is not there")
@pytest.mark.parametrize(("threads", "seconds"), [(0, 0.0), (1 << 17, 0.0), (1, -1.0), (1, float("nan"))])
def test_the_binding_of_peaks_refuses(threads: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="out of range"):
        native.module.peaks(threads, seconds)
