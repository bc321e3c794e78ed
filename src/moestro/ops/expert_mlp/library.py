"""torch.ops.moestro.expert_mlp: the primitive as one opaque node for torch.compile and torch.export.

Eager calls do not pass through here (a torch.library call costs microseconds that show at T = 1); what runs inside
the node is `moestro.ops.expert_mlp.run` all the same, so settings and strategies hold at run time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moestro.errors import unsupported
from moestro.formats import dense
from moestro.formats.dense import DENSE_FORMATS
from moestro.ops.expert_mlp.backward import expert_mlp_backward
from moestro.types import Activation, Routing
from moestro.weights import ExpertWeights


def traced(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> Tensor:
    """Record the node in the graph being traced.

    Raises:
        UnsupportedError: the weights carry a Python function, which a graph cannot hold.
    """
    if any(packed.format not in DENSE_FORMATS for packed in (weights.gate_up, weights.down)):
        raise unsupported(
            "expert_mlp",
            got=f"torch.compile with weights stored as {weights.gate_up.format.name} and {weights.down.format.name}",
            needs="dense formats, whose dtype is their whole description",
            fix="Call it outside the graph.",
        )
    if weights.activation.function is not None or weights.output_norm is not None:
        raise unsupported(
            "expert_mlp",
            got="torch.compile with a custom activation function or an output_norm",
            needs="an activation that is data",
            fix="Describe it with Activation's fields, or keep the layer out of the graph (torch.compiler.disable).",
        )
    out: Tensor = torch.ops.moestro.expert_mlp(
        x,
        routing.expert_ids,
        routing.routing_weights,
        weights.gate_up.data,
        weights.down.data,
        weights.gate_up_bias,
        weights.down_bias,
        routing.weight_on,
        encode(weights.activation),
        strategy,
    )
    return out


_READS_IDS = (torch.Tag.cudagraph_unsafe,)
"""The walks read the ids on the host, which a captured CUDA graph cannot."""


def encode(activation: Activation) -> str:
    """An `Activation` without a function as a string; `decode` reads it back."""
    a = activation
    limit = "none" if a.limit is None else repr(float(a.limit))
    return f"{a.kind}|{int(a.gated)}|{int(a.interleaved)}|{float(a.alpha)!r}|{limit}|{float(a.up_offset)!r}"


def decode(text: str) -> Activation:
    """The `Activation` that `encode` wrote."""
    kind, gated, interleaved, alpha, limit, up_offset = text.split("|")
    return Activation(
        kind=kind,  # type: ignore[arg-type]
        gated=gated == "1",
        interleaved=interleaved == "1",
        alpha=float(alpha),
        limit=None if limit == "none" else float(limit),
        up_offset=float(up_offset),
    )


@torch.library.custom_op("moestro::expert_mlp", mutates_args=(), tags=_READS_IDS)
def _expert_mlp(
    x: Tensor,
    expert_ids: Tensor,
    routing_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    weight_on: str,
    activation: str,
    strategy: str,
) -> Tensor:
    from moestro.ops.expert_mlp import run

    weights = ExpertWeights(dense(gate_up), dense(down), gate_up_bias, down_bias, decode(activation))
    return run(x, Routing(expert_ids, routing_weights, weight_on), weights, strategy)  # type: ignore[arg-type]


@_expert_mlp.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(x.shape)


_DIFFERENTIABLE = (0, 2, 3, 4, 5, 6)
"""Positions of x, routing_weights, gate_up, down and the biases among the arguments."""


@torch.library.custom_op("moestro::expert_mlp_backward", mutates_args=(), tags=_READS_IDS)
def _expert_mlp_backward(
    grad: Tensor,
    x: Tensor,
    expert_ids: Tensor,
    routing_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    weight_on: str,
    activation: str,
    needed: list[bool],
) -> list[Tensor]:
    weights = ExpertWeights(dense(gate_up), dense(down), gate_up_bias, down_bias, decode(activation))
    routing = Routing(expert_ids, routing_weights, weight_on)  # type: ignore[arg-type]
    g = expert_mlp_backward(grad, x, routing, weights, needed)
    found = (g.x, g.routing_weights, g.gate_up, g.down, g.gate_up_bias, g.down_bias)
    return [t.contiguous() for t in found if t is not None]


@_expert_mlp_backward.register_fake
def _(grad: Tensor, x: Tensor, expert_ids: Tensor, *rest: Any) -> list[Tensor]:
    wanted = [t for t, want in zip((x, *rest[:5]), rest[-1], strict=True) if want]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in wanted]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.words = inputs[7:9]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needed = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    grads = iter(torch.ops.moestro.expert_mlp_backward(grad, *ctx.saved_tensors, *ctx.words, needed))
    return tuple(next(grads) if i in _DIFFERENTIABLE and ctx.needs_input_grad[i] else None for i in range(10))


_expert_mlp.register_autograd(_backward, setup_context=_setup_context)
