"""Where Triton's kernels run, and the sentences for where they do not."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import moestro
from moestro.ops import gpu

pytest.importorskip("triton")


def test_cpu_tensors_are_taken_only_when_forced() -> None:
    x = torch.zeros(2)
    assert "NVIDIA GPUs" in (gpu.unusable(x) or "")
    with moestro.use(implementation="triton"):
        assert gpu.unusable(x) is None or not gpu.interpreted()
    assert "on meta" in (gpu.unusable(torch.zeros(2, device="meta")) or "")


def test_without_the_interpreter_a_cpu_tensor_is_refused() -> None:
    code = """
import torch, moestro
from moestro.ops import gpu
with moestro.use(implementation="triton"):
    print(gpu.unusable(torch.zeros(2)))
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
    print(gpu.unusable(torch.zeros(2)), gpu.interpreted())
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


@pytest.mark.parametrize(
    ("capability", "kilobytes"), [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((12, 0), 99)]
)
def test_shared_memory_is_that_of_the_part(capability: tuple[int, int], kilobytes: int) -> None:
    assert gpu.shared_memory(capability) == kilobytes * 1024
