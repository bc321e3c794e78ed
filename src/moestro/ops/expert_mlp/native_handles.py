"""Stored experts as the native engine takes them: sizes, strides and addresses, in a handle that holds no tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moestro import formats
from moestro.formats import PackedTensor, SplitTensor, StoredExperts, WeightFormat
from moestro.ops import native
from moestro.ops.expert_mlp.reasons import UNREAD_ZEROS, exchanged
from moestro.ops.tensors import no_extent

_SCALES = {
    torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.uint8: "e8m0",
    torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3",
}  # fmt: skip


def stored_handle(stored: StoredExperts) -> Any:
    """What the engine is given for experts that `why_unreadable` has passed."""
    if isinstance(stored, SplitTensor):
        return _unstacked(stored)
    return _matrices(stored, stored.shape[-2], stored.format)


def why_unreadable(stored: StoredExperts) -> str | None:
    """Why the engine cannot read the experts of a projection, with {name} for the projection's; None if it can."""
    form = stored.format
    if form.element not in native.ELEMENTS or formats.FORMATS.get(form.name) != form:
        return f"it does not read {form.name}, in which {{name}} is stored"
    reason = _unread_scaling(form)
    if reason is not None:
        return f"{reason}, and {{name}} is stored as {form.name}"
    reason = exchanged(stored)
    if reason is not None:
        return reason
    if isinstance(stored, SplitTensor):
        return _uneven_matrices(stored)
    for t in (stored.data, stored.scales, stored.zeros):
        if t is not None and t.shape[-1] > 1 and t.stride(-1) != 1:
            return "it reads rows, and {name} is not contiguous along what a product sums over"
    return no_extent(*stored.tensors)


def why_untiled(form: WeightFormat) -> str | None:
    """Why tiles of bfloat16 do not hold such weights; None if they do."""
    columns = form.scaling.columns if form.scaling is not None else 0
    if form.element not in native.TILED:
        return f"it multiplies bfloat16, and {{name}} is stored as {form.name}"
    if columns % 32 and form.element != "e2m1":
        return f"its tiles hold whole groups of 32 columns, and {{name}} is stored as {form.name}"
    return None


def _unread_scaling(form: WeightFormat) -> str | None:
    """Why the engine does not read scales for such weights; None if it does."""
    if form.scaling is None:
        return None
    columns, least = form.scaling.columns, 16 if form.per_item == 2 else 32
    if form.scaling.zeros != (form.element == "uint4"):
        return UNREAD_ZEROS
    if columns and (columns < least or columns & (columns - 1)):
        return f"it reads scales of a row, or of a power of two of its columns, here at least {least}"
    return None


def _uneven_matrices(stored: SplitTensor) -> str | None:
    if len({part.data.shape[0] for part in stored.matrices[0]}) > 1:
        return "the matrices of {name} differ in height"
    if not all(t.is_contiguous() for t in stored.tensors):
        return "it reads unstacked experts as contiguous matrices, and one of {name} is not"
    if len({m.scales.dtype for parts in stored.matrices for m in parts if m.scales is not None}) > 1:
        return "the scales of {name} are of several dtypes"
    return no_extent(*(t for t in stored.tensors if _is_present(t)))


def _is_present(t: Tensor) -> bool:
    """Whether the tensor has memory: a view of a storage that was given back has an address all the same."""
    return t.untyped_storage().data_ptr() != 0


def _unstacked(stored: SplitTensor) -> Any:
    """Every expert that lies in memory; one that does not, as its weights are elsewhere, may not be named."""
    first = stored.matrices[0]
    made = _matrices(first[0], stored.shape[1], stored.format)
    empty = 0 in stored.shape
    there = [
        e for e, parts in enumerate(stored.matrices) if empty or all(_is_present(t) for m in parts for t in m.tensors)
    ]
    addresses = [_addresses(matrix) for e in there for matrix in stored.matrices[e]]
    made.use_table(num_experts=len(stored.matrices), num_blocks=len(first), experts=there, matrices=addresses)
    return made


def _matrices(stored: PackedTensor, num_rows: int, form: WeightFormat) -> Any:
    scaling, data, scales, zeros = form.scaling, stored.data, stored.scales, stored.zeros
    group_rows, group_columns = (1, 0) if scaling is None else (scaling.rows, scaling.columns)
    steps = (
        tuple(_bytes(t, 0) for t in (data, scales, zeros, stored.global_scales)) if data.dim() == 3 else (0, 0, 0, 0)
    )
    return native.engine().Stored(
        element=native.ELEMENTS[form.element],
        scale=native.SCALES["none" if scales is None else _SCALES[scales.dtype]],
        rows=num_rows,
        columns=stored.shape[-1],
        group_rows=group_rows,
        group_columns=group_columns,
        row_stride=_bytes(data, -2),
        scale_row_stride=_bytes(scales, -2),
        zero_row_stride=_bytes(zeros, -2),
        base=_addresses(stored),
        step=steps,
    )


def _bytes(t: Tensor | None, dim: int) -> int:
    return 0 if t is None or t.dim() == 0 else t.stride(dim) * t.element_size()


def _addresses(matrix: PackedTensor) -> tuple[int, int, int, int]:
    tensors = (matrix.data, matrix.scales, matrix.zeros, matrix.global_scales)
    data, scales, zeros, factors = (0 if t is None else t.data_ptr() for t in tensors)
    return data, scales, zeros, factors
