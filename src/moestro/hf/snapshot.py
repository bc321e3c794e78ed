"""Modules as they were when somebody looked, in lists that are compared at once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from moestro.hf.stand_in import PLAIN, Kept, is_called_as_is, own_class
from moestro.ops.tensors import layout_key

_TENSORS = "_parameters", "_buffers"
_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_CALLED = attrgetter("forward", "_call_impl")


class Snapshot:
    """A module and all within it, and other tensors: what they hold, and how the tensors lie.

    Numbers in a tensor may change, and numbers and texts of a module be replaced by equal ones. Tensors that a module
    holds beside its parameters and buffers are followed only if they are among the others. The module may keep its
    snapshot, which does not keep the module; a copy that shares it with the module is looked at by itself.
    """

    def __init__(self, module: nn.Module, others: Iterable[Tensor] = ()) -> None:
        modules = list(module.modules())
        states = list(map(vars, modules))
        self._within = modules[1:]
        self._parts = [state["_modules"] for state in states]
        self._owners = [state[name] for state in states for name in _TENSORS]
        self._hooks = [state[name] for state in states for name in _HOOKS]
        self._classes = list({type(each) for each in modules} | {own_class(each) for each in modules})
        self._called_as_is = all(map(is_called_as_is, modules))
        self._held = self._held_now(module)
        own = chain.from_iterable(map(dict.values, self._owners))
        self._tensors = [*(each for each in own if each is not None), *others]
        self._layout = layout_key(self._tensors)

    def is_current(self, module: nn.Module) -> bool:
        """Whether all in it is as it was, and a call of each module is its forward and nothing else."""
        if not self._called_as_is or any(self._hooks):
            return False
        now, then = self._held_now(module), self._held
        same = len(now) == len(then) and (all(map(is_, now, then)) or all(map(_is_same, now, then)))
        return same and layout_key(self._tensors) == self._layout

    def _held_now(self, module: nn.Module) -> list[Any]:
        """What the modules hold, which has the dicts below among it: parts by name, and their tensors; and classes."""
        held: list[Any] = [value for value in vars(module).values() if not isinstance(value, Kept)]
        held += chain.from_iterable(map(dict.values, map(vars, self._within)))
        held += chain.from_iterable(self._parts)
        held += chain.from_iterable(map(dict.values, self._parts))
        held += chain.from_iterable(map(dict.values, self._owners))
        held += map(type, (module, *self._within))
        held += chain.from_iterable(map(_CALLED, self._classes))
        return held


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) in PLAIN and type(one) is type(other) and one == other)
