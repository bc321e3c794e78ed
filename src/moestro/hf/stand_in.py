"""Modules of a model that go another way through their forward where they can: the same modules, of another class."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from moestro.ops.dispatch import is_unwatched
from moestro.ops.tensors import is_intercepted

KEPT = "_moestro_kept"
"""What a module remembers of its calls."""

PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types of what a module's forward may read of it, and that is compared by value."""

Way = Callable[..., Any]
"""Given a module, its own forward and the arguments of a call; returns the result, or None where that is to run."""


class Kept:
    """What is known of one module in this process; its copies, and those that are unpickled, find out themselves."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def stand_in(module: nn.Module, way: Way) -> None:
    """Have a module ask `way` first where no gradient is recorded and no graph is traced; its own forward stays."""
    if not is_served(module):
        own: Any = type(module)
        module.__class__ = _class(own, way)


def is_served(module: nn.Module) -> bool:
    """Whether it has a stand-in."""
    return hasattr(type(module), "_moestro_own_class")


def own_class(module: nn.Module) -> Any:
    """The class that a module is of without a stand-in."""
    return getattr(type(module), "_moestro_own_class", type(module))


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of its own class, which takes the module first."""
    forward: Callable[..., Any] = own_class(module).forward
    return forward


def with_parts(module: nn.Module, **parts: Any) -> Any:
    """A module of its own class that shares all with it but these parameters and modules, which lie in their place."""
    own = own_class(module)
    like = own.__new__(own)
    like.__dict__.update(module.__dict__)
    for kind in ("_parameters", "_modules"):
        kept = module.__dict__[kind]
        like.__dict__[kind] = {name: parts.get(name, part) for name, part in kept.items()}
    return like


def plain_values(module: nn.Module) -> tuple[Any, ...]:
    """The numbers, texts and switches of a module, which its forward may read."""
    return tuple([value for value in module.__dict__.values() if type(value) in PLAIN])


def is_untouched(module: nn.Module) -> bool:
    """Whether a call of a module is its class's forward and nothing else: no hook, no forward of its own or put into
    its class since, nobody told of it."""
    cls: Any = type(module)
    if "forward" in module.__dict__ or not is_called_as_is(module):
        return False
    own: Any = getattr(cls, "_moestro_own_class", None)
    return own is None or own.forward is cls._moestro_own_forward


def is_called_as_is(module: nn.Module) -> bool:
    """Whether a call of a module is its forward and nothing else, whoever put that there."""
    state = module.__dict__
    hooked = state["_forward_hooks"] or state["_forward_pre_hooks"]
    return not hooked and type(module)._call_impl is nn.Module._call_impl


@cache
def _class(own: Any, way: Way) -> Any:
    forward = own.forward

    @wraps(forward)
    def asked(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or own.forward is not forward or not _is_free():
            return own.forward(self, *arguments, **named)
        found = way(self, forward, *arguments, **named)
        return forward(self, *arguments, **named) if found is None else found

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _made, (own, way), self.__dict__

    names = {"forward": asked, "__reduce_ex__": reduce, "_moestro_own_class": own, "_moestro_own_forward": forward}
    return type(own.__name__, (own,), {**names, "__module__": own.__module__, "__qualname__": own.__qualname__})


def _made(own: Any, way: Way) -> Any:
    """An empty module of the class, for copies."""
    return _class(own, way).__new__(_class(own, way))


def _is_free() -> bool:
    """Whether nobody is to see, or has asked for, single operations."""
    return (
        is_unwatched()
        and not torch.is_autocast_enabled("cpu")
        and forward_ad._current_level < 0
        and not is_intercepted()
        and not nn.modules.module._has_any_global_hook()
    )
