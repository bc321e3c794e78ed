"""JetMoE: its router hands out rows already in expert order, which is undone here.

Its attention experts (JetMoeMoA) are single query and output projections around the attention itself, not two
matmuls with a function between them: they stay with Transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moestro.formats import dense
from moestro.hf import experts
from moestro.hf.activation import recognise
from moestro.hf.experts import Plan
from moestro.hf.families.base import Adapter, plain, recall, remember
from moestro.weights import ExpertWeights


def inspect(module: Any) -> Plan:
    experts.check_dense(module, _matrices(module))
    act = module.activation
    return Plan(recognise(lambda z: experts.glu(act, z), True))


def forward(module: Any, layer_input: Tensor, *, strategy: str) -> Tensor:
    """JetMoeMoE: layer_input [..., H] -> [..., H]."""
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    order, _, sorted_weights, counts, _ = module.router(rows)
    place = order.argsort()
    ids = torch.arange(len(counts), device=rows.device).repeat_interleave(torch.tensor(counts, device=rows.device))
    shape = (len(rows), module.router.top_k)
    gate_up, down = _matrices(module)
    weights = ExpertWeights(dense(gate_up), dense(down), activation=recall(module, inspect).activation)
    routed = experts.apply(rows, ids[place].view(shape), sorted_weights[place].view(shape), weights, strategy)
    output: Tensor = routed + module.bias
    return output.view(layer_input.shape)


def _matrices(module: Any) -> tuple[Tensor, Tensor]:
    layers = (plain(module, name, "JetMoeParallelExperts") for name in ("input_linear", "output_linear"))
    gate_up, down = (layer.weight for layer in layers)
    return gate_up, down


JETMOE = Adapter("JetMoE", "JetMoeMoE", inspect, remember, forward, "attention experts left alone", left=("JetMoeMoA",))
