"""Calls like one before: found by facts that cost little to ask for, and launched without another look.

What is kept holds as long as the tensors of a layer lie where they lay, and as every fact of a call is the same that
the choice of the implementation, of the plan and of the compiled code has looked at. Imports no Triton.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moestro import settings
from moestro.ops import tensors
from moestro.ops.expert_mlp import triton_tuned
from moestro.types import Routing
from moestro.weights import ExpertWeights


@dataclass(frozen=True, eq=False)
class Call:
    """What computes `expert_mlp` of tensors that lie as others did.

    Attributes:
        compute: of x, expert ids and routing weights.
        holds_weights: whether it keeps tensors of the weights alive, and not just their addresses.
        owns: what it has made of them and is to be kept with it.
    """

    compute: Callable[[Tensor, Tensor, Tensor], Tensor]
    holds_weights: bool
    owns: tuple[Any, ...] = ()


ALIGNED = 16
"""Bytes of which addresses are multiples where kernels are compiled for that."""

_MOST_CALLS, _MOST_PLACES = 64, 1024
_MOST_STACKED = 10
"""Tensors of two stacks with their biases; experts that lie apart have more."""

_kind, _wants_gradient = attrgetter("dtype", "shape"), attrgetter("requires_grad")


def lie(tensors: Sequence[Tensor]) -> list[Any]:
    """Where and how tensors lie: what `.to()`, `.data =` and the like change. Of many, where."""
    if len(tensors) > _MOST_STACKED:
        return list(map(Tensor.data_ptr, tensors))
    places, strides = map(Tensor.data_ptr, tensors), map(Tensor.stride, tensors)
    return [*places, *strides, *map(_kind, tensors), *map(Tensor.is_neg, tensors)]


class Layer:
    """What is kept of the experts whose tensors lie in one place.

    Attributes:
        lie: where.
        calls: by the facts of a call.
        plans: what launches by one plan have in common, for `triton_launch`.
    """

    def __init__(self, lie: list[Any]) -> None:
        self.lie = lie
        self.calls: dict[Hashable, Call] = {}
        self.plans: dict[Hashable, Any] = {}

    def keep(self, facts: Hashable, call: Call) -> None:
        """Keep a call, and no more than the newest of them."""
        _make_room(self.calls, _MOST_CALLS)
        self.calls[facts] = call

    def find(self, facts: Hashable, tensors: Sequence[Tensor]) -> Call | None:
        """The call that was kept for such facts, if its layer's tensors are where they were and want no gradient."""
        call = self.calls.get(facts)
        if call is None or self.lie != lie(tensors):
            return None
        return None if torch.is_grad_enabled() and any(map(_wants_gradient, tensors)) else call


def _make_room(kept: dict[Any, Any], most: int) -> None:
    while len(kept) >= most:
        kept.pop(next(iter(kept)), None)


_LAYERS: dict[int, tuple[weakref.ref[ExpertWeights], tuple[Tensor, ...], Layer]] = {}
_PLACES: dict[Hashable, Layer] = {}


def layer_of(weights: ExpertWeights) -> Layer:
    """What is kept of these weights; nothing where they have moved."""
    key = id(weights)
    found = _LAYERS.get(key)
    if found is not None and found[0]() is weights and found[2].lie == lie(found[1]):
        return found[2]
    tensors = weights.tensors
    made = Layer(lie(tensors))
    _LAYERS[key] = weakref.ref(weights, lambda _: _LAYERS.pop(key, None)), tensors, made
    return made


def facts(x: Tensor, routing: Routing, strategy: str) -> Hashable:
    """All but the weights that decides how a call is computed; None where no other call is known to be alike."""
    ids, weights, device = routing.expert_ids, routing.routing_weights, x.device
    if _is_seen(x, ids, weights) or (x.data_ptr() | ids.data_ptr() | weights.data_ptr()) % ALIGNED:
        return None
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return None  # where Triton launches
    forced = settings.current()
    return (
        (strategy, routing.weight_on, forced.implementation, forced.strategy, triton_tuned.edition()),
        torch.are_deterministic_algorithms_enabled(),
        (device, x.dtype, x.shape, x.stride()),
        (ids.device, ids.dtype, ids.shape, ids.is_contiguous()),
        (weights.device, weights.dtype, weights.shape, weights.is_contiguous()),
    )


def _is_seen(*given: Tensor) -> bool:
    """Whether more is to be done with these tensors, or other things, than to read them where they lie."""
    if tensors.is_watched() or forward_ad._current_level >= 0 or not all(map(tensors.is_ordinary, given)):
        return True
    return torch.is_grad_enabled() and any(map(_wants_gradient, given))


def find(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> Call | None:
    """The call that was kept for arguments like these, if there is one."""
    known = _LAYERS.get(id(weights))
    if known is None or known[0]() is not weights:
        return None
    return known[2].find(facts(x, routing, strategy), known[1])


@dataclass(frozen=True)
class Place:
    """The tensors of a layer without the value that they belong to: a graph hands them over one by one.

    Attributes:
        tensors: those of `ExpertWeights.tensors`, in that order.
        words: what else the weights are made of.
    """

    tensors: tuple[Tensor, ...]
    words: tuple[Hashable, ...]

    def find(self, x: Tensor, routing: Routing, strategy: str) -> Call | None:
        """As `find` for the weights that these make up."""
        layer = _PLACES.get(self._key())
        return None if layer is None else layer.find(facts(x, routing, strategy), self.tensors)

    def keep(self, x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> None:
        """Keep the call that `find` has for these weights, unless it would keep them alive."""
        call = find(x, routing, weights, strategy)
        if call is None or call.holds_weights:
            return
        now, layer = lie(self.tensors), _PLACES.get(self._key())
        if layer is None or layer.lie != now:
            _make_room(_PLACES, _MOST_PLACES)
            layer = _PLACES[self._key()] = Layer(now)
        layer.keep(facts(x, routing, strategy), call)

    def _key(self) -> Hashable:
        return self.words, self.tensors[0].data_ptr(), self.tensors[-1].data_ptr()
