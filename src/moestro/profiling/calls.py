"""Calls of modules: who is told where one begins and ends, for as long as somebody looks, and for little.

A module that is looked at has a class of its own for the time, which is its class with another way in. PyTorch's hooks
would do the same for three times as much, are compiled into graphs that are made meanwhile, and go along with copies.
"""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

Begin = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
End = Callable[[Any], None]
_OBSERVERS: dict[nn.Module, tuple[tuple[Begin, End], ...]] = {}
_LOCK = threading.Lock()


@contextmanager
def observed_calls(module: nn.Module, begin: Begin, end: End) -> Iterator[None]:
    """Inside, tell of every call of a module: arguments where it begins, the result where it ends, None of a failure.

    Who came last is told first of a beginning, and last of an end. Calls in graphs are not told of. Copies of the
    module are of its own class.
    """
    mine = begin, end
    with _LOCK:
        others = _OBSERVERS.get(module)
        _OBSERVERS[module] = (mine, *(others or ()))
        if others is None:
            own: Any = type(module)
            module.__class__ = _observed_class(own)
    try:
        yield
    finally:
        with _LOCK:
            left = tuple(each for each in _OBSERVERS[module] if each is not mine)
            if left:
                _OBSERVERS[module] = left
            else:
                del _OBSERVERS[module]
                _restore(module)


def _restore(module: nn.Module) -> None:
    observed: Any = type(module)
    if "_own_class" in vars(observed):  # else others have put a class of theirs above it, which passes calls on
        module.__class__ = observed._own_class


@cache
def _observed_class(own: Any) -> Any:
    """The class with a way in that tells observers."""
    call, is_compiling, observers_of = own._call_impl, torch.compiler.is_compiling, _OBSERVERS.get

    def _call_impl(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        if is_compiling():
            return call(self, *arguments, **named)
        observers, result = observers_of(self, ()), None
        for begin, _ in observers:
            begin(self, arguments, named)
        try:
            result = call(self, *arguments, **named)
        finally:
            for _, end in reversed(observers):
                end(result)
        return result

    def reduce(self: nn.Module, protocol: Any) -> Any:
        made, arguments, *state = own.__reduce_ex__(self, protocol)
        if made is copyreg.__newobj__:  # type: ignore[attr-defined]
            made, arguments = copyreg._reconstructor, (own, object, None)  # type: ignore[attr-defined]
        return made, arguments, *state

    names = {"_call_impl": _call_impl, "__reduce_ex__": reduce, "_own_class": own}
    return type(own.__name__, (own,), {**names, "__module__": own.__module__, "__qualname__": own.__qualname__})
