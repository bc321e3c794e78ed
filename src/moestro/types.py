"""The values that travel between operations.

Shape legend, used in every docstring of the package:
    T  num_tokens           H  hidden_size            I  intermediate_size
    E  num_experts          K  top_k (slots a token)  R  rows: (token, slot) pairs, R = T * K
    B  block_size           G  num_blocks
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from moestro.errors import InvalidInputError, invalid_input, not_one_of, several_devices

EMPTY = -1
"""The expert id of an empty slot: it costs nothing and adds nothing."""

_ID_DTYPES, _WEIGHT_DTYPES = (torch.int32, torch.int64), (torch.float32, torch.float64)
_T = TypeVar("_T")

WeightOn = Literal["output", "input"]

InputFormat = Literal["float", "int8", "fp8-e4m3"]
"""How rows meet weights: as they are, or rounded to 8-bit integers or floats, with scales (`moestro.reference`)."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Which experts compute each token, and how much each counts.

    Attributes:
        expert_ids: integer [T, K] (int32 or int64). -1 is an empty slot. An expert named by two slots of one
            token counts with the sum of both weights.
        routing_weights: float32 (or float64) [T, K]. The weight of an empty slot is ignored, whatever it is.
        weight_on: "output" for y = sum of w * E(x); "input" for y = sum of E(w * x), as Llama 4 has it.

    Raises:
        InvalidInputError: shapes, dtypes or devices do not fit. Values are checked by `check`.
    """

    expert_ids: Tensor
    routing_weights: Tensor
    weight_on: WeightOn = "output"

    checked_for: ClassVar[int | None] = None
    """The number of experts that the values are known to fit; None until `check`. What is written into the
    tensors afterwards is not looked at: an id outside 0..E-1 is then an empty slot."""

    def __post_init__(self) -> None:
        ids, weights = self.expert_ids, self.routing_weights
        if ids.dim() != 2 or not make_up_a_routing(ids, weights):
            raise no_routing("Routing", ids, weights)
        if ids.device != weights.device:
            raise several_devices("Routing", expert_ids=ids.device, routing_weights=weights.device)
        if self.weight_on not in ("output", "input"):
            raise invalid_input(
                "Routing", got=f"weight_on={self.weight_on!r}", needs='"output" or "input"', fix="Pick one of the two."
            )

    @classmethod
    def unchecked(
        cls, expert_ids: Tensor, routing_weights: Tensor, weight_on: WeightOn, checked_for: int | None = None
    ) -> Routing:
        """The same value without a look at shapes, dtypes and devices, for tensors made to fit."""
        made = unchecked(cls, expert_ids=expert_ids, routing_weights=routing_weights, weight_on=weight_on)
        return made if checked_for is None else made.mark_checked(checked_for)

    def mark_checked(self, num_experts: int) -> Routing:
        """This value, remembering that its ids and weights are known to fit so many experts."""
        object.__setattr__(self, "checked_for", num_experts)
        return self

    @property
    def num_tokens(self) -> int:
        return self.expert_ids.shape[0]

    @property
    def top_k(self) -> int:
        return self.expert_ids.shape[1]

    def __iter__(self) -> Iterator[Tensor]:
        """``expert_ids, routing_weights = routing``."""
        return iter((self.expert_ids, self.routing_weights))

    def __repr__(self) -> str:
        ids, weights = self.expert_ids, self.routing_weights
        kinds = f"{ids.dtype} and {weights.dtype} on {ids.device}".replace("torch.", "")
        return f"Routing(num_tokens={self.num_tokens}, top_k={self.top_k}, {kinds}, weight_on={self.weight_on!r})"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Routing:
        """The same routing on a device."""
        ids, weights = (tensor.to(device, non_blocking=non_blocking) for tensor in self)
        return Routing.unchecked(ids, weights, self.weight_on)

    def with_ids(self, expert_ids: Tensor) -> Routing:
        """The same weights with other ids: what every rewrite of the routing returns."""
        return replace(self, expert_ids=expert_ids)

    def check(self, num_experts: int, operation: str = "Routing") -> None:
        """Check the values once, at a public edge; a value that has been checked is not looked at again.

        On an accelerator the check is asynchronous.

        Raises:
            InvalidInputError: an id is outside -1..num_experts-1, or the weight of a used slot is not finite.
                (On an accelerator a device-side assertion carries the same sentence.)
        """
        if self.checked_for is not None and self.checked_for <= num_experts:
            return
        ids = self.expert_ids
        check_range(ids, num_experts, operation)
        finite = (torch.isfinite(self.routing_weights) | (ids == EMPTY)).all()
        if ids.device.type != "cpu" or torch.compiler.is_compiling():
            torch._assert_async(finite, f"[{operation}] routing_weights must be finite")
        elif not finite:
            raise invalid_input(
                operation,
                got="routing_weights with NaN or infinity",
                needs="finite weights in every used slot",
                fix="Look for NaN in the router's input or its logits.",
            )
        self.mark_checked(num_experts)


def make_up_a_routing(expert_ids: Tensor, routing_weights: Tensor) -> bool:
    """Whether ids and weights have the dtypes of a routing's, and one shape."""
    typed = expert_ids.dtype in _ID_DTYPES and routing_weights.dtype in _WEIGHT_DTYPES
    return typed and routing_weights.shape == expert_ids.shape


