"""A projection in the native engine: rows of the weight are read where they lie, each once."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.ops import native, tensors
from moestro.ops.projection import tuning

_FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def supports(isa: native.Isa, x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """None, or the sentence why the engine cannot compute this with this instruction set."""
    reason = native.reason(isa)
    if reason is not None:
        return reason
    if not isa.multiplies_floats:
        return "it multiplies rows as int8 only"
    for t in (x, weight) if bias is None else (x, weight, bias):
        reason = native.unreadable(t)
        if reason is not None:
            return reason
        if t.dtype not in _FLOATS or (isa.multiplies_bfloat16 and t.dtype is not torch.bfloat16):
            return (
                f"it multiplies {'bfloat16' if isa.multiplies_bfloat16 else 'floats of 16 and 32 bits'}, not {t.dtype}"
            )
        if tensors.differentiates(t):
            return tensors.REQUIRES_GRAD
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        return "it reads rows, and those of the weight are not contiguous"
    return tuning.slower(isa, x.shape[0], x.dtype)


def run(isa: native.Isa, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`projection` of rows [T, K] for arguments that `supports` has passed."""
    engine = native.module
    assert engine is not None
    x = tensors.contiguous_rows(x)
    bias = None if bias is None else bias.contiguous()
    dtype = _FLOATS[x.dtype]
    out = tensors.empty(x.shape[0], weight.shape[0], x.dtype)
    stored = engine.stacked(
        (dtype, 0),
        tuple(weight.shape),
        (1, 0),
        (weight.stride(0) * weight.element_size(), 0, 0),
        (weight.data_ptr(), 0, 0, 0),
        (0, 0, 0, 0),
    )
    engine.project(
        isa.index,
        torch.get_num_threads(),
        x.shape[0],
        (x.data_ptr(), dtype, x.stride(0)),
        stored,
        (0, 0, 0) if bias is None else (bias.data_ptr(), dtype, 0),
        (out.data_ptr(), dtype),
    )
    return out
