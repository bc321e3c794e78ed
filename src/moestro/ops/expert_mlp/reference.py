"""What expert_mlp must compute: the one specification, as an implementation."""

from __future__ import annotations

from torch import Tensor

from moestro.ops.dispatch import Prepared
from moestro.ops.expert_mlp.plain import why_unsupported
from moestro.ops.expert_mlp.tuning import named_strategy
from moestro.ops.tensors import without_autocast
from moestro.reference import expert_mlp
from moestro.types import Routing
from moestro.weights import ExpertWeights

__all__ = ["expert_mlp", "prepare"]


def prepare(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> Prepared | str:
    """The call of the reference, or the reason why there is none."""
    reason = why_unsupported(x, routing, weights)
    if reason is not None:
        return reason
    named_strategy(strategy)  # the reference has one walk, and refuses names that are none

    def compute(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> Tensor:
        return expert_mlp(x, routing, weights).to(x.dtype)

    return Prepared("reference", without_autocast(x, compute))
