"""Triton's interpreter without what it does for nothing, which takes most of the time of these tests.

It puts its own functions in the place of the language's; Triton 3.7 goes through the whole language for that at every
call of a function from a kernel, and finds what it has put there itself. It computes of every sum and product of
integers whether it overflows, for an assertion that it drops unless it is in its debug mode.
"""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType
from typing import Any

from triton import language as tl
from triton.runtime import interpreter

_replace_all = interpreter._patch_lang


def is_replaced(language: Any) -> bool:
    """Whether the functions of `triton.language` or of its core are the interpreter's now."""
    return language.static_print is print


def replace_once(function: FunctionType) -> Any:
    """Replace the functions of each language that a kernel sees, unless all are; what restores what this call did."""
    seen = [value for value in function.__globals__.values() if value is tl or value is tl.core]
    if seen and all(is_replaced(language) for language in seen):
        return interpreter._LangPatchScope()
    return _replace_all(function)


def install() -> None:
    """From now on, in this process."""
    interpreter._patch_lang = replace_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
