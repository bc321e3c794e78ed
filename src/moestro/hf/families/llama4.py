"""Llama 4: the weight of a token scales the expert's input, and only the chosen experts need to run.

Transformers multiplies every token by every expert's score, which is zero for the ones not chosen, and runs all
experts on all tokens. A zero input gives a zero output here (no biases), so the chosen ones are the whole sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from moestro.hf import experts
from moestro.hf.experts import Flags, Plan
from moestro.hf.families.base import Adapter, plain, remember
from moestro.hf.store import Projections, stored_weights

TRANSPOSED = Flags(transposed=True)


def inspect(module: Any) -> Plan:
    inner = _inner(module)
    experts.check_dense(inner, inner.parameters())
    return experts.inspect(inner, TRANSPOSED)


def settle(module: Any, plan: Plan) -> Plan:
    return remember(module, experts.settle(_inner(module), plan))


def forward(module: Any, hidden_states: Tensor, *, strategy: str) -> tuple[Tensor, Tensor]:
    """Llama4TextMoe: hidden_states [..., H] -> (output [T, H], router_logits [T, E])."""
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = module.router(rows)
    weights, ids = scores.topk(module.top_k, dim=-1)
    inner = _inner(module)
    expert_weights = stored_weights(inner) or experts.expert_weights(inner, experts.plan_of(inner, TRANSPOSED))
    routing = replace(experts.model_routing(ids, weights), weight_on="input")
    routed = experts.run_rows(rows, routing, expert_weights, strategy)
    return module.shared_expert(rows) + routed, logits


def _inner(module: Any) -> Any:
    return plain(module, "experts", "Llama4TextExperts")


def projections(module: Any, plan: Plan) -> Projections:
    return replace(experts.projections(_inner(module), plan), holder="experts")


LLAMA4 = Adapter(
    "Llama 4", "Llama4TextMoe", inspect, settle, forward, "transposed, weight on the input", projections=projections
)