def no_routing(operation: str, ids: Tensor, weights: Tensor) -> InvalidInputError:
    """The error for ids and weights that make up no routing."""
    return invalid_input(
        operation,
        got=f"expert_ids {list(ids.shape)} of {ids.dtype} and routing_weights {list(weights.shape)} of {weights.dtype}",
        needs="int32 or int64 ids and float32 or float64 weights of one shape [num_tokens, top_k]",
        fix="Flatten batch and sequence into num_tokens first; use expert_ids.long() and routing_weights.float().",
    )


def check_range(expert_ids: Tensor, num_experts: int, operation: str) -> None:
    """Refuse ids outside -1..num_experts-1; an assertion on the device where reading them is not free."""
    in_range = ((expert_ids >= EMPTY) & (expert_ids < num_experts)).all()
    if expert_ids.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(in_range, f"[{operation}] expert_ids must lie in -1..{num_experts - 1}")
    elif not in_range:
        low, high = torch.aminmax(expert_ids)
        raise invalid_input(
            operation,
            got=f"expert_ids from {int(low)} to {int(high)}",
            needs=f"ids in -1..{num_experts - 1} (-1 is an empty slot)",
            fix="Check the router's num_experts against the weights'.",
        )


ActivationKind = Literal["silu", "gelu", "gelu-tanh", "relu", "relu2", "sigmoid", "tanh", "identity", "custom"]


