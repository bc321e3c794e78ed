"""Which parameters of a model are its experts, so that they can be stored in another way than as parameters.

An experts module of Transformers keeps each projection as one parameter over all experts. A checkpoint keeps it as one
tensor, or as one for each expert, perhaps packed. `Projection` says where the two meet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moestro.types import Activation


@dataclass(frozen=True)
class Projection:
    """One projection of a module's experts.

    Attributes:
        name: what its stored tensors are called after ("gate_up_proj").
        parameters: the parameters of the module whose rows, one after the other, make up each expert's [N, K].
        transposed: whether an expert's matrix is stored [K, N].
        flat: whether a parameter holds the experts' matrices one below the other, not in a dimension of their own.
    """

    name: str
    parameters: tuple[str, ...]
    transposed: bool = False
    flat: bool = False

    def target(self, path: str) -> str:
        """Its full name in the model, for a module at `path`."""
        return f"{path}.{self.name}" if path else self.name

    def stack(self, tensor: Tensor, num_experts: int) -> Tensor:
        """A tensor as stored -> [E, n, K], a view."""
        stack = tensor.view(num_experts, -1, tensor.shape[-1]) if self.flat else tensor
        return stack.transpose(1, 2) if self.transposed else stack


@dataclass(frozen=True)
class Projections:
    """Both projections of one layer's experts.

    Attributes:
        holder: the module whose parameters they are, as a path inside the module that is served ("" for itself).
        gate_up, down: the two.
        num_experts: E.
        activation: what stands between them when gate and up are stored as the two say.
    """

    holder: str
    gate_up: Projection
    down: Projection
    num_experts: int
    activation: Activation

    @property
    def both(self) -> tuple[Projection, Projection]:
        return self.gate_up, self.down

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters that a store takes the place of."""
        return (*self.gate_up.parameters, *self.down.parameters)


Find = Callable[[Any, Any], Projections]
"""Reads the projections of a served module from the module and its plan."""
