"""The compiled engine, or the sentence why it is not there."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch  # (also loads the OpenMP runtime whose threads the engine shares)
from torch import Tensor

_ORDINARY = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Isa:
    """An instruction set that the engine was compiled for.

    Attributes:
        name: "amx", "avx512", "avx2" or "portable".
        index: its place in the engine's list, best first.
        needs: what a processor must have for it.
        runs_here: whether this one has it.
        lanes: floats in one of its vectors.
        multiplies_bfloat16: whether it computes in bfloat16, and nothing else.
    """

    name: str
    index: int
    needs: str
    runs_here: bool
    lanes: int
    multiplies_bfloat16: bool


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

ABSENT = Isa("native", 0, "the native engine", False, 0, False)
"""What stands in a list of implementations where there is no engine."""


def missing() -> str | None:
    """Why there is no engine at all; None if there is."""
    if module is None:
        return f"the native engine is not there ({problem}): install a C++17 compiler and then moestro again"
    return None


def reason(isa: Isa) -> str | None:
    """Why it cannot run here; None if it can."""
    return missing() or (None if isa.runs_here else f"this processor lacks {isa.needs}")


def is_watched() -> bool:
    """Whether somebody is to see every operation, and so must not be handed results of none."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def unreadable(tensor: Tensor) -> str | None:
    """Why the engine cannot read one tensor of numbers where it lies; None if it can."""
    if module is None:
        return missing()
    if torch.compiler.is_compiling():
        return "a graph that is traced is to see every operation"
    if not tensor.is_cpu:
        return f"it computes on the CPU, and its argument is on {tensor.device.type}"
    if type(tensor) not in _ORDINARY or tensor.is_neg():
        return "it reads memory as it is, and its argument is of a subclass or stands for its negative"
    if is_watched():
        return "it reads and writes memory, and a tracer, a transform or a dispatch mode is to see every operation"
    return None
