"""The gradient of expert_mlp in closed form, for graphs where the primitive is one opaque node.

Eager calls are differentiated by autograd itself; tests hold the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moestro.ops.grouping import plain as grouping
from moestro.reference import activate
from moestro.types import Activation, Routing
from moestro.weights import ExpertWeights


@dataclass(frozen=True, eq=False)
class Gradients:
    """Of x [T, H], routing_weights [T, K], gate_up, down and the biases (None without one); shapes as the inputs'."""

    x: Tensor
    routing_weights: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def expert_mlp_backward(grad: Tensor, x: Tensor, routing: Routing, weights: ExpertWeights) -> Gradients:
    """Gradients of sum(grad * expert_mlp(x, routing, weights)); the forward is recomputed expert by expert."""
    grads = Gradients(
        torch.zeros_like(x),
        torch.zeros_like(routing.routing_weights),
        torch.zeros_like(weights.gate_up.data),
        torch.zeros_like(weights.down.data),
        None if weights.gate_up_bias is None else torch.zeros_like(weights.gate_up_bias),
        None if weights.down_bias is None else torch.zeros_like(weights.down_bias),
    )
    order = grouping.group_by_expert(routing.expert_ids, weights.num_experts)
    pairs = order.token_ids * routing.top_k + order.slots
    for e, (start, stop) in enumerate(pairwise(order.offsets.tolist())):
        if start < stop:
            _one_expert(grad, x, routing, weights, grads, e, order.token_ids[start:stop], pairs[start:stop])
    return grads


def _one_expert(
    grad: Tensor,
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    grads: Gradients,
    e: int,
    tokens: Tensor,
    pairs: Tensor,
) -> None:
    gate_up, down = weights.gate_up.data[e].to(x.dtype), weights.down.data[e].to(x.dtype)
    w = routing.routing_weights.reshape(-1)[pairs, None]
    on_input = routing.weight_on == "input"
    rows = x[tokens]
    fed = (rows * w).to(x.dtype) if on_input else rows
    h = fed @ gate_up.T
    if weights.gate_up_bias is not None:
        h = h + weights.gate_up_bias[e].to(h.dtype)
    a = activate(h, weights.activation)

    grad_rows = grad[tokens]
    grad_z = grad_rows if on_input else (grad_rows * w).to(grad.dtype)
    grad_h = activation_backward(h, grad_z @ down, weights.activation)
    grad_fed = grad_h @ gate_up
    grads.gate_up[e] = grad_h.T @ fed
    grads.down[e] = grad_z.T @ a
    if grads.gate_up_bias is not None:
        grads.gate_up_bias[e] = grad_h.sum(0)
    if grads.down_bias is not None:
        grads.down_bias[e] = grad_z.sum(0)
    grads.x.index_add_(0, tokens, (grad_fed * w).to(x.dtype) if on_input else grad_fed)
    if on_input:
        by_pair = (grad_fed * rows).sum(1)
    else:
        z = a @ down.T
        if weights.down_bias is not None:
            z = z + weights.down_bias[e].to(z.dtype)
        by_pair = (grad_rows * z).sum(1)
    grads.routing_weights.reshape(-1)[pairs] = by_pair.to(w.dtype)


def activation_backward(h: Tensor, grad: Tensor, activation: Activation) -> Tensor:
    """Gradient for h of sum(grad * activate(h, activation)), for every kind that is data."""
    limit = activation.limit
    if not activation.gated:
        inside = 1.0 if limit is None else (h <= limit).to(h.dtype)
        clamped = h if limit is None else h.clamp(max=limit)
        return grad * _slope(clamped, activation) * inside
    gate, up = (h[..., ::2], h[..., 1::2]) if activation.interleaved else h.chunk(2, dim=-1)
    grad_up, grad_gate = grad, grad
    if limit is not None:
        grad_up, grad_gate = grad * (up.abs() <= limit), grad * (gate <= limit)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    plain = Activation(activation.kind, gated=False, alpha=activation.alpha)
    grad_up = grad_up * activate(gate, plain)
    grad_gate = grad_gate * (up + activation.up_offset) * _slope(gate, activation)
    if activation.interleaved:
        return torch.stack([grad_gate, grad_up], dim=-1).flatten(-2)
    return torch.cat([grad_gate, grad_up], dim=-1)


def _slope(z: Tensor, activation: Activation) -> Tensor:
    """The derivative of the named function at z."""
    kind = activation.kind
    if kind == "silu":
        s = torch.sigmoid(activation.alpha * z)
        return s * (1 + activation.alpha * z * (1 - s))
    if kind in ("gelu", "gelu-tanh"):
        approximate = "tanh" if kind == "gelu-tanh" else "none"
        slope: Tensor = torch.ops.aten.gelu_backward(torch.ones_like(z), z, approximate=approximate)
        return slope
    if kind == "sigmoid":
        s = torch.sigmoid(z)
        return s * (1 - s)
    if kind == "tanh":
        return 1 - torch.tanh(z).square()
    return {"relu": (z > 0).to(z.dtype), "relu2": 2 * torch.relu(z), "identity": torch.ones_like(z)}[kind]
