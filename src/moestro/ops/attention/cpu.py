"""Attention of one query in the native engine: keys and values are read where they lie, each once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moestro.ops import native
from moestro.ops.attention import tuning
from moestro.ops.dispatch import Prepared
from moestro.ops.tensors import no_extent, no_gradient, no_memory, not_on_cpu

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def prepare(isa: native.Isa, *arguments: Any) -> Prepared | str:
    """The call on this instruction set, or the reason why there is none."""
    query, key, value, _, mask, sinks = arguments
    reason = _why_unsupported(isa, query, key, value, mask, sinks)
    if reason is not None:
        return reason
    engine, index, dtype, threads = native.engine(), isa.index, native.FLOATS[query.dtype], torch.get_num_threads()

    def compute(
        query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        (batch, heads, columns), (groups, num_keys), wide = query.shape, key.shape[1:3], value.shape[3]
        out = torch.empty_strided((batch, heads, wide), (heads * wide, wide, 1), dtype=query.dtype, device=query.device)
        if out.numel():
            logits = None if sinks is None else sinks.detach().to(torch.float32).contiguous()
            engine.attention(
                isa=index,
                sizes=(batch, heads, groups, num_keys, columns, wide),
                dtype=dtype,
                query=(query.data_ptr(), query.stride(0), query.stride(1), 0),
                key=(key.data_ptr(), *key.stride()[:3]),
                value=(value.data_ptr(), *value.stride()[:3]),
                mask=(0, 0) if mask is None else (mask.data_ptr(), mask.stride(0)),
                sinks=0 if logits is None else logits.data_ptr(),
                scale=scale,
                out=out.data_ptr(),
                num_threads=threads,
            )
        return out

    return Prepared(f"cpu-{isa.name}", compute, threads=threads)


def _why_unsupported(
    isa: native.Isa, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> str | None:
    """Why the engine cannot compute this with this instruction set; None if it can."""
    if (reason := native.reason(isa)) is not None:
        return reason
    if not isa.multiplies_floats:
        return native.INTEGERS_ONLY
    read = [t for t in (query, key, value, mask) if t is not None]
    tensors = read if sinks is None else [*read, sinks]
    for t in tensors:
        if (reason := not_on_cpu(t)) is not None:
            return reason
    if query.dtype not in _DTYPES or (isa.multiplies_bfloat16 and query.dtype is not torch.bfloat16):
        return (
            f"it multiplies {'bfloat16' if isa.multiplies_bfloat16 else 'floats of 16 and 32 bits'}, not {query.dtype}"
        )
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in read):
        return "it reads rows, and those of a tensor are not contiguous"
    if (reason := tuning.why_too_many(query.shape[1], key.shape[1])) is not None:
        return reason
    return no_memory(*tensors) or no_gradient(*tensors) or no_extent(*tensors)
