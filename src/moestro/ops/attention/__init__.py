"""attention: one query of each head over the keys and values that a cache holds, as a step of decoding asks for it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moestro import settings
from moestro.errors import invalid_input
from moestro.ops import dispatch, native
from moestro.ops.attention import cpu, plain, reference
from moestro.ops.tensors import is_intercepted, no_extent

__all__ = ["attention"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """y[b, h] = sum over t of p[b, h, t] * value[b, g, t], p the softmax over t of scale * query[b, h] . key[b, g, t].

    g is the group of a head: heads of a group are neighbours and share its keys and values.

    Args:
        query: [B, H, D], float32, bfloat16, float16 or float64: of one token of each sequence.
        key: [B, G, T, D] of the same dtype, T >= 1; H is a multiple of G.
        value: [B, G, T, V] of the same dtype.
        scale: of the logits.
        mask: [B, T] of the same dtype, added to the logits of every head; None for none.
        sinks: [H], floats: one more logit of each head, whose share goes to no value; None for none.

    Returns:
        [B, H, V] in the dtype of the query; logits and sums are in float32 at least. Zeros where a mask of -inf leaves
        no logit of a head. Differentiable.

    Raises:
        InvalidInputError: shapes or dtypes do not fit.
        UnsupportedError: the forced implementation cannot run these arguments.
    """
    y: Tensor = dispatch.run(ATTENTION, query, key, value, scale, mask, sinks)
    return y


def _check(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, sinks: Tensor | None) -> None:
    fits = query.dim() == 3 and key.dim() == value.dim() == 4 and key.shape[:3] == value.shape[:3]
    if fits:
        (batch, heads, columns), (groups, num_keys) = query.shape, key.shape[1:3]
        fits = key.shape[0] == batch and key.shape[3] == columns and num_keys > 0
        fits = fits and groups > 0 and heads % groups == 0 and min(columns, value.shape[3]) > 0
        fits = fits and (mask is None or tuple(mask.shape) == (batch, num_keys))
        fits = fits and (sinks is None or (tuple(sinks.shape) == (heads,) and sinks.is_floating_point()))
    same = {t.dtype for t in (query, key, value, mask) if t is not None} == {query.dtype}
    if not fits or not same or query.dtype not in _DTYPES:
        shapes = {"query": query, "key": key, "value": value, "mask": mask, "sinks": sinks}
        raise invalid_input(
            "attention",
            got=", ".join(f"{name} {list(t.shape)} of {t.dtype}" for name, t in shapes.items() if t is not None),
            needs="query [B, H, D], key [B, G, T, D], value [B, G, T, V] and mask [B, T] of one dtype:"
            " float32, bfloat16, float16 or float64; sinks [H] of floats; T >= 1, and H a multiple of G",
            fix="Pass one token of each sequence; for more, torch.nn.functional.scaled_dot_product_attention.",
        )


def _look(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, sinks: Tensor | None
) -> dispatch.Looked | None:
    """All but the number of keys, which grows with every step and decides nothing."""
    tensors = [t for t in (query, key, value, mask, sinks) if t is not None]
    if is_intercepted() or forward_ad._current_level >= 0 or no_extent(*tensors) is not None:
        return None
    num_keys = key.shape[2:3]
    agree = bool(num_keys) and num_keys[0] > 0 and value.shape[2:3] == num_keys
    sizes = query.shape, key.shape[:2], key.shape[3:], value.shape[:2], value.shape[3:]
    of_mask = mask is not None and (mask.dim(), mask.shape[:1], mask.shape[1:2] == num_keys)
    laid = tuple(
        (
            type(t),
            t.dtype,
            t.device,
            t.is_neg(),
            t.requires_grad,
            t.dim() > 0 and (t.shape[-1] < 2 or t.stride(-1) == 1),
        )
        for t in tensors
    )
    where = settings.current().implementation, torch.get_num_threads(), torch.is_grad_enabled()
    return ("attention", where, laid, sizes, agree, of_mask, sinks is not None and sinks.shape), ()


ATTENTION = dispatch.register(
    dispatch.Operation(
        "attention",
        (
            *(
                dispatch.Implementation(f"cpu-{isa.name}", partial(cpu.prepare, isa))
                for isa in native.ISAS or (native.ABSENT,)
            ),
            dispatch.Implementation("torch", plain.prepare),
            dispatch.Implementation("reference", reference.prepare),
        ),
        check=_check,
        look=_look,
    )
)
