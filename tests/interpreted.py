"""Triton's interpreter without what it does for nothing, which takes most of the time of these tests.

It puts its own functions in the place of the language's; Triton 3.7 goes through the whole language for that at every
call of a function from a kernel, and finds what it has put there itself. It computes of every sum and product of
integers whether it overflows, for an assertion that it drops unless it is in its debug mode. Of every value it makes
anew what follows from its type alone: the shape as a tuple of constants, the name, the type's checks, NumPy's type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from triton import language as tl
from triton.runtime import interpreter

_replace_all = interpreter._patch_lang


@dataclass(frozen=True)
class Original:
    """What Triton makes each time: NumPy's type, a type of blocks, a tensor."""

    numpy_type: Callable[[Any], Any] = interpreter._get_np_dtype
    block: Callable[[Any, Any, Any], None] = tl.block_type.__init__
    tensor: Callable[[Any, Any, Any], None] = tl.tensor.__init__


ORIGINAL = Original()


def is_replaced(language: Any) -> bool:
    """Whether the functions of `triton.language` or of its core are the interpreter's now."""
    return language.static_print is print


@functools.cache
def languages(function: FunctionType) -> tuple[Any, ...]:
    """Those that a kernel sees."""
    return tuple(value for value in function.__globals__.values() if value is tl or value is tl.core)


def replace_once(function: FunctionType) -> Any:
    """Replace the functions of each language that a kernel sees, unless all are; what restores what this call did."""
    seen = languages(function)
    if seen and all(is_replaced(language) for language in seen):
        return interpreter._LangPatchScope()
    return _replace_all(function)


def numpy_types() -> Callable[[Any], Any]:
    """What finds NumPy's type of one of Triton's, which depends on its scalar alone."""
    known: dict[str, Any] = {}

    def found(given: Any) -> Any:
        name = given.scalar.name
        if name not in known:
            known[name] = ORIGINAL.numpy_type(given)
        return known[name]

    return found


def tensors() -> Callable[[Any, Any, Any], None]:
    """`tensor.__init__` that makes the tuple of constants and their product once for each type."""
    known: dict[str, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        found = known.get(type.name)
        if found is None:
            ORIGINAL.tensor(self, handle, type)
            known[type.name] = dict(vars(self))
        else:
            self.__dict__.update(found, handle=handle, type=type, dtype=type.scalar)

    return init


def blocks() -> Callable[[Any, Any, Any], None]:
    """`block_type.__init__` that checks a shape, and writes its name, once for each type of elements."""
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        found = known.get(key)
        if found is None:
            ORIGINAL.block(self, element_ty, shape)
            known[key] = dict(vars(self))
        else:
            self.__dict__.update(found, element_ty=element_ty)

    return init


def install() -> None:
    """From now on, in this process."""
    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = numpy_types()
    tl.tensor.__init__ = tensors()
    tl.block_type.__init__ = blocks()
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
