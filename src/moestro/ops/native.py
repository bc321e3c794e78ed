"""The compiled engine, or the sentence why it is not there."""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # (also loads the OpenMP runtime whose threads the engine shares)
from torch import Tensor

from moestro import settings
from moestro.errors import invalid_input
from moestro.ops.tensors import is_ordinary, no_memory, not_on_cpu


@dataclass(frozen=True)
class Isa:
    """An instruction set that the engine was compiled for.

    Attributes:
        name: "amx", "amx-int8", "avx512-bf16", "avx512-vnni", "avx512", "avx2-vnni", "avx2", "neon-i8mm",
            "neon-dotprod", "neon" or "portable".
        index: its place in the engine's list, best first.
        needs: the features of a processor that it takes.
        missing: those of them that this one lacks.
        lanes: floats in one of its vectors.
        multiplies_bfloat16: whether it computes in bfloat16, and nothing else.
        has_tile_unit: whether the processor multiplies tiles of bfloat16 as such.
        multiplies_floats: whether it multiplies rows of floats, bfloat16 ones or all.
        multiplies_int8: whether it multiplies an int8 input.
        multiplies_int8_residual: whether a row of 16 bits meets weights that are integers as int8 and an int8 residual.
        multiplies_int16: whether it meets them as integers of 16 bits.
        has_outer_products: whether it multiplies many rows of floats by sixteen rows of weights at once.
        shifts_e4m3: whether codes of e4m3 become floats by a shift.
    """

    name: str
    index: int = 0
    needs: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    lanes: int = 0
    multiplies_bfloat16: bool = False
    has_tile_unit: bool = False
    multiplies_floats: bool = False
    multiplies_int8: bool = False
    multiplies_int8_residual: bool = False
    multiplies_int16: bool = False
    has_outer_products: bool = False
    shifts_e4m3: bool = False

    @property
    def runs_here(self) -> bool:
        """Whether this processor has what it needs."""
        return not self.missing


def _load() -> tuple[ModuleType | None, str | None]:
    try:
        engine = importlib.import_module("moestro._native")
    except ImportError as error:
        return None, str(error)
    try:
        engine.mask(list(settings.MASKED))
    except ValueError as names:
        raise invalid_input(
            settings.MASK_VARIABLE, got=" ".join(settings.MASKED), needs=f"features out of {names}", fix="Unset it."
        ) from None
    return engine, None


module, problem = _load()
"""The extension module and None, or None and what importing it said."""


@functools.cache
def digest() -> str:
    """What tells one build of the extension module from another: the first digits of its file's SHA-256."""
    if module is None or module.__file__ is None:
        return "none"
    try:
        return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()[:12]
    except OSError:  # taken away since it was loaded
        return "unknown"


ISAS: tuple[Isa, ...] = tuple(
    Isa(**{field.name: getattr(isa, field.name) for field in fields(Isa)}) for isa in (module.isas() if module else ())
)
"""Best first; empty without the engine."""

INTEGERS_ONLY = "it multiplies int8 inputs only"
"""Why an instruction set computes nothing on floats."""

ABSENT = Isa("native", missing=("the native engine",))
"""What stands in a list of implementations where there is no engine."""

ELEMENTS: Mapping[str, int] = {} if module is None else module.ELEMENTS
"""The engine's code of each kind of number that weights are stored in; this and the next ones are empty without it."""

INTEGERS: tuple[str, ...] = () if module is None else module.INTEGERS
"""Those of ELEMENTS whose codes are multiplied as 8-bit integers."""

TILED: tuple[str, ...] = () if module is None else module.TILED
"""Those of ELEMENTS that tiles of bfloat16 hold."""

SCALES: Mapping[str, int] = {} if module is None else module.SCALES
"""Of each dtype of scales, and of "none"."""

FLOATS: Mapping[torch.dtype, int] = {} if module is None else {getattr(torch, n): i for n, i in module.FLOATS.items()}
"""Of each dtype of scores. Experts and matrices take those of at most 32 bits."""

ACTIVATIONS: Mapping[str, int] = {} if module is None else module.ACTIVATIONS
"""Of each kind of activation."""

SCORES: Mapping[str, int] = {} if module is None else module.SCORES
"""Of each way a router turns logits into scores."""

LIMITS: Mapping[str, int] = {} if module is None else module.LIMITS
"""What the engine takes at most: most_slots of a token, most_int8_columns, most_experts, most_scores, most_threads; and
token_block, the most token rows that meet a range of weights before the next ones do (outer_token_block: of outer
products)."""


def missing() -> str | None:
    """Why there is no engine at all; None if there is."""
    if module is None:
        return f"the native engine is not there ({problem}): install a C++17 compiler and then moestro again"
    return None


def reason(isa: Isa) -> str | None:
    """Why it cannot run here; None if it can."""
    return missing() or (None if isa.runs_here else f"this processor lacks {_listed(isa.missing)}")


def _listed(names: tuple[str, ...]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def engine() -> Any:
    """The extension module, where `missing` has nothing to say."""
    assert module is not None
    return module


def array(tensor: Tensor | None) -> Any:
    """A tensor of floats whose rows are contiguous, as the engine takes it; None for None."""
    if tensor is None:
        return None
    return engine().Array(tensor.data_ptr(), FLOATS[tensor.dtype], tensor.stride(0))


def unreadable(tensor: Tensor) -> str | None:
    """Why the engine cannot read one tensor of numbers where it lies; None if it can."""
    if module is None:
        return missing()
    return not_on_cpu(tensor) or no_memory(tensor)


def ids_and_weights_fit(expert_ids: Tensor, routing_weights: Tensor | None, num_experts: int) -> bool:
    """Whether the engine found every id in -1..num_experts-1 and, where given, every weight that counts finite.

    False also where it cannot look; what then looks at the values says what is wrong, if anything is.
    """
    ids, weights = expert_ids, routing_weights
    if unreadable(ids) is not None or num_experts > LIMITS["most_experts"] or not ids.is_contiguous():
        return False
    if weights is not None and not (
        weights.dtype is torch.float32 and weights.is_contiguous() and is_ordinary(weights)
    ):
        return False
    address = 0 if weights is None else weights.data_ptr()
    found: bool = engine().fits(ids.data_ptr(), ids.dtype is torch.int64, *ids.shape, num_experts, address)
    return found
