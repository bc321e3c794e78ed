"""Shared experts: the part of a layer that every token passes through."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.errors import invalid_input
from moestro.reference import activate
from moestro.types import SWIGLU, Activation


class SharedExperts(nn.Module):
    """S experts that every token uses; their outputs are added.

    Side by side they are one MLP of intermediate size S * I, and are stored and computed as one.

    Args:
        hidden_size: H.
        intermediate_size: I, of one shared expert.
        num_shared_experts: S.
        activation: an `Activation` or its name: SwiGLU unless said otherwise; gate and up stand one after the other.
        gate: whether the output is multiplied by sigmoid(g . x), as in Qwen2-MoE.
        bias: whether the projections have one.
        device, dtype: of the parameters, as torch modules have it.

    Attributes:
        gate_up: parameter [2 * S * I, H] ([S * I, H] for a plain activation).
        down: parameter [H, S * I].
        output_gate: parameter [1, H], or None.
        gate_up_bias, down_bias: parameters [2 * S * I] and [H], or None.

    Raises:
        InvalidInputError: a size below 1, an unknown activation, or an interleaved one.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_shared_experts: int = 1,
        activation: Activation | str = SWIGLU,
        gate: bool = False,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation = Activation.of(activation, "SharedExperts")
        if min(hidden_size, intermediate_size, num_shared_experts) < 1 or activation.interleaved:
            raise invalid_input(
                "SharedExperts",
                got=f"hidden_size={hidden_size}, intermediate_size={intermediate_size}, "
                f"num_shared_experts={num_shared_experts}, {activation}",
                needs="sizes of at least 1 and an activation that is not interleaved",
                fix="Reorder interleaved rows to gate first, then up.",
            )
        self.num_shared_experts = num_shared_experts
        inner = num_shared_experts * intermediate_size
        rows = inner * (2 if activation.gated else 1)
        empty = partial(torch.empty, device=device, dtype=dtype)
        self.gate_up = nn.Parameter(empty(rows, hidden_size))
        self.down = nn.Parameter(empty(hidden_size, inner))
        self.output_gate = nn.Parameter(empty(1, hidden_size)) if gate else None
        self.gate_up_bias = nn.Parameter(empty(rows)) if bias else None
        self.down_bias = nn.Parameter(empty(hidden_size)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan in), as nn.Linear; biases zero."""
        reset((self.gate_up, self.down, self.output_gate), (self.gate_up_bias, self.down_bias))

    def extra_repr(self) -> str:
        inner, bias = self.down.shape[1], self.gate_up_bias is not None
        return (
            f"hidden_size={self.down.shape[0]}, intermediate_size={inner // self.num_shared_experts}, "
            f"num_shared_experts={self.num_shared_experts}, activation={self.activation.kind!r}, "
            f"gate={self.output_gate is not None}, bias={bias}"
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H].

        Raises:
            InvalidInputError: the last dimension of x is not H, or x has not the dtype and device of the weights.
        """
        weight = self.gate_up
        if x.shape[-1] != weight.shape[1] or x.device != weight.device or x.dtype != weight.dtype:
            raise invalid_input(
                "SharedExperts",
                got=f"x {list(x.shape)} of {x.dtype} on {x.device}",
                needs=f"[..., {weight.shape[1]}] of {weight.dtype} on {weight.device}",
                fix="Pass the hidden states that the router sees, or move the layer with .to(x).",
            )
        # float16 overflows between the two matmuls where the output need not.
        wide = torch.float32 if x.dtype == torch.float16 else x.dtype
        h = F.linear(x.to(wide), weight.to(wide), _to(self.gate_up_bias, wide))
        y = F.linear(activate(h, self.activation), self.down.to(wide), _to(self.down_bias, wide)).to(x.dtype)
        return y if self.output_gate is None else y * torch.sigmoid(F.linear(x, self.output_gate))


def _to(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def reset(weights: Iterable[Tensor | None], biases: Iterable[Tensor | None]) -> None:
    """Weights [..., fan in] uniform in +-1/sqrt(fan in), as nn.Linear has them; biases zero."""
    for weight in weights:
        if weight is not None:
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)
    for bias in biases:
        if bias is not None:
            nn.init.zeros_(bias)
