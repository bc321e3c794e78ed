"""Read a module's own gate as data, and trust the data only after it has reproduced the module's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from moestro.reference import activate
from moestro.types import Activation, ActivationKind

Function = Callable[[Tensor], Tensor]

_KINDS: tuple[ActivationKind, ...] = tuple(kind for kind in get_args(ActivationKind) if kind != "custom")
_QUICK_GELU_ALPHA = 1.702
_AGREEMENT = 2e-6
"""Float32 rounding of two orders of the same operations; gelu and its tanh form differ by 1e-4 and more."""


def recognise(function: Function, gated: bool, constants: tuple[float, ...] = ()) -> Activation:
    """The `Activation` of what `function` does, [R, 2 * I] (gated) or [R, I] to [R, I], in float32 on the CPU.

    It is the first data form that agrees on inputs from 1e-3 to 1e4 in size and of both signs, and beyond each of the
    `constants` that a module carries, which are tried as `limit` and `alpha`; else kind "custom" around the function.
    """
    probe = _probe(constants)
    with torch.no_grad():
        wanted = function(probe)
        for candidate in _candidates(gated, constants):
            if _agree(activate(probe, candidate), wanted):
                return candidate
    return Activation(kind="custom", gated=gated, function=function)


def describe(activation: Activation) -> str:
    """The activation in a few words: "silu", or "silu (alpha 1.702, limit 7, up + 1)"."""
    a = activation
    words = [
        f"alpha {a.alpha:g}" if a.alpha != 1 else "",
        f"limit {a.limit:g}" if a.limit is not None else "",
        f"up + {a.up_offset:g}" if a.up_offset else "",
    ]
    extra = ", ".join(word for word in words if word)
    return f"{a.kind} ({extra})" if extra else a.kind


def _candidates(gated: bool, constants: tuple[float, ...]) -> Iterator[Activation]:
    positive = tuple(dict.fromkeys(c for c in constants if 0 < c < float("inf")))
    limits = (None, *positive)
    alphas = tuple(dict.fromkeys((1.0, _QUICK_GELU_ALPHA, *positive)))
    layouts = product((0.0, 1.0), (False, True)) if gated else [(0.0, False)]
    for (up_offset, interleaved), limit, kind in product(layouts, limits, _KINDS):
        for alpha in alphas if kind == "silu" else (1.0,):
            yield Activation(kind, gated, interleaved, alpha, limit, up_offset)


def _probe(constants: tuple[float, ...]) -> Tensor:
    """Values in float32 on the CPU, also where a model is being made and the defaults are others."""
    with torch.device("cpu"):
        generator = torch.Generator("cpu").manual_seed(0)
        sizes = torch.logspace(-3, 4, 57, dtype=torch.float32)
        factors = [c * f for c in constants if 0 < c < 1e4 for f in (0.5, 0.99, 1.01, 2.0)]
        around = torch.tensor(factors, dtype=torch.float32)
        values = torch.cat([sizes, -sizes, around, -around, sizes.new_zeros(1)])
        return values[torch.randint(len(values), (16, 128), generator=generator)]


def _agree(got: Tensor, wanted: Tensor) -> bool:
    if got.shape != wanted.shape:
        return False
    scale = wanted.float().abs()
    return bool(((got - wanted.float()).abs() <= _AGREEMENT * scale + 1e-9).all())
