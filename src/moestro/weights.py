"""The weights of one layer's routed experts, as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from moestro.errors import invalid_input
from moestro.formats import PackedTensor, SplitTensor, StoredExperts, dense
from moestro.types import SWIGLU, Activation, register_pytree

OutputNorm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Everything that defines E_0 .. E_{E-1}; expert e computes ``down @ activation(gate_up @ x + b) + b'``.

    Attributes:
        gate_up: [E, 2 * I, H] for gated experts, [E, I, H] for plain ones.
        down: [E, H, I].
        gate_up_bias: [E, 2 * I] (or [E, I]), or None.
        down_bias: [E, H], or None.
        activation: what stands between the two matmuls.
        output_norm: applied to each expert's output row [..., H] before it is weighted, or None.

    Raises:
        InvalidInputError: the shapes do not belong together, or lie on several devices.
    """

    gate_up: StoredExperts
    down: StoredExperts
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: Activation = field(default=SWIGLU)
    output_norm: OutputNorm | None = None

    def __post_init__(self) -> None:
        e, n, h = self.gate_up.shape
        halves = 2 if self.activation.gated else 1
        if n % halves or tuple(self.down.shape) != (e, h, n // halves):
            raise invalid_input(
                "ExpertWeights",
                got=f"gate_up {[e, n, h]} and down {list(self.down.shape)}",
                needs=f"gate_up [E, {'2 * I' if halves == 2 else 'I'}, H] and down [E, H, I]",
                fix="Pass a transposed checkpoint as weight.transpose(1, 2), and plain experts with "
                "Activation(gated=False).",
            )
        for name, bias, shape in (
            ("gate_up_bias", self.gate_up_bias, (e, n)),
            ("down_bias", self.down_bias, (e, h)),
        ):
            if bias is not None and tuple(bias.shape) != shape:
                raise invalid_input(
                    "ExpertWeights", got=f"{name} {list(bias.shape)}", needs=f"{list(shape)}", fix="One row per expert."
                )
        devices = {t.device for t in self.tensors}
        if len(devices) > 1:
            raise invalid_input(
                "ExpertWeights",
                got=f"tensors on {', '.join(sorted(map(str, devices)))}",
                needs="one device",
                fix="Move the layer with .to(device).",
            )

    @classmethod
    def from_dense(
        cls,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: Activation = SWIGLU,
    ) -> ExpertWeights:
        """Wrap ordinary floating-point tensors; nothing is copied. Shapes and errors as for the class."""
        return cls(dense(gate_up), dense(down), gate_up_bias, down_bias, activation)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor the weights are made of."""
        biases = (self.gate_up_bias, self.down_bias)
        return (*self.gate_up.tensors, *self.down.tensors, *(b for b in biases if b is not None))

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.gate_up.shape[2]

    @property
    def intermediate_size(self) -> int:
        return self.down.shape[2]

    @property
    def bytes_per_expert(self) -> int:
        """Stored bytes that computing with one expert reads."""
        return sum(t.numel() * t.element_size() for t in self.tensors) // max(self.num_experts, 1)


register_pytree(PackedTensor, static=("format",))
register_pytree(SplitTensor)
register_pytree(ExpertWeights, static=("activation", "output_norm"))
