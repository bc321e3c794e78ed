"""A projection in the native engine: rows of the weight are read where they lie, each once."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from moestro.formats import PackedTensor
from moestro.ops import native
from moestro.ops.dispatch import KernelUse, Prepared
from moestro.ops.expert_mlp.native_handles import stored_handle, why_unreadable, why_untiled
from moestro.ops.projection import measured, tuning
from moestro.ops.tensors import empty, no_extent, no_gradient, no_memory, not_on_cpu, rows

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Weight = Tensor | PackedTensor


def prepare(isa: native.Isa, x: Tensor, weight: Weight, bias: Tensor | None) -> Prepared | str:
    """The call on this instruction set, or the reason why there is none."""
    reason = why_unsupported(isa, x, weight, bias)
    if reason is not None:
        return reason
    threads, num_rows = torch.get_num_threads(), weight.shape[0]
    copied = bias is not None and bias.stride(0) != 1
    kept = None if copied else linear(isa, x.dtype, weight, bias)

    def compute(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        held = None if bias is None else bias.contiguous()
        made = kept or linear(isa, x.dtype, weight, held)
        x = rows(x)
        out = empty(x.shape[0], num_rows, x.dtype)
        made.run(threads, x.shape[0], x.data_ptr(), x.stride(0), out.data_ptr())
        return out

    def kernels(x: Tensor, weight: Weight, bias: Tensor | None) -> tuple[KernelUse, ...]:
        made = kept or linear(isa, x.dtype, weight, None if bias is None else bias.contiguous())
        uses = made.plan(threads, x.shape[0])
        return tuple(KernelUse(use.projection, use.kernel, use.units, use.rows) for use in uses)

    return Prepared(f"cpu-{isa.name}", compute, threads=threads, kernels=kernels)


def linear(isa: native.Isa, x_dtype: torch.dtype, weight: Weight, bias: Tensor | None) -> Any:
    """What the engine holds of a matrix whose rows, and bias, lie where they can be read."""
    engine, dtype = native.engine(), native.FLOATS[x_dtype]
    held = None if bias is None else engine.Array(bias.data_ptr(), dtype, 0)
    return engine.Linear(
        isa=isa.index,
        weights=stored_handle(weight) if isinstance(weight, PackedTensor) else _dense_handle(weight),
        bias=held,
        x_dtype=dtype,
        out_dtype=dtype,
        same_bits=torch.are_deterministic_algorithms_enabled(),
    )


def _dense_handle(weight: Tensor) -> Any:
    return native.engine().Stored(
        element=native.ELEMENTS[str(weight.dtype).removeprefix("torch.")],
        scale=native.SCALES["none"],
        rows=weight.shape[0],
        columns=weight.shape[1],
        row_stride=weight.stride(0) * weight.element_size(),
        base=(weight.data_ptr(), 0, 0, 0),
    )


def why_unsupported(isa: native.Isa, x: Tensor, weight: Weight, bias: Tensor | None) -> str | None:
    """Why the engine cannot compute this with this instruction set; None if it can."""
    reason = native.reason(isa)
    if reason is not None:
        return reason
    if not isa.multiplies_floats:
        return native.INTEGERS_ONLY
    packed = isinstance(weight, PackedTensor)
    stored = weight.tensors if isinstance(weight, PackedTensor) else (weight,)
    floats = [t for t in (x, None if packed else weight, bias) if isinstance(t, Tensor)]
    for t in (x, *stored):
        if (reason := not_on_cpu(t)) is not None:
            return reason
    for t in floats:
        if t.dtype not in _DTYPES or (isa.multiplies_bfloat16 and t.dtype is not torch.bfloat16):
            return (
                f"it multiplies {'bfloat16' if isa.multiplies_bfloat16 else 'floats of 16 and 32 bits'}, not {t.dtype}"
            )
    if (reason := _unreadable(isa, weight)) is not None:
        return reason
    tensors = (*floats, *(stored if packed else ()))
    reason = no_memory(*tensors) or no_gradient(*tensors) or no_extent(*tensors)
    if reason is not None or packed:  # PyTorch would decode what is packed before it multiplies
        return reason
    return tuning.slower(isa, x.shape[0], x.dtype, _engine(isa))


@functools.cache
def _engine(isa: native.Isa) -> measured.Multiply:
    """What multiplies rows by a matrix with this instruction set, whatever is faster."""

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        out = empty(x.shape[0], weight.shape[0], x.dtype)
        made = linear(isa, x.dtype, weight, None)
        made.run(torch.get_num_threads(), x.shape[0], x.data_ptr(), x.stride(0), out.data_ptr())
        return out

    return multiply


def _unreadable(isa: native.Isa, weight: Weight) -> str | None:
    """Why the engine cannot read the weight with this instruction set; None if it can."""
    if isinstance(weight, PackedTensor):
        reason = (why_untiled(weight.format) if isa.multiplies_bfloat16 else None) or why_unreadable(weight)
        return None if reason is None else reason.format(name="the weight")
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        return "it reads rows, and those of the weight are not contiguous"
    return None
