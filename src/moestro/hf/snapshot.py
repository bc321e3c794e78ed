"""Modules as they were when somebody looked, in lists that are compared at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from moestro.hf.stand_in import Kept, is_called_as_is, own_class
from moestro.ops.tensors import layout_key

_LISTED = "_parameters", "_buffers"
_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_CALLED = attrgetter("forward", "_call_impl")


class Snapshot:
    """A module and all within it, and other tensors: what they hold, and how the tensors lie.

    The numbers in a tensor may change. Tensors that a module holds beside its parameters and buffers are followed only
    if they are among the others. The module keeps its snapshot, which does not keep the module.
    """

    def __init__(self, module: nn.Module, others: Iterable[Tensor] = ()) -> None:
        modules = list(module.modules())
        states = [each.__dict__ for each in modules]
        self._states = [*states[1:], *(state["_modules"] for state in states if state["_modules"])]
        self._listed = [state[name] for state in states for name in _LISTED]
        self._hooks = [state[name] for state in states for name in _HOOKS]
        self._within = modules[1:]
        self._classes = list({type(each) for each in modules} | {own_class(each) for each in modules})
        self._called_as_is = all(map(is_called_as_is, modules))
        self._held, self._own = self._held_now(module), list(self._own_now())
        self._tensors = [*(each for each in self._own if each is not None), *others]
        self._layout = layout_key(self._tensors)

    def is_current(self, module: nn.Module) -> bool:
        """Whether all in it is as it was, and a call of each module is its forward and nothing else."""
        if not self._called_as_is or any(self._hooks):
            return False
        try:
            same = self._held_now(module) == self._held
        except (RuntimeError, TypeError, ValueError):  # of two that compare to neither true nor false
            return False
        own = list(self._own_now())
        same = same and len(own) == len(self._own) and all(map(is_, own, self._own))
        return same and layout_key(self._tensors) == self._layout

    def _held_now(self, module: nn.Module) -> list[Any]:
        held: list[Any] = [value for value in module.__dict__.values() if not isinstance(value, Kept)]
        held += chain.from_iterable(map(dict.values, self._states))
        held += map(type, (module, *self._within))
        held += chain.from_iterable(map(_CALLED, self._classes))
        return held

    def _own_now(self) -> Iterator[Tensor | None]:
        return chain.from_iterable(map(dict.values, self._listed))
