"""A projection in the native engine: rows of the weight are read where they lie, each once."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.ops import native
from moestro.ops.projection import tuning

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supports(isa: native.Isa, x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """None, or the sentence why the engine cannot compute this with this instruction set."""
    reason = native.reason(isa)
    if reason is not None:
        return reason
    if not isa.multiplies_floats:
        return "it multiplies int8 only"
    tensors = (x, weight) if bias is None else (x, weight, bias)
    for t in tensors:
        reason = native.unreadable(t)
        if reason is not None:
            return reason
        if t.dtype not in _DTYPES or (isa.multiplies_bfloat16 and t.dtype is not torch.bfloat16):
            return (
                f"it multiplies {'bfloat16' if isa.multiplies_bfloat16 else 'floats of 16 and 32 bits'}, not {t.dtype}"
            )
        if native.differentiates(t):
            return "it computes no gradients, and a tensor requires one"
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        return "it reads rows, and those of the weight are not contiguous"
    return tuning.slower(isa, x.shape[0], x.dtype)


def run(isa: native.Isa, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`projection` of rows [T, K] for arguments that `supports` has passed."""
    engine = native.module
    assert engine is not None
    x = x if x.stride(1) == 1 else x.contiguous()
    bias = None if bias is None else bias.contiguous()
    dtype = native.FLOATS[x.dtype]
    out = native.empty(x.shape[0], weight.shape[0], x.dtype)
    stored = engine.Stored(
        element=native.ELEMENTS[str(x.dtype).removeprefix("torch.")],
        scale=native.SCALES["none"],
        rows=weight.shape[0],
        columns=weight.shape[1],
        row_stride=weight.stride(0) * weight.element_size(),
        base=(weight.data_ptr(), 0, 0, 0),
    )
    linear = engine.Linear(
        isa=isa.index,
        weights=stored,
        bias=None if bias is None else engine.Array(bias.data_ptr(), dtype, 0),
        x_dtype=dtype,
        out_dtype=dtype,
    )
    linear.run(torch.get_num_threads(), x.shape[0], x.data_ptr(), x.stride(0), out.data_ptr())
    return out
