"""Transformers' own experts, in each of the ways it has to compute them."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moestro.bench.layers import Layer, LayerSpec, StoredExperts
from moestro.bench.peers.variant import Bind, Call, Cost, Variant, cost, dense_cost, gathering_cost
from moestro.types import Routing


def transformers_module(layer: Layer, implementation: str, stored: StoredExperts) -> nn.Module:
    """Transformers' own experts of this layer's family around `stored`; nothing is copied.

    Llama 4's is its `Llama4TextMoe` without the work of router and shared expert.
    """
    from transformers import AutoConfig

    spec, family = layer.spec, layer.spec.family
    modeling: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    is_llama4 = family == "llama4"
    name = "Llama4TextMoe" if is_llama4 else next(name for name in vars(modeling) if name.endswith("Experts"))
    config = AutoConfig.for_model("llama4_text" if is_llama4 else family)
    config.hidden_size, config.num_experts_per_tok = spec.hidden_size, spec.top_k
    for sizes, size in (_INTERMEDIATE, spec.intermediate_size), (_EXPERTS, layer.num_experts):
        for known in sizes:  # a family reads one of them
            setattr(config, known, size)
    config._experts_implementation = implementation
    with torch.device("meta"):
        module: Any = getattr(modeling, name)(config)
    if is_llama4:
        module.router, module.shared_expert = _GivenScores(), _NoSharedExpert()
    tensors = {
        "gate_up_proj": stored.gate_up,
        "down_proj": stored.down,
        "gate_up_proj_bias": stored.gate_up_bias,
        "down_proj_bias": stored.down_bias,
    }
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    (module.experts if is_llama4 else module).load_state_dict(given, assign=True)
    found: nn.Module = module.eval().requires_grad_(False)
    return found


_INTERMEDIATE = ("intermediate_size", "moe_intermediate_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class _GivenScores(nn.Module):
    """Stands where Llama 4's router stands and returns scores made beforehand."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.scores, self.scores

    scores: Tensor


class _NoSharedExpert(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


def bind_module(layer: Layer, module: Any) -> Bind:
    """How a module of this layer is called, whoever computes it."""

    def call_llama4(x: Tensor, scores: Tensor) -> Tensor:
        module.router.scores = scores
        output: Tensor = module(x)[0]
        return output

    def bind(x: Tensor, routing: Routing) -> Call:
        narrow = routing.routing_weights.to(layer.dtype)
        if layer.spec.family == "llama4":
            scores = torch.zeros(routing.num_tokens, layer.num_experts, dtype=layer.dtype, device=layer.device)
            return partial(call_llama4, x, scores.scatter_(1, routing.expert_ids, narrow))
        return partial(module, x, routing.expert_ids, narrow if layer.spec.narrow_weights else routing.routing_weights)

    return bind


def _transformers(implementation: str) -> Variant:
    def refuses(spec: LayerSpec, dtype: torch.dtype) -> str | None:
        lacking = spec.family == "llama4" and implementation != "eager"
        return "Transformers has one way to compute Llama 4" if lacking else None

    def prepare(layer: Layer) -> Bind:
        return bind_module(layer, transformers_module(layer, implementation, layer.stored))

    def cost_of(layer: Layer, routing: Routing) -> Cost:
        if layer.spec.family == "llama4":
            return dense_cost(layer, routing)
        return (gathering_cost if implementation == "batched_mm" else cost)(layer, routing)

    return Variant(implementation, refuses, prepare, cost_of, "cuda" if implementation in _GPU_ONLY else None)


_GPU_ONLY = ("deepgemm", "sonicmoe")
_REGISTRY: Any = importlib.import_module("transformers.integrations.moe")

TRANSFORMERS = tuple(
    map(_transformers, dict.fromkeys(("eager", *(n for n in _REGISTRY.ALL_EXPERTS_FUNCTIONS if n != "moestro"))))
)
"""Transformers' ways to compute an experts module, its plain one first."""
