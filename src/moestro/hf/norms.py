"""RMS norms of a served model in one pass of the engine, where Transformers has seven operations."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moestro.hf.pending import Pending, settled
from moestro.hf.stand_in import KEPT, Kept, own_forward, stand_in, with_parts
from moestro.ops import native
from moestro.ops.tensors import Layout, is_ordinary, layout_key, no_extent
from moestro.tolerances import disagreement

_NAME = re.compile(r"RMSNorm$")
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Kind:
    """How a family normalises: what it adds to the weight, and whether it rounds x to its dtype before the weight."""

    offset: float
    rounds_twice: bool


KINDS = (Kind(0.0, True), Kind(0.0, False), Kind(1.0, False))


class Recognised(Kept):
    """What one norm was found to compute, for rows of one dtype and its weight as it lay then.

    Attributes:
        native: the engine's norm; None where it computes something else, or cannot read the weight.
    """

    def __init__(self, of: tuple[Any, ...], native: Any) -> None:
        self.of, self.native = of, native


def serve_norms(model: nn.Module) -> None:
    """Have the engine normalise where a module's own code computes what the engine does, in place."""
    if native.missing() is None:
        for module in model.modules():
            if is_norm(module):
                stand_in(module, _normalised)


def is_norm(module: nn.Module) -> bool:
    """Whether it looks like a norm by the root of a mean square: a weight for each column, and an epsilon."""
    named = _NAME.search(type(module).__name__) and not module._modules and not module._buffers
    weight = module._parameters.get("weight")
    alone = list(module._parameters) == ["weight"] and weight is not None and weight.dim() == 1
    return bool(named and alone and epsilon(module) is not None)


def native_norm(module: nn.Module, dtype: torch.dtype) -> Any:
    """The engine's norm for rows of this dtype, if it gives what the module's own forward gives; else None."""
    of = _state(module, dtype)
    found = module.__dict__.get(KEPT)
    if not isinstance(found, Recognised) or found.of != of:
        found = module.__dict__[KEPT] = Recognised(of, _recognised(module, dtype))
    return found.native


def _normalised(module: nn.Module, forward: Any, x: Any, *others: Any) -> Tensor | None:
    if type(x) is Pending:
        x = settled(x)
    if others or type(x) is not Tensor or not x.is_cpu or not x.is_contiguous() or x.is_neg():
        return None
    if not x.numel() or not x.dim():
        return None
    found = native_norm(module, x.dtype)
    columns = x.shape[-1]
    if found is None or columns != module._parameters["weight"].shape[0]:  # type: ignore[union-attr]
        return None
    out = torch.empty_like(x)
    rows = x.numel() // columns
    found.run(torch.get_num_threads(), rows, x.data_ptr(), columns, native.FLOATS[x.dtype], out.data_ptr())
    return out


def epsilon(module: nn.Module) -> float | None:
    """What a norm adds to the mean square."""
    state = module.__dict__
    for name in _EPSILONS:
        value = state.get(name)
        if isinstance(value, float):
            return value
    return None


def _state(module: nn.Module, dtype: torch.dtype) -> tuple[list[Layout], torch.dtype, float | None]:
    weight: Any = module._parameters["weight"]
    return layout_key((weight,)), dtype, epsilon(module)


def _recognised(module: nn.Module, dtype: torch.dtype) -> Any:
    """The engine's norm of the kind that comes closest with another weight, if it comes close enough: of ones, which a
    weight may be today, more than one kind gives the same."""
    weight: Any = module._parameters["weight"]
    readable = weight.is_cpu and is_ordinary(weight) and weight.dtype in _DTYPES and weight.stride(0) == 1
    if dtype not in _DTYPES or not readable or no_extent(weight) is not None:
        return None
    probe, other = _probe(len(weight)).to(dtype), _other(weight)
    try:
        wanted = own_forward(module)(with_parts(module, weight=other), probe)
    except (RuntimeError, TypeError, ValueError):
        return None
    if not isinstance(wanted, Tensor) or wanted.dtype != dtype or wanted.shape != probe.shape:
        return None
    best, least = None, torch.inf
    for kind in KINDS:
        found = torch.empty_like(probe)
        _native(other, epsilon(module), kind).run(
            1, len(probe), probe.data_ptr(), len(weight), native.FLOATS[dtype], found.data_ptr()
        )
        error = float((found.double() - wanted.double()).abs().max())
        if error < least and disagreement(found, wanted) is None:
            best, least = kind, error
    return None if best is None else _native(weight, epsilon(module), best)


def _native(weight: Tensor, epsilon: float | None, kind: Kind) -> Any:
    return native.engine().Norm(
        isa=any_floats().index,
        weight=native.engine().Array(weight.data_ptr(), native.FLOATS[weight.dtype], 0),
        columns=len(weight),
        epsilon=epsilon,
        offset=kind.offset,
        rounds_twice=kind.rounds_twice,
    )


@functools.cache
def any_floats() -> native.Isa:
    """The best instruction set that computes on floats of any kind."""
    return next(isa for isa in native.ISAS if isa.runs_here and isa.multiplies_floats and not isa.multiplies_bfloat16)


def _other(weight: Tensor) -> nn.Parameter:
    """A weight of the same dtype, of random numbers."""
    generator = torch.Generator("cpu").manual_seed(1)
    values = torch.rand(len(weight), generator=generator, device="cpu", dtype=torch.float32) + 0.5
    return nn.Parameter(values.to(weight.dtype), requires_grad=False)


def _probe(columns: int) -> Tensor:
    """Rows of several sizes, one so small that an epsilon counts."""
    generator = torch.Generator("cpu").manual_seed(0)
    rows = torch.randn(4, columns, generator=generator, device="cpu", dtype=torch.float32)
    return rows * torch.tensor([1e-3, 0.1, 1.0, 100.0], device="cpu", dtype=torch.float32)[:, None]
