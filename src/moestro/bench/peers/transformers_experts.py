"""Transformers' own experts, in each of the ways it has to compute them."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moestro.bench.layers import Layer, LayerSpec, StoredExperts
from moestro.bench.peers.variant import Bind, Call, Cost, Variant, cost, dense_cost, gathering_cost
from moestro.types import Routing

# family -> experts class of transformers.models.<family>, config class, config names of I and of E
_FAMILIES = {
    "olmoe": ("OlmoeExperts", "OlmoeConfig", "intermediate_size", "num_experts"),
    "qwen3_moe": ("Qwen3MoeExperts", "Qwen3MoeConfig", "moe_intermediate_size", "num_experts"),
    "mixtral": ("MixtralExperts", "MixtralConfig", "intermediate_size", "num_local_experts"),
    "gpt_oss": ("GptOssExperts", "GptOssConfig", "intermediate_size", "num_local_experts"),
    "deepseek_v3": ("DeepseekV3Experts", "DeepseekV3Config", "moe_intermediate_size", "n_routed_experts"),
    "llama4": ("Llama4TextMoe", "Llama4TextConfig", "intermediate_size", "num_local_experts"),
}


def transformers_module(layer: Layer, implementation: str, stored: StoredExperts) -> nn.Module:
    """Transformers' own experts of this layer's family around `stored`; nothing is copied.

    Llama 4's is its `Llama4TextMoe` without the work of router and shared expert.
    """
    class_name, config_name, intermediate, experts = _FAMILIES[layer.spec.family]
    package = f"transformers.models.{layer.spec.family}"
    modeling: Any = importlib.import_module(f"{package}.modeling_{layer.spec.family}")
    configuration: Any = importlib.import_module(f"{package}.configuration_{layer.spec.family}")
    config = getattr(configuration, config_name)(
        hidden_size=layer.spec.hidden_size,
        num_experts_per_tok=layer.spec.top_k,
        **{intermediate: layer.spec.intermediate_size, experts: layer.num_experts},
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        module: nn.Module = getattr(modeling, class_name)(config)
    holder: Any = module
    if layer.spec.family == "llama4":
        holder = module.experts
        module.router, module.shared_expert = _GivenScores(), _NoSharedExpert()
    for name, tensor in (
        ("gate_up_proj", stored.gate_up),
        ("down_proj", stored.down),
        ("gate_up_proj_bias", stored.gate_up_bias),
        ("down_proj_bias", stored.down_bias),
    ):
        if tensor is not None:
            setattr(holder, name, nn.Parameter(tensor, requires_grad=False))
    return module.eval()


class _GivenScores(nn.Module):
    """Stands where Llama 4's router stands and returns scores made beforehand."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.scores, self.scores

    scores: Tensor


class _NoSharedExpert(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


def bind_module(layer: Layer, module: nn.Module) -> Bind:
    """How a module of this layer is called, whoever computes it."""
    if layer.spec.family == "llama4":
        return _bind_llama4(layer, module)

    def bind(x: Tensor, routing: Routing) -> Call:
        weights = routing.routing_weights
        return partial(module, x, routing.expert_ids, weights.to(layer.dtype) if layer.spec.narrow_weights else weights)

    return bind


def _bind_llama4(layer: Layer, moe: Any) -> Bind:
    def call(x: Tensor, scores: Tensor) -> Tensor:
        moe.router.scores = scores
        output: Tensor = moe(x)[0]
        return output

    def bind(x: Tensor, routing: Routing) -> Call:
        scores = torch.zeros(routing.num_tokens, layer.num_experts, dtype=layer.dtype, device=layer.device)
        scores.scatter_(1, routing.expert_ids, routing.routing_weights.to(layer.dtype))
        return partial(call, x, scores)

    return bind


def _prepare_transformers(implementation: str, layer: Layer) -> Bind:
    return bind_module(layer, transformers_module(layer, implementation, layer.stored))


def _transformers_refuses(implementation: str, spec: LayerSpec, dtype: torch.dtype) -> str | None:
    if spec.family == "llama4" and implementation != "eager":
        return "Transformers has one way to compute Llama 4"
    return None


def _transformers_cost(implementation: str, layer: Layer, routing: Routing) -> Cost:
    if layer.spec.family == "llama4":
        return dense_cost(layer, routing)
    return (gathering_cost if implementation == "batched_mm" else cost)(layer, routing)


def _transformers(implementation: str) -> Variant:
    return Variant(
        implementation,
        partial(_transformers_refuses, implementation),
        partial(_prepare_transformers, implementation),
        partial(_transformers_cost, implementation),
        "cuda" if implementation in _GPU_ONLY else None,
        absent=_absent,
    )


def _absent() -> str | None:
    return None if importlib.util.find_spec("transformers") else "transformers is not installed"


_GPU_ONLY = ("deepgemm", "sonicmoe")


def _implementations() -> list[str]:
    """Transformers' ways to compute an experts module, its plain one first; none where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return []
    registry: Any = importlib.import_module("transformers.integrations.moe")
    return ["eager", *(name for name in registry.ALL_EXPERTS_FUNCTIONS if name not in ("eager", "moestro"))]


TRANSFORMERS = tuple(map(_transformers, _implementations()))
