"""The compiled engine, or the sentence why it is not there."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch  # (also loads the OpenMP runtime whose threads the engine shares)
from torch import Tensor
from torch.autograd import forward_ad

from moestro.types import Routing

_ORDINARY = (Tensor, torch.nn.Parameter)
_CPU = torch.device("cpu")


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


def is_watched() -> bool:
    """Whether somebody is to see every operation, and so must not be handed results of none."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def differentiates(tensor: Tensor) -> bool:
    """Whether what is computed of the tensor is recorded for a gradient, or forward-mode differentiation is on."""
    return (torch.is_grad_enabled() and tensor.requires_grad) or forward_ad._current_level >= 0


def is_ordinary(tensor: Tensor) -> bool:
    """Whether the tensor's memory holds its values as they are: not a subclass, not lazily negated."""
    return type(tensor) in _ORDINARY and not tensor.is_neg()


def empty(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
    """What `torch.empty` returns for a matrix, in half of its time."""
    return torch.empty_strided((num_rows, num_columns), (num_columns, 1), dtype=dtype, device=device)


def unreadable(tensor: Tensor) -> str | None:
    """Why the engine cannot read one tensor of numbers where it lies; None if it can."""
    if module is None:
        return missing()
    if torch.compiler.is_compiling():
        return "a graph that is traced is to see every operation"
    if not tensor.is_cpu:
        return f"it computes on the CPU, and its argument is on {tensor.device.type}"
    if not is_ordinary(tensor):
        return "it reads memory as it is, and its argument is of a subclass or stands for its negative"
    if is_watched():
        return "it reads and writes memory, and a tracer, a transform or a dispatch mode is to see every operation"
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
