"""What is timed: moestro as a user gets it from `accelerate`, and what they would otherwise run.

To add a peer, write its `refuses` and `prepare`, and append a `Variant` to `PEERS`. A peer works on the very tensors
of `Layer.stored`; what it needs beyond them it says in `cost`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moestro
from moestro.bench.layers import Layer, LayerSpec, StoredExperts, active_bytes, flops, working_bytes
from moestro.errors import invalid_input
from moestro.ops.expert_mlp.tuning import parse_strategy
from moestro.reference import activate
from moestro.types import Routing

Call = Callable[[], Tensor]
Bind = Callable[[Tensor, Routing], Call]
Refuses = Callable[[LayerSpec, torch.dtype], str | None]


@dataclass(frozen=True)
class Cost:
    """What one call takes at the least: FLOP, bytes moved, and bytes of memory beyond weights and output."""

    flops: int
    nbytes: int
    workspace: int


@dataclass(frozen=True)
class Variant:
    """One way to compute a layer.

    Attributes:
        name: what is printed, and what `--peers` takes.
        refuses: None, or the sentence why it cannot run such a layer here.
        prepare: maps a layer to a function (x, routing) -> call; both run before the clock starts.
        cost: decides whether a call fits into memory and time.
        device: the only type of device it runs on, or None for any.
    """

    name: str
    refuses: Refuses
    prepare: Callable[[Layer], Bind]
    cost: Callable[[Layer, Routing], Cost]
    device: str | None = None


def _cost(layer: Layer, routing: Routing) -> Cost:
    workspace = working_bytes(layer.spec, layer.dtype, routing.expert_ids.numel())
    return Cost(flops(layer.spec, routing), active_bytes(layer, routing), workspace)


def _gathering_cost(layer: Layer, routing: Routing) -> Cost:
    """Copies the weights of every (token, expert) pair: read, written, read again."""
    copies = routing.expert_ids.numel() * layer.weights.bytes_per_expert
    return Cost(flops(layer.spec, routing), 3 * copies, copies)


def _dense_cost(layer: Layer, routing: Routing) -> Cost:
    """Every expert on every token."""
    spec, rows = layer.spec, routing.num_tokens * layer.num_experts
    workspace = rows * (2 * spec.hidden_size + 4 * spec.intermediate_size) * layer.dtype.itemsize
    nbytes = layer.num_experts * layer.weights.bytes_per_expert
    return Cost(6 * spec.hidden_size * spec.intermediate_size * rows, nbytes, workspace)


def ours(strategy: str) -> Variant:
    """Transformers' own module after `moestro.accelerate(module, strategy)`; "auto" is called plainly "moestro".

    Raises:
        InvalidInputError: no such strategy.
    """
    parse_strategy(strategy)

    def prepare(layer: Layer) -> Bind:
        accelerate: Any = moestro.accelerate
        return _bind(layer, accelerate(transformers_module(layer, "eager", k_contiguous(layer)), strategy))

    name = "moestro" if strategy == "auto" else f"moestro-{strategy}"
    return Variant(name, _needs_transformers, prepare, _dense_cost if strategy == "all_experts" else _cost)


def _needs_transformers(spec: LayerSpec, dtype: torch.dtype) -> str | None:
    return None if importlib.util.find_spec("transformers") else "transformers is not installed"


def k_contiguous(layer: Layer) -> StoredExperts:
    """The experts in Transformers' shapes over moestro's tensors: a transposed family as `accelerate` leaves it."""
    stored = layer.stored
    gate_up, down = (dense.tensors[0] for dense in (layer.weights.gate_up, layer.weights.down))
    if layer.spec.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    return replace(stored, gate_up=gate_up, down=down)


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


def _bind(layer: Layer, module: nn.Module) -> Bind:
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
    return _bind(layer, transformers_module(layer, implementation, layer.stored))


def _transformers_refuses(implementation: str, spec: LayerSpec, dtype: torch.dtype) -> str | None:
    if spec.family == "llama4" and implementation != "eager":
        return "Transformers has one way to compute Llama 4"
    return _needs_transformers(spec, dtype)


def _transformers_cost(implementation: str, layer: Layer, routing: Routing) -> Cost:
    if layer.spec.family == "llama4":
        return _dense_cost(layer, routing)
    return (_gathering_cost if implementation == "batched_mm" else _cost)(layer, routing)


def _transformers(implementation: str) -> Variant:
    return Variant(
        implementation,
        partial(_transformers_refuses, implementation),
        partial(_prepare_transformers, implementation),
        partial(_transformers_cost, implementation),
        "cuda" if implementation in _GPU_ONLY else None,
    )


_GPU_ONLY = ("deepgemm", "sonicmoe")


def _implementations() -> list[str]:
    """Transformers' ways to compute an experts module, its plain one first; none where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return []
    registry: Any = importlib.import_module("transformers.integrations.moe")
    return ["eager", *(name for name in registry.ALL_EXPERTS_FUNCTIONS if name not in ("eager", "moestro"))]


def _prepare_torch_grouped_mm(layer: Layer) -> Bind:
    stored, activation = layer.stored, layer.spec.activation
    gate_up, down = (t if layer.spec.transposed else t.transpose(1, 2) for t in (stored.gate_up, stored.down))

    def call(x: Tensor, routing: Routing) -> Tensor:
        top_k = routing.top_k
        experts, order = routing.expert_ids.reshape(-1).sort()
        offsets = torch.bincount(experts, minlength=layer.num_experts).cumsum(0).int()
        w = routing.routing_weights.reshape(-1)[order, None].to(x.dtype)
        rows = x[order // top_k]
        hidden = F.grouped_mm(rows * w if routing.weight_on == "input" else rows, gate_up, offs=offsets)
        if stored.gate_up_bias is not None:
            hidden += stored.gate_up_bias[experts]
        rows = F.grouped_mm(activate(hidden, activation), down, offs=offsets)
        if stored.down_bias is not None:
            rows += stored.down_bias[experts]
        if routing.weight_on == "output":
            rows = rows * w
        back = torch.empty_like(rows).index_copy_(0, order, rows)
        return back.view(-1, top_k, rows.shape[-1]).sum(1)

    return lambda x, routing: partial(call, x, routing)


def _torch_grouped_mm_refuses(spec: LayerSpec, dtype: torch.dtype) -> str | None:
    return None if hasattr(F, "grouped_mm") else f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"


PEERS = {
    peer.name: peer
    for peer in (
        *map(_transformers, _implementations()),
        Variant("torch-grouped_mm", _torch_grouped_mm_refuses, _prepare_torch_grouped_mm, _cost),
    )
}
"""Every peer by name: all of Transformers' implementations, and the layer written by hand on F.grouped_mm."""


def named_peers(names: list[str]) -> list[Variant]:
    """The peers of these names; "all" and "none" mean what they say.

    Raises:
        InvalidInputError: an unknown name.
    """
    if names in (["all"], ["none"]):
        return list(PEERS.values()) if names == ["all"] else []
    for name in names:
        if name not in PEERS:
            raise invalid_input(
                "bench layer", got=f"peer {name!r}", needs=f"one of {', '.join(PEERS)}", fix="Or 'all', or 'none'."
            )
    return [PEERS[name] for name in names]
