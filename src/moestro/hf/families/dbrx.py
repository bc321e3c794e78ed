"""DBRX: gate_proj, up_proj and down_proj are three matrices [E * I, H] with the experts stacked along the rows.

The first two share one storage after `settle`, their rows alternating: each stays a parameter of its old shape (with
a stride), and together they are the interleaved gate_up of the primitive. down_proj is a transposed view.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moestro.formats import dense
from moestro.hf import experts
from moestro.hf.activation import recognise
from moestro.hf.experts import Plan
from moestro.hf.families.base import Adapter, join, plain, present, recall, remember
from moestro.hf.layout import STRIDED, separate_state
from moestro.types import Activation
from moestro.weights import ExpertWeights


def inspect(module: Any) -> Plan:
    mlp = _mlp(module)
    present(mlp, mlp.parameters())
    found = recognise(lambda z: experts.glu(mlp.activation_fn, z), True)
    if found.function is None:
        activation = Activation(found.kind, True, True, found.alpha, found.limit, found.up_offset)
    else:
        activation = Activation("custom", function=lambda z: mlp.activation_fn(z[..., ::2]) * z[..., 1::2])
    return Plan(activation, layout=f"{STRIDED} (down_proj keeps its [E * I, H] shape)")


def settle(module: Any, plan: Plan) -> Plan:
    separate_state(_mlp(module))
    return remember(module, plan)


def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, strategy: str) -> Tensor:
    """DbrxExperts: hidden_states [B, S, H], ids and weights [B * S, K] -> [B, S, H]."""
    mlp = _mlp(module)
    shape = (int(module.num_experts), -1, int(module.hidden_size))
    gate_up = join([mlp.w1, mlp.v1], dim=1)
    weights = ExpertWeights(
        dense(gate_up.view(shape)),
        dense(mlp.w2.view(shape).transpose(1, 2)),
        activation=recall(module, inspect).activation,
    )
    return experts.apply(hidden_states, top_k_index, top_k_weights, weights, strategy)


def _mlp(module: Any) -> Any:
    return plain(module, "mlp", "DbrxExpertGLU")


DBRX = Adapter("DBRX", "DbrxExperts", inspect, settle, forward, "three matrices over all experts")
