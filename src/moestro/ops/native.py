"""The compiled engine, or the sentence why it is not there."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch  # noqa: F401  (loads the OpenMP runtime whose threads the engine shares)


@dataclass(frozen=True)
class Isa:
    """An instruction set that the engine was compiled for.

    Attributes:
        name: "amx", "avx512-vnni", "avx512", "avx2" or "portable".
        index: its place in the engine's list, best first.
        needs: what a processor must have for it.
        runs_here: whether this one has it.
        lanes: floats in one of its vectors.
        multiplies_bfloat16: whether it computes in bfloat16, and nothing else.
        multiplies_floats: whether it multiplies rows of floats, bfloat16 ones or all.
        multiplies_integers: whether it multiplies rows as int8.
    """

    name: str
    index: int
    needs: str
    runs_here: bool
    lanes: int
    multiplies_bfloat16: bool
    multiplies_floats: bool
    multiplies_integers: bool


def _load() -> tuple[ModuleType | None, str | None]:
    try:
        return importlib.import_module("moestro._native"), None
    except ImportError as error:
        return None, str(error)


module, problem = _load()
"""The extension module and None, or None and what importing it said."""

ISAS: tuple[Isa, ...] = (
    () if module is None else tuple(Isa(name, i, *rest) for i, (name, *rest) in enumerate(module.isas()))
)
"""Best first; empty without the engine."""

ABSENT = Isa("native", 0, "the native engine", False, 0, False, False, False)
"""What stands in a list of implementations where there is no engine."""


def reason(isa: Isa) -> str | None:
    """Why it cannot run here; None if it can."""
    if module is None:
        return f"the native engine is not there ({problem}): install a C++17 compiler and then moestro again"
    return None if isa.runs_here else f"this processor lacks {isa.needs}"
