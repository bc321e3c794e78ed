"""DBRX: gate_proj, up_proj and down_proj are three matrices [E * I, H] with the experts stacked along the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moestro.formats import SplitTensor, dense
from moestro.hf import experts
from moestro.hf.activation import recognise
from moestro.hf.experts import Plan
from moestro.hf.families.base import Adapter, is_recorded, plain, recall, remember
from moestro.hf.layout import STRIDED
from moestro.hf.store import Projection, Projections, stored_weights
from moestro.weights import ExpertWeights


def inspect(module: Any) -> Plan:
    mlp = _mlp(module)
    experts.check_dense(mlp, mlp.parameters())
    activation = recognise(lambda z: experts.glu(mlp.activation_fn, z), True)
    return Plan(activation, layout=f"{STRIDED} (down_proj keeps its [E * I, H] shape)")


def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, strategy: str) -> Tensor:
    """DbrxExperts: hidden_states [B, S, H], ids and weights [B * S, K] -> [B, S, H]."""
    mlp = _mlp(module)
    weights = stored_weights(mlp) or _weights(module, mlp)
    return experts.apply(hidden_states, top_k_index, top_k_weights, weights, strategy)


def _weights(module: Any, mlp: Any) -> ExpertWeights:
    plan, matrices = recall(module, inspect), (mlp.w1, mlp.v1, mlp.w2)
    recorded = is_recorded(matrices)

    def make() -> ExpertWeights:
        gate, up, down = (t.view(int(module.num_experts), -1, int(module.hidden_size)) for t in matrices)
        halves = tuple((dense(g), dense(u)) for g, u in zip(gate, up, strict=True))
        gate_up = dense(torch.cat((gate, up), 1)) if recorded else SplitTensor(halves)
        return ExpertWeights(gate_up, dense(down.transpose(1, 2)), activation=plan.activation)

    if recorded:
        return experts.anew(plan, make)
    return experts.kept(plan, tuple(t.data_ptr() for t in matrices), matrices, make)


def projections(module: Any, plan: Plan) -> Projections:
    gate_up = Projection("gate_up_proj", ("w1", "v1"), flat=True)
    down = Projection("down_proj", ("w2",), transposed=True, flat=True)
    return Projections("mlp", (gate_up, down), int(module.num_experts), plan.activation)


def _mlp(module: Any) -> Any:
    return plain(module, "mlp", "DbrxExpertGLU")


DBRX = Adapter(
    "DBRX", "DbrxExperts", inspect, remember, forward, "three matrices over all experts", projections=projections
)
