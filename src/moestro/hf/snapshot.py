"""Modules as they were when somebody looked, to be compared at once with how they are."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from moestro.hf.stand_in import PLAIN, Kept, is_called_as_is, own_class
from moestro.ops import native
from moestro.ops.tensors import layout_key

_OWNED = "_modules", "_parameters", "_buffers"
_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_CALLED = attrgetter("forward", "_call_impl")


class Snapshot:
    """A module and all within it, and other tensors: what they hold, and how the tensors lie.

    Numbers in a tensor may change, and numbers and texts of a module be replaced by equal ones. Tensors that a module
    holds beside its parameters and buffers are followed only if they are among the others. The module may keep its
    snapshot, which does not keep the module; a copy that shares it with the module is looked at by itself. It needs the
    native engine.
    """

    def __init__(self, module: nn.Module, others: Iterable[Tensor] = ()) -> None:
        modules = list(module.modules())
        states = list(map(vars, modules))
        self._within = modules[1:]
        self._owned = [state[name] for state in states for name in _OWNED]
        self._hooks = [state[name] for state in states for name in _HOOKS]
        self._classes = list({type(each) for each in modules} | {own_class(each) for each in modules})
        self._called_as_is = all(map(is_called_as_is, modules))
        self._items, self._kinds = _items(self._dicts_now(module)), self._kinds_now(module)
        own = chain.from_iterable(map(dict.values, self._owned))
        self._tensors = [*(each for each in own if isinstance(each, Tensor)), *others]
        self._layout = layout_key(self._tensors)

    def is_current(self, module: nn.Module) -> bool:
        """Whether all in it is as it was, and a call of each module is its forward and nothing else."""
        if not self._called_as_is or any(self._hooks) or self._kinds_now(module) != self._kinds:
            return False
        dicts = self._dicts_now(module)
        if not native.engine().items_are(dicts, self._items) and not _are_alike(_items(dicts), self._items):
            return False
        return layout_key(self._tensors) == self._layout

    def _dicts_now(self, module: nn.Module) -> list[dict[str, Any]]:
        """What the modules hold, which has the dicts behind it among it: of parts and of their tensors."""
        return [vars(module), *map(vars, self._within), *self._owned]

    def _kinds_now(self, module: nn.Module) -> list[Any]:
        return [type(module), *map(type, self._within), *map(_CALLED, self._classes)]


def _items(dicts: list[dict[str, Any]]) -> list[Any]:
    """Keys and values in turn, with `...` for what modules remember of their calls."""
    found = chain.from_iterable(chain.from_iterable(each.items() for each in dicts))
    return [... if isinstance(each, Kept) else each for each in found]


def _are_alike(now: list[Any], then: list[Any]) -> bool:
    """The same, but for numbers and texts that are equal."""
    return len(now) == len(then) and all(map(_is_alike, now, then))


def _is_alike(one: Any, other: Any) -> bool:
    return one is other or other is ... or (type(one) in PLAIN and type(one) is type(other) and one == other)
