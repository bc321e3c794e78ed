"""projection: one matrix, as a model has it beside its experts, through the same kernels."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from moestro import settings
from moestro.errors import invalid_input
from moestro.formats import PackedTensor
from moestro.ops import dispatch, native
from moestro.ops.measured import measures
from moestro.ops.projection import cpu, plain, reference
from moestro.ops.tensors import call_key

__all__ = ["projection"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def projection(x: Tensor, weight: Tensor | PackedTensor, bias: Tensor | None = None) -> Tensor:
    """y[t] = W x[t] + b, what `torch.nn.functional.linear` computes.

    Args:
        x: [..., K], float32, bfloat16, float16 or float64.
        weight: [N, K], in the dtype of x, or stored in a format.
        bias: [N] in the dtype of x, or None.

    Returns:
        [..., N] in the dtype of x; sums are accumulated in float32 at least. Differentiable; what is stored in a
        format has no gradient.

    Raises:
        InvalidInputError: shapes or dtypes do not fit.
        UnsupportedError: the forced implementation cannot run these arguments.
    """
    _check(x, weight, bias)
    return of_rows(x, weight, bias)


def of_rows(x: Tensor, weight: Tensor | PackedTensor, bias: Tensor | None) -> Tensor:
    """`projection` without the checks."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return run(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])


def run(x: Tensor, weight: Tensor | PackedTensor, bias: Tensor | None) -> Tensor:
    """`projection` of rows [T, K] without the checks."""
    y: Tensor = dispatch.run(PROJECTION, x, weight, bias)
    return y


def _check(x: Tensor, weight: Tensor | PackedTensor, bias: Tensor | None) -> None:
    shape, packed = weight.shape, isinstance(weight, PackedTensor)
    matches = x.dim() >= 1 and len(shape) == 2 and x.shape[-1] == shape[1]
    of_rows = bias is None or (tuple(bias.shape) == (shape[0],) and bias.dtype == x.dtype)
    kind = weight.format.name if isinstance(weight, PackedTensor) else weight.dtype
    if not matches or not of_rows or not (packed or kind == x.dtype) or x.dtype not in _DTYPES:
        of_bias = None if bias is None else list(bias.shape)
        raise invalid_input(
            "projection",
            got=f"x {list(x.shape)} of {x.dtype}, weight {list(shape)} of {kind}, bias {of_bias}",
            needs="x [..., K], weight [N, K] and bias [N] or None, of one dtype: float32, bfloat16, float16 or float64;"
            " a weight may be a PackedTensor",
            fix="Pass the weight as nn.Linear keeps it, and x in its dtype.",
        )


def _look(x: Tensor, weight: Tensor | PackedTensor, bias: Tensor | None) -> dispatch.Looked | None:
    if isinstance(weight, PackedTensor):
        memory, form = weight.tensors, weight.format.name
    else:
        memory, form = (weight,), ""
    if bias is not None:
        memory = (*memory, bias)
    tensors = call_key(x, *memory)
    if tensors is None:
        return None
    deterministic = torch.are_deterministic_algorithms_enabled()
    where = settings.current().implementation, deterministic, torch.get_num_threads(), measures()
    return ("projection", where, form, memory[0].data_ptr(), tensors), memory


PROJECTION = dispatch.register(
    dispatch.Operation(
        "projection",
        (
            *(
                dispatch.Implementation(f"cpu-{isa.name}", partial(cpu.prepare, isa))
                for isa in native.ISAS or (native.ABSENT,)
            ),
            dispatch.Implementation("torch", plain.prepare),
            dispatch.Implementation("reference", reference.prepare),
        ),
        look=_look,
    )
)
