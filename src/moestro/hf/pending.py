"""Layers of a step that are computed when somebody looks: their state is looked at first, for all of them, and then the
engine computes one after the other, with nothing between its calls.

What stands between two calls of the engine is slow because the weights that pass through the processor's caches put it
out of them; gone through for all layers first, it is warm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""One of the engine's, and the numbers it is given."""


@dataclass(frozen=True, eq=False)
class Later:
    """What a layer, or a part of one, is going to compute.

    Attributes:
        calls: in order.
        results: what they write to.
        held: whatever else they read or write, which has to be there until they have run.
    """

    calls: tuple[Call, ...]
    results: tuple[Tensor, ...]
    held: tuple[Any, ...]

    def run(self) -> bool:
        """Compute it; False where the last call says that it could not."""
        done: Any = None
        for call, numbers in self.calls:
            done = call(*numbers)
        return done is not False


class Chain:
    """Layers that follow one another, each with what computes it where the engine cannot."""

    def __init__(self) -> None:
        self._layers: list[tuple[Later, Callable[[], object]]] = []

    def add(self, layer: Later, otherwise: Callable[[], object]) -> None:
        self._layers.append((layer, otherwise))

    def run(self) -> None:
        """Compute all that was added since the last time. What fails is computed again by whoever looks next."""
        while self._layers:
            layer, otherwise = self._layers[0]
            if not layer.run():
                otherwise()
            del self._layers[0]


class Pending(Tensor):
    """Tokens that a chain is going to compute. Every function of PyTorch that is given them has them computed first,
    and is given the plain tensor."""

    plain: Tensor
    chain: Chain

    @staticmethod
    def of(plain: Tensor, chain: Chain) -> Pending:
        """The same memory, before it is written."""
        made = plain.as_subclass(Pending)
        made.plain, made.chain = plain, chain
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Pending, settled, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def settled(x: Pending) -> Tensor:
    """The plain tensor, computed."""
    x.chain.run()
    return x.plain
