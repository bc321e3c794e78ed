"""Layers small enough to test, and a roof that is not measured: no time decides a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moestro import machine
from moestro.bench import LAYERS, LayerSpec, timing
from moestro.machine import Roof

ROOF = Roof(bytes_per_second=1e10, flops_per_second=1e11)
PEAKS = {"fma": 2e11, "vnni": 8e11}


def tiny(name: str, num_experts: int = 6) -> LayerSpec:
    """The layer of this name at H 24, I 16 and a few experts; top_k is half of them at most."""
    spec = LAYERS[name]
    return replace(
        spec, hidden_size=24, intermediate_size=16, num_experts=num_experts, top_k=min(spec.top_k, num_experts // 2)
    )


@pytest.fixture(name="tiny")
def tiny_fixture():
    return tiny


@pytest.fixture
def known_roof(monkeypatch: pytest.MonkeyPatch) -> Roof:
    """What the machine gives is said and not measured, and one call is enough to warm up."""
    monkeypatch.setattr(machine, "measure", lambda dtype, device="cpu": ROOF)
    monkeypatch.setattr(machine, "peaks", lambda: PEAKS)
    monkeypatch.setattr(timing, "TURN_SECONDS", 0.0)
    return ROOF
