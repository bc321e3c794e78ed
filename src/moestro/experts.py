"""The routed experts as a module: parameters, an activation, and one call of the primitive."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moestro.errors import invalid_input
from moestro.ops.expert_mlp import expert_mlp, run, tuning
from moestro.types import SWIGLU, Activation, Routing
from moestro.weights import ExpertWeights


class Experts(nn.Module):
    """E expert MLPs, of which each token uses those its routing names.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.
        activation: gated SwiGLU unless said otherwise.
        bias: whether both projections have one.
        strategy: as for `moestro.expert_mlp`.

    Attributes:
        gate_up: parameter [E, 2 * I, H] ([E, I, H] for a plain activation).
        down: parameter [E, H, I].
        gate_up_bias, down_bias: parameters [E, 2 * I] ([E, I]) and [E, H], or None.

    Raises:
        InvalidInputError: a size below 1, or an unknown strategy.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation = SWIGLU,
        bias: bool = False,
        strategy: str = "auto",
    ) -> None:
        super().__init__()
        if min(num_experts, hidden_size, intermediate_size) < 1:
            raise invalid_input(
                "Experts",
                got=f"num_experts={num_experts}, hidden_size={hidden_size}, intermediate_size={intermediate_size}",
                needs="all at least 1",
                fix="The order is num_experts, hidden_size, intermediate_size.",
            )
        tuning.parse_strategy(strategy, "Experts")
        rows = intermediate_size * (2 if activation.gated else 1)
        self.activation = activation
        self.strategy = strategy
        self.gate_up = nn.Parameter(torch.empty(num_experts, rows, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, rows)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_weights(cls, weights: ExpertWeights, strategy: str = "auto") -> Experts:
        """A module over existing dense weights; nothing is copied. Biases and strides stay as they are.

        Raises:
            InvalidInputError: the weights carry an output_norm, which is a module of its own.
        """
        if weights.output_norm is not None:
            raise invalid_input(
                "Experts.from_weights",
                got="weights with an output_norm",
                needs="weights without one",
                fix="Call moestro.expert_mlp(x, routing, weights) directly.",
            )
        e, _, h = weights.gate_up.shape
        with torch.device("meta"):
            experts = cls(e, h, weights.intermediate_size, weights.activation, strategy=strategy)
        tensors = {"gate_up": weights.gate_up.data, "down": weights.down.data}
        tensors |= {"gate_up_bias": weights.gate_up_bias, "down_bias": weights.down_bias}  # type: ignore[dict-item]
        for name, tensor in tensors.items():
            parameter = None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
            setattr(experts, name, parameter)
        return experts

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan in), as nn.Linear; biases zero."""
        for weight in (self.gate_up, self.down):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    @property
    def weights(self) -> ExpertWeights:
        """The parameters as the value the primitive takes."""
        return ExpertWeights.from_dense(
            self.gate_up, self.down, self.gate_up_bias, self.down_bias, activation=self.activation
        )

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """y [T, H] for x [T, H]; everything is checked as in `moestro.expert_mlp`."""
        return expert_mlp(x, routing, self.weights, self.strategy)

    def trusted(self, x: Tensor, routing: Routing) -> Tensor:
        """`forward` for a routing that is known to fit, without checking its values."""
        return run(x, routing, self.weights, self.strategy)

    def extra_repr(self) -> str:
        e, _, h = self.gate_up.shape
        return f"num_experts={e}, hidden_size={h}, intermediate_size={self.down.shape[2]}, strategy={self.strategy!r}"
