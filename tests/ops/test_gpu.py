"""Where Triton's kernels run, and the sentences for where they do not."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys

import pytest
import torch

import moestro
from moestro.ops import gpu
from moestro.ops.tensors import TRACED

pytest.importorskip("triton")


def test_cpu_tensors_are_taken_only_when_forced() -> None:
    x = torch.zeros(2)
    assert "NVIDIA GPUs" in (gpu.unusable(x.device) or "")
    with moestro.use(implementation="triton"):
        assert gpu.unusable(x.device) is None or not gpu.interpreted()
    assert "on meta" in (gpu.unusable(torch.device("meta")) or "")


def test_without_the_interpreter_a_cpu_tensor_is_refused() -> None:
    code = """
import torch, moestro
from moestro.ops import gpu
with moestro.use(implementation="triton"):
    print(gpu.unusable(torch.device("cpu")))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment("0"))
    assert "TRITON_INTERPRET=1" in run.stdout


def test_without_triton_the_reason_says_so() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch, moestro
from moestro.ops import gpu
with moestro.use(implementation="triton"):
    print(gpu.unusable(torch.device("cpu")), gpu.interpreted())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment("1"))
    assert "pip install triton" in run.stdout
    assert run.stdout.strip().endswith("False")


def environment(interpret: str) -> dict[str, str]:
    import os

    return {**os.environ, "TRITON_INTERPRET": interpret}


def test_what_is_recorded_or_watched_is_refused(triton_device: torch.device) -> None:
    x = torch.zeros(2, device=triton_device)
    assert gpu.unreadable(x) is None
    assert "gradient" in (gpu.unreadable(x.clone().requires_grad_()) or "")
    with torch.no_grad():
        assert gpu.unreadable(x.clone().requires_grad_()) is None
    negated = torch._neg_view(x)
    assert "negative" in (gpu.unreadable(negated) or "")


def test_a_tracer_is_told_that_it_is_one_and_follows_no_import(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "unusable", lambda device: importlib.import_module("triton"))
    compiled = torch.compile(lambda x: x + (gpu.unreadable(x) == TRACED), fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))


@pytest.mark.parametrize(
    ("capability", "kilobytes"), [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((12, 0), 99)]
)
def test_shared_memory_is_that_of_the_part(capability: tuple[int, int], kilobytes: int) -> None:
    assert gpu.shared_memory(capability) == kilobytes * 1024


class Stream:
    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def wait_stream(self, other: Stream) -> None:
        self.told.append(f"{self.name} waits for {other.name}")


def test_shared_experts_run_beside_the_routed_ones(monkeypatch):
    """The order of waits on two streams: the side begins after what came before, and the sum waits for the side."""
    told: list[str] = []
    main, side = Stream("main", told), Stream("side", told)
    monkeypatch.setattr(gpu, "_streams", lambda device: (main, side))
    monkeypatch.setattr(gpu, "_overlaps", lambda x: True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: told.append(f"kept for {stream.name}"))
    monkeypatch.setattr(
        torch.cuda, "stream", lambda stream: told.append(f"on {stream.name}") or contextlib.nullcontext()
    )
    shared = moestro.SharedExperts(8, 4)
    router = moestro.TopKRouter(8, 4, 2)
    layer = moestro.MoE(router, moestro.Experts(4, 8, 6), shared_experts=shared)
    x = torch.randn(3, 8)
    y = layer(x)
    assert told == ["side waits for main", "on side", "main waits for side", "kept for main"]
    monkeypatch.undo()
    assert torch.equal(y, layer(x))


def test_few_rows_and_gradients_stay_on_one_stream(monkeypatch):
    x = torch.zeros(gpu.LEAST_OVERLAPPED, 2)
    assert not gpu._overlaps(x)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not gpu._overlaps(x)  # gradients are recorded
    with torch.no_grad():
        assert gpu._overlaps(x)
        assert not gpu._overlaps(x[1:])
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert gpu._overlaps(x[1:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are a GPU's")
def test_two_streams_compute_what_one_does():
    layer = moestro.MoE(moestro.TopKRouter(64, 4, 2), moestro.Experts(4, 64, 48), moestro.SharedExperts(64, 32)).cuda()
    x = torch.randn(512, 64, device="cuda")
    with torch.no_grad():
        expected = layer.experts(x, layer.route(x)) + layer.shared_experts(x)
        for _ in range(20):
            assert torch.equal(layer(x), expected)
