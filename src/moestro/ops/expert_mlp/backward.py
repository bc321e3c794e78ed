"""The gradient of expert_mlp in closed form, for graphs where the primitive is one opaque node.

Eager calls are differentiated by autograd itself; tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moestro.ops import grouping
from moestro.ops.expert_mlp.stored import product, transposed_product
from moestro.ops.expert_mlp.tuning import compute_dtype, dense_stack
from moestro.reference import activate
from moestro.types import Activation, Routing
from moestro.weights import ExpertWeights


class Gradients(NamedTuple):
    """Of x [T, H], routing_weights [T, K], gate_up, down and the biases; None where none was asked for."""

    x: Tensor | None
    routing_weights: Tensor | None
    gate_up: Tensor | None
    down: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


class _Group(NamedTuple):
    """The rows of one expert, in the dtype that everything is computed in."""

    expert: int
    tokens: Tensor
    pairs: Tensor
    x: Tensor
    grad: Tensor
    w: Tensor
    on_input: bool


def expert_mlp_backward(
    grad: Tensor, x: Tensor, routing: Routing, weights: ExpertWeights, needed: Sequence[bool]
) -> Gradients:
    """Gradients of sum(grad * expert_mlp(x, routing, weights)), the forward recomputed expert by expert.

    Computed in float32 (float64 if an input is), the experts read panel by panel. `needed` says of which of the fields
    of `Gradients`; of gate_up and down only where they are one tensor of a dense format.
    """
    stacks = (dense_stack(weights.gate_up), dense_stack(weights.down))
    wide = torch.promote_types(compute_dtype(x, weights), torch.float32)
    shapes = (x.to(wide), routing.routing_weights, *stacks, weights.gate_up_bias, weights.down_bias)
    grads = Gradients(
        *(torch.zeros_like(t) if want and t is not None else None for t, want in zip(shapes, needed, strict=True))
    )
    order = grouping.run(routing.expert_ids, weights.num_experts)
    pairs = order.token_ids * routing.top_k + order.slots
    flat = routing.routing_weights.reshape(-1)
    on_input = routing.weight_on == "input"
    for e, (start, stop) in enumerate(pairwise(order.offsets.tolist())):
        if start < stop:
            t, p = order.token_ids[start:stop], pairs[start:stop]
            group = _Group(e, t, p, x[t].to(wide), grad[t].to(wide), flat[p, None].to(wide), on_input)
            _one_expert(group, weights, grads)
    return grads if grads.x is None else grads._replace(x=grads.x.to(x.dtype))


def _one_expert(group: _Group, weights: ExpertWeights, grads: Gradients) -> None:
    e, w, wide = group.expert, group.w, group.x.dtype
    gate_up, down = weights.gate_up.blocks(e), weights.down.blocks(e)
    fed = group.x * w if group.on_input else group.x
    h = product(fed, gate_up)
    if weights.gate_up_bias is not None:
        h = h + weights.gate_up_bias[e].to(wide)
    a = activate(h, weights.activation)

    grad_z = group.grad if group.on_input else group.grad * w
    grad_h = activation_backward(h, transposed_product(grad_z, down), weights.activation)
    if grads.gate_up is not None:
        grads.gate_up[e] = grad_h.T @ fed
    if grads.down is not None:
        grads.down[e] = grad_z.T @ a
    if grads.gate_up_bias is not None:
        grads.gate_up_bias[e] = grad_h.sum(0)
    if grads.down_bias is not None:
        grads.down_bias[e] = grad_z.sum(0)
    if grads.x is not None or (grads.routing_weights is not None and group.on_input):
        grad_fed = transposed_product(grad_h, gate_up)
        if grads.x is not None:
            grads.x.index_add_(0, group.tokens, grad_fed * w if group.on_input else grad_fed)
        if grads.routing_weights is not None and group.on_input:
            grads.routing_weights.view(-1)[group.pairs] = (grad_fed * group.x).sum(1).to(grads.routing_weights.dtype)
    if grads.routing_weights is not None and not group.on_input:
        z = product(a, down)
        if weights.down_bias is not None:
            z = z + weights.down_bias[e].to(wide)
        grads.routing_weights.view(-1)[group.pairs] = (group.grad * z).sum(1).to(grads.routing_weights.dtype)


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


def _silu(z: Tensor, activation: Activation) -> Tensor:
    s = torch.sigmoid(activation.alpha * z)
    return s * (1 + activation.alpha * z * (1 - s))


def _gelu(approximate: str, z: Tensor, activation: Activation) -> Tensor:
    slope: Tensor = torch.ops.aten.gelu_backward(torch.ones_like(z), z, approximate=approximate)
    return slope


def _sigmoid(z: Tensor, activation: Activation) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 - s)


SLOPES: dict[str, Callable[[Tensor, Activation], Tensor]] = {
    "silu": _silu,
    "gelu": partial(_gelu, "none"),
    "gelu-tanh": partial(_gelu, "tanh"),
    "relu": lambda z, activation: (z > 0).to(z.dtype),
    "relu2": lambda z, activation: 2 * torch.relu(z),
    "sigmoid": _sigmoid,
    "tanh": lambda z, activation: 1 - torch.tanh(z).square(),
    "identity": lambda z, activation: torch.ones_like(z),
}
"""By kind: the derivative of the named function at z. A graph with a gradient refuses the kinds that are not here."""


def _slope(z: Tensor, activation: Activation) -> Tensor:
    return SLOPES[activation.kind](z, activation)
