"""The routed experts as a module: parameters, an activation, and one call of the primitive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from moestro.errors import invalid_input
from moestro.formats import PackedTensor, StoredExperts, WeightFormat, dense
from moestro.formats.encode import Search
from moestro.ops.expert_mlp import expert_mlp, tuning
from moestro.shared import reset
from moestro.types import SWIGLU, Activation, InputFormat, Routing
from moestro.weights import Built, ExpertWeights, Layout

_FORMATS = "moestro_formats"
"""The key of a state dict's metadata under which stored experts name their formats."""


@dataclass(frozen=True)
class _Stored:
    """A projection that is kept in buffers: how they make up the experts, their names, the shape [E, N, K]."""

    layout: Layout
    names: tuple[str, ...]
    shape: tuple[int, ...]

    def build(self, buffers: dict[str, Tensor | None]) -> StoredExperts:
        return self.layout.build([buffers[name] for name in self.names])  # type: ignore[misc]


class Experts(nn.Module):
    """E expert MLPs, of which each token uses those its routing names.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.
        activation: an `Activation` or its name (`Activation.of`): gated SwiGLU unless said otherwise.
        bias: whether both projections have one.
        strategy: as for `moestro.expert_mlp`.
        device, dtype: of the parameters, as torch modules have it.

    Attributes:
        gate_up: parameter [E, 2 * I, H] ([E, I, H] for a plain activation), or None where the experts are stored
            otherwise than as one dense tensor; then buffers `gate_up_data`, `gate_up_scales` and so on hold them.
        down: parameter [E, H, I], or None in the same way.
        gate_up_bias, down_bias: parameters [E, 2 * I] ([E, I]) and [E, H], or None.
        input_format: as in `ExpertWeights`; "float" until `quantize` or `from_weights` says otherwise.

    Raises:
        InvalidInputError: a size below 1, an unknown strategy or activation.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation | str = SWIGLU,
        bias: bool = False,
        strategy: str = "auto",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
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
        self.activation = activation = Activation.of(activation, "Experts")
        rows = intermediate_size * (2 if activation.gated else 1)
        empty = partial(torch.empty, device=device, dtype=dtype)
        self.strategy = strategy
        self.input_format: InputFormat = "float"
        self._stored: dict[str, _Stored] = {}
        self._built: Built | None = None
        self.gate_up: nn.Parameter | None = nn.Parameter(empty(num_experts, rows, hidden_size))
        self.down: nn.Parameter | None = nn.Parameter(empty(num_experts, hidden_size, intermediate_size))
        self.gate_up_bias = nn.Parameter(empty(num_experts, rows)) if bias else None
        self.down_bias = nn.Parameter(empty(num_experts, hidden_size)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_weights(cls, weights: ExpertWeights, strategy: str = "auto") -> Experts:
        """A module over existing weights; nothing is copied, biases and strides stay as they are.

        A projection that is one dense tensor becomes a parameter, which requires a gradient if the tensor did. Packed
        experts and unstacked experts become buffers: frozen, and of their dtypes whatever the module is cast to.

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
        experts.input_format = weights.input_format
        for name, stored in (("gate_up", weights.gate_up), ("down", weights.down)):
            experts._store(name, stored)
        for name, bias in (("gate_up_bias", weights.gate_up_bias), ("down_bias", weights.down_bias)):
            setattr(experts, name, None if bias is None else nn.Parameter(bias.detach(), bias.requires_grad))
        return experts

    def _store(self, name: str, stored: StoredExperts) -> None:
        if isinstance(stored, PackedTensor) and stored.format.is_dense:
            setattr(self, name, nn.Parameter(stored.data.detach(), stored.data.requires_grad))
            return
        setattr(self, name, None)
        layout = Layout.of(stored)
        kinds = [f"{name}_{kind}" for kind in layout.format.names]
        if layout.num_blocks:
            places = product(range(stored.shape[0]), range(layout.num_blocks))
            kinds = [f"{kind}_{e}_{block}" for e, block in places for kind in kinds]
        for buffer, tensor in zip(kinds, stored.tensors, strict=True):
            self.register_buffer(buffer, tensor.detach())
        self._stored[name] = _Stored(layout, tuple(kinds), stored.shape)

    def quantize(
        self, format: str | WeightFormat, search: Search = "nearest", input_format: InputFormat | None = None
    ) -> Experts:
        """A module over the same experts in another format; see `ExpertWeights.quantize`. Biases are shared."""
        return Experts.from_weights(self.weights.quantize(format, search, input_format), self.strategy)

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan in), as nn.Linear; biases zero."""
        reset((self.gate_up, self.down), (self.gate_up_bias, self.down_bias))

    @property
    def weights(self) -> ExpertWeights:
        """The parameters and buffers of the moment as the value the primitive takes."""
        if torch.compiler.is_compiling():
            return self._build()
        parameters = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        built, buffers = self._built, tuple(self._buffers.values())
        if built is not None and built.is_current(parameters, buffers):
            known = built.weights
            if known.activation is self.activation and known.input_format == self.input_format:
                return known
        self._built = built = Built(self._build(), parameters, buffers)
        return built.weights

    def _build(self) -> ExpertWeights:
        gate_up, down = (
            dense(tensor) if tensor is not None else self._stored[name].build(self._buffers)
            for name, tensor in (("gate_up", self.gate_up), ("down", self.down))
        )
        biases = self.gate_up_bias, self.down_bias
        return ExpertWeights(gate_up, down, *biases, self.activation, input_format=self.input_format)

    @property
    def _shape(self) -> tuple[int, ...]:
        """[E, H, I], that of `down`."""
        down = self.down
        return self._stored["down"].shape if down is None else down.shape

    @property
    def num_experts(self) -> int:
        return self._shape[0]

    @property
    def hidden_size(self) -> int:
        return self._shape[1]

    @property
    def intermediate_size(self) -> int:
        return self._shape[2]

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """y [T, H] for x [T, H]; everything is checked as in `moestro.expert_mlp`."""
        return expert_mlp(x, routing, self.weights, self.strategy)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts:
        """Moves take stored experts along; casts leave them as they are: a format's bytes have no other dtype."""
        stored = {id(tensor) for tensor in self._buffers.values()}

        def move(tensor: Tensor) -> Tensor:
            probe = fn(tensor.new_empty(0))
            cast = id(tensor) in stored and probe.dtype != tensor.dtype
            return tensor.to(probe.device) if cast else fn(tensor)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        self._built = None  # it holds tensors that may have moved away from where memory is short
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._stored and hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][_FORMATS] = self._formats

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Refuse stored experts of other formats, which copying would turn into numbers nobody meant."""
        errors: list[str] = rest[-1]
        if local_metadata.get(_FORMATS, self._formats) != self._formats:
            errors.append(f"{prefix[:-1]}: experts stored as {local_metadata[_FORMATS]}, here {self._formats}")
        for name, tensor in self._buffers.items():
            given = state_dict.get(prefix + name)
            if given is not None and tensor is not None and given.dtype != tensor.dtype:
                errors.append(f"{prefix}{name}: {given.dtype}, here {tensor.dtype}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    @property
    def _formats(self) -> dict[str, str]:
        return {name: stored.layout.format.name for name, stored in self._stored.items()}

    def extra_repr(self) -> str:
        stored = "".join(f", {name}={form}" for name, form in self._formats.items())
        stored += "" if self.input_format == "float" else f", input_format={self.input_format!r}"
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, strategy={self.strategy!r}{stored}"
        )
