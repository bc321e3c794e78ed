"""Why neither engine reads some stored experts."""

from __future__ import annotations

from collections.abc import Callable

from moestro.formats import PackedTensor, SplitTensor, StoredExperts
from moestro.weights import ExpertWeights

UNREAD_ZEROS = "it reads zero points of uint4 and of no other element"


def no_activation(weights: ExpertWeights, has: Callable[[str], bool]) -> str | None:
    """Why an engine that has some kinds of activations does not have that of a layer; None if it does."""
    kind = weights.activation.kind
    if kind == "custom" or weights.output_norm is not None:
        return "it cannot call a Python function, and the activation or the output norm is one"
    return None if has(kind) else f"it has no activation {kind!r}"


def matrices_of(stored: StoredExperts) -> list[PackedTensor]:
    """The tensors that hold the experts: one of all, or each matrix of each."""
    return [m for parts in stored.matrices for m in parts] if isinstance(stored, SplitTensor) else [stored]


def exchanged(stored: StoredExperts) -> str | None:
    """Why what is stored is not what its format says, with {name} for the projection's; None if it is.

    `.data =` and Module.to(dtype) exchange what a parameter holds.
    """
    form = stored.format
    if any(m.data.dtype != form.storage for m in matrices_of(stored)):
        return f"{{name}} is described as {form.name} and has come to hold numbers of another dtype"
    return None
