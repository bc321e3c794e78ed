"""Doge: each expert is one row of two embeddings, an expert MLP with an intermediate size of 1.

Experts are the cells of a num_keys x num_keys grid; a token scores the two axes apart and adds the scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moestro.formats import dense
from moestro.hf import experts
from moestro.hf.activation import recognise
from moestro.hf.experts import Plan
from moestro.hf.families.base import Adapter, plain, recall, remember
from moestro.weights import ExpertWeights


def inspect(module: Any) -> Plan:
    experts.check_dense(module, _embeddings(module))
    return Plan(recognise(module.act_fn, False))


def route(logits: Tensor, num_keys: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Scores [2, T, num_keys] of the two axes -> ids and scores [T, K] of the best cells."""
    (rows, columns), (row_ids, column_ids) = logits.topk(num_keys, dim=-1)
    cells = (rows[..., :, None] + columns[..., None, :]).flatten(-2)
    cell_ids = (row_ids[..., :, None] * num_keys + column_ids[..., None, :]).flatten(-2)
    scores, best = cells.topk(top_k, dim=-1)
    return cell_ids.gather(-1, best), scores


def forward(module: Any, hidden_states: Tensor, *, strategy: str, **_: object) -> tuple[Tensor, Tensor]:
    """DogeCDMoE: hidden_states [B, S, H] -> (output [B, S, H], router_logits [2, B * S, num_keys])."""
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    # Two halves of the flat result, not of each token's row: the family's own order, which its checkpoints rely on.
    logits = module.router_gate(hidden_states).view(2, len(rows), int(module.num_keys))
    ids, scores = route(logits, int(module.num_keys), int(module.top_k))
    routing_weights = torch.softmax(scores, dim=-1)
    if module.norm_topk_prob:
        routing_weights = routing_weights / routing_weights.sum(dim=-1, keepdim=True)
    into, out = _embeddings(module)
    weights = ExpertWeights(
        dense(into.unsqueeze(1)), dense(out.unsqueeze(2)), activation=recall(module, inspect).activation
    )
    routed = experts.apply(rows, ids, routing_weights, weights, strategy).view(hidden_states.shape)
    gate = module.act_fn(module.gate_proj(hidden_states))
    shared = module.down_proj(gate * module.up_proj(hidden_states))
    return shared + routed, logits


def _embeddings(module: Any) -> tuple[Tensor, Tensor]:
    return plain(module, "down_embed", nn.Embedding).weight, plain(module, "up_embed", nn.Embedding).weight


DOGE = Adapter("Doge", "DogeCDMoE", inspect, remember, forward, "embedding rows, not gated")
