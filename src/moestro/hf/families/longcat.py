"""LongCat-Flash: some experts are the identity. Their ids become empty slots, their weights a multiple of the token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moestro.formats import dense
from moestro.hf import experts
from moestro.hf.experts import Plan
from moestro.hf.families.base import Adapter, recall, remember
from moestro.weights import ExpertWeights


def inspect(module: Any) -> Plan:
    num_experts = int(module.num_routed_experts)
    if num_experts:
        gate_up, down = module.gate_up_proj, module.down_proj
        experts.check_dense(module, (gate_up, down))
        if len(gate_up) < num_experts or len(down) != num_experts:
            raise experts.refuse(
                module,
                f"gate_up_proj for {len(gate_up)} and down_proj for {len(down)} experts",
                f"both for its {num_experts} routed experts",
            )
    return Plan(experts.activation_of(module, gated=True))


def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, strategy: str) -> Tensor:
    """LongcatFlashExperts: hidden_states [T, H], ids and weights [T, K] -> [T, H]."""
    num_experts = int(module.num_routed_experts)
    kept = torch.where(top_k_index >= num_experts, top_k_weights, 0).sum(-1, keepdim=True)
    identity = (hidden_states * kept).to(hidden_states.dtype)
    if num_experts == 0:
        return identity
    weights = ExpertWeights(
        dense(module.gate_up_proj[:num_experts]),
        dense(module.down_proj),
        activation=recall(module, inspect).activation,
    )
    return experts.apply(hidden_states, top_k_index, top_k_weights, weights, strategy) + identity


LONGCAT_FLASH = Adapter("LongCat-Flash", "LongcatFlashExperts", inspect, remember, forward, "identity experts")
