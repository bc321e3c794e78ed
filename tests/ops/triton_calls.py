"""The triton implementation of expert_mlp asked alone: why it cannot run a call, and a call by a given plan."""

from __future__ import annotations

from torch import Tensor

from moestro import ExpertWeights, Routing
from moestro.ops.expert_mlp import triton
from moestro.ops.expert_mlp.triton_tuning import Plan


def why_unsupported(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> str | None:
    """The reason why it cannot run this; None if it can."""
    found = triton.prepare(x, routing, weights, strategy)
    return found if isinstance(found, str) else None


def launch(x: Tensor, routing: Routing, weights: ExpertWeights, how: Plan) -> Tensor:
    """What it computes by a plan."""
    y: Tensor = triton._launches().prepared(how, triton.compute_dtype(x, weights))(x, routing, weights)
    return y
