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
from moestro.hf.families.base import Adapter, join, present, recall, remember
from moestro.hf.layout import STRIDED
from moestro.types import Activation
from moestro.weights import ExpertWeights

_JOINED = ("w1", "v1")


def inspect(module: Any) -> Plan:
    mlp = module.get_submodule("mlp")
    present(mlp, mlp.parameters())
    found = recognise(lambda z: experts.glu(mlp.activation_fn, z), True)
    if found.function is None:
        activation = Activation(found.kind, True, True, found.alpha, found.limit, found.up_offset)
    else:
        activation = Activation("custom", function=lambda z: mlp.activation_fn(z[..., ::2]) * z[..., 1::2])
    return Plan(activation, layout=f"{STRIDED} (down_proj keeps its [E * I, H] shape)")


def settle(module: Any, plan: Plan) -> Plan:
    mlp = module.get_submodule("mlp")
    if separate not in mlp._state_dict_hooks.values():
        mlp.register_state_dict_post_hook(separate)
    return remember(module, plan)


def separate(mlp: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """State dict hook: give each joined matrix storage of its own, as files need it."""
    for name in _JOINED:
        state[prefix + name] = state[prefix + name].contiguous()


def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, strategy: str) -> Tensor:
    """DbrxExperts: hidden_states [B, S, H], ids and weights [B * S, K] -> [B, S, H]."""
    mlp = module.get_submodule("mlp")
    shape = (int(module.num_experts), -1, int(module.hidden_size))
    gate_up = join(mlp, "gate_up", [mlp.get_parameter(name) for name in _JOINED], dim=1)
    weights = ExpertWeights(
        dense(gate_up.view(shape)),
        dense(mlp.get_parameter("w2").view(shape).transpose(1, 2)),
        activation=recall(module, inspect).activation,
    )
    return experts.apply(hidden_states, top_k_index, top_k_weights, weights, strategy)


DBRX = Adapter("DBRX", "DbrxExperts", inspect, settle, forward, "three matrices over all experts")