@dataclass(frozen=True)
class Activation:
    """What happens between the first and the second matmul of an expert, as data.

    A gated expert computes ``act(gate) * (up + up_offset)``, a plain one ``act(up)``. ``act`` is the function
    `kind` names; for "silu" it is ``g * sigmoid(alpha * g)``. With a `limit` L, gate is clamped to at most L and
    up to [-L, L] before anything else (gpt-oss: alpha 1.702, limit 7, up_offset 1, interleaved).

    Attributes:
        kind: the function; "custom" uses `function`.
        gated: whether the first matmul yields two halves, gate and up.
        interleaved: whether gate and up alternate row by row instead of standing one after the other.
        alpha: the slope inside the sigmoid of "silu".
        limit: the clamp, or None.
        up_offset: added to up before the product.
        function: for "custom" only: maps [..., 2 * I] (gated) or [..., I] to [..., I]. Only the plain torch
            implementation and the reference can run it.

    Raises:
        InvalidInputError: an unknown kind, or a `function` without kind "custom" (or the reverse).
    """

    kind: ActivationKind = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    function: Callable[[Tensor], Tensor] | None = None

    code: ClassVar[str]
    """All of it but the function as a string, which a graph can hold; `decode` reads it back."""

    def __post_init__(self) -> None:
        kinds = ActivationKind.__args__  # type: ignore[attr-defined]
        if self.kind not in kinds:
            raise not_one_of("Activation", "kind", self.kind, kinds, 'Use kind="custom" with a function for another.')
        idle = {"alpha": self.alpha != 1.0 and self.kind != "silu"} | {
            name: not self.gated and getattr(self, name) != 0 for name in ("interleaved", "up_offset")
        }
        if any(idle.values()):
            raise invalid_input(
                "Activation",
                got=f"{', '.join(n for n, i in idle.items() if i)} with kind={self.kind!r}, gated={self.gated}",
                needs='alpha with kind "silu" only, interleaved and up_offset with gated=True only',
                fix="Leave out the field, which would have no effect.",
            )
        if (self.kind == "custom") != (self.function is not None):
            raise invalid_input(
                "Activation",
                got=f"kind={self.kind!r} with function={self.function!r}",
                needs='kind="custom" and a function together, or neither',
                fix="Set both or drop both.",
            )
        numbers = (float(self.alpha), None if self.limit is None else float(self.limit), float(self.up_offset))
        # Here and not where it is needed: a tracer that lets sizes vary takes an object's numbers for sizes.
        object.__setattr__(self, "code", json.dumps((self.kind, bool(self.gated), bool(self.interleaved), *numbers)))

    @classmethod
    def of(cls, value: Activation | str, operation: str = "Activation") -> Activation:
        """An activation from its name: a kind ("gelu" is ``Activation("gelu")``, gated), or one of `PRESETS`.

        Raises:
            InvalidInputError: another name, or something else, such as a module or a function.
        """
        if isinstance(value, cls):
            return value
        names = [kind for kind in ActivationKind.__args__ if kind != "custom"]  # type: ignore[attr-defined]
        if isinstance(value, str) and value in PRESETS:
            return PRESETS[value]
        if isinstance(value, str) and value in names:
            return cls(kind=value)  # type: ignore[arg-type]
        raise invalid_input(
            operation,
            got=f"activation={value!r}" if isinstance(value, str) else f"an activation of type {type(value).__name__}",
            needs=f"an Activation, or one of {', '.join([*names, *PRESETS])}",
            fix='A function of your own is Activation(kind="custom", function=...); a plain expert has gated=False.',
        )

    @classmethod
    def decode(cls, code: str) -> Activation:
        """The activation without a function whose `code` this is."""
        return cls(*json.loads(code))


SWIGLU = Activation()
GPT_OSS_SWIGLU = Activation(alpha=1.702, limit=7.0, up_offset=1.0, interleaved=True)
PRESETS = {
    "swiglu": SWIGLU,
    "geglu": Activation("gelu"),
    "reglu": Activation("relu"),
    "gpt-oss-swiglu": GPT_OSS_SWIGLU,
}
"""Activations that have a name of their own; all are gated."""


def unchecked(cls: type[_T], **values: Any) -> _T:
    """A frozen value without the checks of its constructor; fields that are not named keep their defaults."""
    made = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)  # which torch.compile follows from PyTorch 2.11 on
    return made


def register_pytree(cls: type[Any], static: tuple[str, ...] = ()) -> None:
    """Let torch.export and torch.compile carry a frozen dataclass of tensors across their boundary."""
    names = tuple(f.name for f in fields(cls) if f.name not in static)

    def flatten(value: Any) -> tuple[list[Any], Any]:
        return [getattr(value, n) for n in names], tuple(getattr(value, n) for n in static)

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(value)
        return [(pytree.GetAttrKey(n), c) for n, c in zip(names, children, strict=True)], context

    pytree.register_pytree_node(
        cls,
        flatten,
        lambda children, context: unchecked(cls, **dict(zip((*names, *static), (*children, *context), strict=True))),
        serialized_type_name=f"moestro.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


register_pytree(Routing, static=("weight_on",))
