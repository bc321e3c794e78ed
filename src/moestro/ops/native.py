"""The compiled engine, or the sentence why it is not there."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch  # (also loads the OpenMP runtime whose threads the engine shares)
from torch import Tensor

from moestro.ops import tensors
from moestro.ops.tensors import is_ordinary as is_ordinary
from moestro.ops.tensors import is_watched as is_watched
from moestro.types import Routing


@dataclass(frozen=True)
class Isa:
    """An instruction set that the engine was compiled for.

    Attributes:
        name: "amx", "amx-int8", "avx512-vnni", "avx512", "avx2" or "portable".
        index: its place in the engine's list, best first.
        needs: what a processor must have for it.
        runs_here: whether this one has it.
        lanes: floats in one of its vectors.
        multiplies_bfloat16: whether it computes in bfloat16, and nothing else.
        multiplies_floats: whether it multiplies rows of floats, bfloat16 ones or all.
        multiplies_integers: whether it multiplies rows as int8.
        multiplies_pairs: whether rows of 16 bits meet weights that are integers as pairs of rows of 8.
    """

    name: str
    index: int
    needs: str
    runs_here: bool
    lanes: int
    multiplies_bfloat16: bool
    multiplies_floats: bool
    multiplies_integers: bool
    multiplies_pairs: bool


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

MOST_EXPERTS = 1 << 20
"""That rows are ordered by, and ids may name."""

ABSENT = Isa("native", 0, "the native engine", False, 0, False, False, False, False)
"""What stands in a list of implementations where there is no engine."""


def missing() -> str | None:
    """Why there is no engine at all; None if there is."""
    if module is None:
        return f"the native engine is not there ({problem}): install a C++17 compiler and then moestro again"
    return None


def reason(isa: Isa) -> str | None:
    """Why it cannot run here; None if it can."""
    return missing() or (None if isa.runs_here else f"this processor lacks {isa.needs}")


def unreadable(tensor: Tensor) -> str | None:
    """Why the engine cannot read one tensor of numbers where it lies; None if it can."""
    if module is None:
        return missing()
    if torch.compiler.is_compiling():
        return tensors.TRACED
    if not tensor.is_cpu:
        return f"it computes on the CPU, and its argument is on {tensor.device.type}"
    if not is_ordinary(tensor):
        return tensors.NOT_ORDINARY
    if is_watched():
        return tensors.WATCHED
    return None


def fits(routing: Routing, num_experts: int) -> bool:
    """Whether the engine found every id in -1..num_experts-1 and every weight that counts finite.

    False also where it cannot look; `Routing.check` then says what is wrong, if anything is.
    """
    ids, weights = routing.expert_ids, routing.routing_weights
    if unreadable(ids) is not None or not is_ordinary(weights) or num_experts > MOST_EXPERTS:
        return False
    if weights.dtype is not torch.float32 or not ids.is_contiguous() or not weights.is_contiguous():
        return False
    assert module is not None
    lie = (ids.data_ptr(), ids.dtype is torch.int64, *ids.shape, num_experts)
    found: bool = module.fits(lie, weights.data_ptr())
    return found
