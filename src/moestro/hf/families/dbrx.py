"""DBRX: gate_proj, up_proj and down_proj are three matrices [E * I, H] with the experts stacked along the rows.

The first two share one storage after `settle`, their rows alternating: each stays a parameter of its old shape (with
a stride), and together they are the interleaved gate_up of the primitive. down_proj is a transposed view.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from moestro.formats import dense
from moestro.hf import experts
from moestro.hf.activation import recognise
from moestro.hf.experts import Plan
from moestro.hf.families.base import Adapter, join, plain, recall, remember
from moestro.hf.layout import STRIDED, separate_state
from moestro.hf.projections import Projection, Projections
from moestro.types import Activation
from moestro.weights import ExpertWeights


def inspect(module: Any) -> Plan:
    mlp = _mlp(module)
    experts.check_dense(mlp, mlp.parameters())
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
    stored = experts.stored_weights(mlp)
    if stored is not None:
        return experts.apply(hidden_states, top_k_index, top_k_weights, stored, strategy)
    shape = (int(module.num_experts), -1, int(module.hidden_size))
    gate_up = join([mlp.w1, mlp.v1], dim=1)
    weights = ExpertWeights(
        dense(gate_up.view(shape)),
        dense(mlp.w2.view(shape).transpose(1, 2)),
        activation=recall(module, inspect).activation,
    )
    return experts.apply(hidden_states, top_k_index, top_k_weights, weights, strategy)


def projections(module: Any, plan: Plan) -> Projections:
    """Stored, gate_proj and up_proj stay the two matrices they are in the checkpoint: one after the other."""
    mlp = _mlp(module)
    activation = plan.activation
    if activation.function is None:
        activation = replace(activation, interleaved=False)
    else:
        activation = Activation("custom", function=lambda z: experts.glu(mlp.activation_fn, z))
    gate_up = Projection("gate_up_proj", ("w1", "v1"), flat=True)
    down = Projection("down_proj", ("w2",), transposed=True, flat=True)
    return Projections("mlp", gate_up, down, int(module.num_experts), activation)


def _mlp(module: Any) -> Any:
    return plain(module, "mlp", "DbrxExpertGLU")


DBRX = Adapter(
    "DBRX", "DbrxExperts", inspect, settle, forward, "three matrices over all experts", projections=projections
)
