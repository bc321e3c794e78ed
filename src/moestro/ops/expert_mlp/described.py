"""Stored experts as the native engine knows them: described once, and remembered while their memory stays where it is.

A description is kept beside the stored value, which is frozen, for as long as that lives. It is made anew where a
tensor has moved: its storage was replaced (`.data =`, an offloading hook), or of a stack the strides or the shape.
Values that are written in place need nothing new.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from moestro import formats
from moestro.formats import PackedTensor, SplitTensor, StoredExperts, WeightFormat
from moestro.ops import native, tensors

_ELEMENTS = {
    "float32": 0, "float16": 1, "bfloat16": 2, "e4m3": 3, "int8": 4, "e2m1": 5, "int4": 6, "uint4": 7,
}  # fmt: skip
_SCALES = {
    torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.uint8: 4, torch.float8_e8m0fnu: 4,
    torch.float8_e4m3fn: 5,
}  # fmt: skip


class Description:
    """One projection as it lies in memory.

    Attributes:
        is_ordinary: whether every tensor is a plain one on the CPU, whose memory holds its values as they are.
        reason: why the engine cannot read it, with {name} for the projection's; None if it can.
        handle: what the engine takes; None if it cannot read it.
    """

    def __init__(self, stored: StoredExperts) -> None:
        self.is_ordinary = all(map(tensors.is_ordinary, stored.tensors))
        self.reason = _reason(stored)
        self.handle: Any = None

    def stands(self, used: Collection[int]) -> bool:
        """Whether everything lies where it lay, or of experts apart those of these numbers."""
        raise NotImplementedError


class _Stack(Description):
    def __init__(self, stored: PackedTensor) -> None:
        super().__init__(stored)
        tensors = stored.tensors if self.is_ordinary else ()
        self._places = [(t, t.data_ptr(), t.stride(), t.shape, t.dtype) for t in tensors]
        if self.reason is None and self.is_ordinary:
            self.handle = _stack(stored, stored.shape[-2], stored.format)

    def stands(self, used: Collection[int]) -> bool:
        for t, address, strides, shape, dtype in self._places:
            if t.data_ptr() != address or t.stride() != strides or t.shape != shape or t.dtype is not dtype:
                return False
        return True


class _Apart(Description):
    def __init__(self, stored: SplitTensor) -> None:
        super().__init__(stored)
        self._tensors = [[t for matrix in parts for t in matrix.tensors] for parts in stored.matrices]
        self._addresses = [list(map(Tensor.data_ptr, tensors)) for tensors in self._tensors] if self.is_ordinary else []
        if self.reason is None and self.is_ordinary:
            self.handle = self._table(stored)

    def _table(self, stored: SplitTensor) -> Any:
        """Every expert that lies in memory; one that does not, as its weights are elsewhere, may not be named."""
        first = stored.matrices[0]
        made = _stack(first[0], stored.shape[1], stored.format)
        empty = 0 in stored.shape
        there = [e for e, addresses in enumerate(self._addresses) if empty or all(addresses)]
        addresses = [_addresses(matrix) for e in there for matrix in stored.matrices[e]]
        assert native.module is not None
        native.module.use_table(made, len(stored.matrices), len(first), there, addresses)
        return made

    def stands(self, used: Collection[int]) -> bool:
        tensors, addresses = self._tensors, self._addresses
        return not self.is_ordinary or all(list(map(Tensor.data_ptr, tensors[e])) == addresses[e] for e in used)


_KNOWN: dict[int, tuple[weakref.ref[StoredExperts], Description]] = {}


def described(stored: StoredExperts, used: Collection[int]) -> Description:
    """The description of a projection; where its experts lie apart, it holds for those of the numbers `used`."""
    key = id(stored)
    found = _KNOWN.get(key)
    if found is not None and found[0]() is stored and found[1].stands(used):
        return found[1]
    made = _Apart(stored) if isinstance(stored, SplitTensor) else _Stack(stored)
    _KNOWN[key] = weakref.ref(stored, lambda _: _KNOWN.pop(key, None)), made
    return made


def _reason(stored: StoredExperts) -> str | None:
    form = stored.format
    if form.element not in _ELEMENTS or formats.FORMATS.get(form.name) != form:
        return f"it does not read {form.name}, in which {{name}} is stored"
    matrices = [m for parts in stored.matrices for m in parts] if isinstance(stored, SplitTensor) else [stored]
    if any(
        m.data.dtype != form.storage for m in matrices
    ):  # `.data =` and Module.to(dtype) exchange what a parameter holds
        return f"{{name}} is described as {form.name} and has come to hold numbers of another dtype"
    if isinstance(stored, SplitTensor):
        return _no_matrices(stored)
    for t in (stored.data, stored.scales, stored.zeros):
        if t is not None and t.shape[-1] > 1 and t.stride(-1) != 1:
            return "it reads rows, and {name} is not contiguous along what a product sums over"
    return None


def _no_matrices(stored: SplitTensor) -> str | None:
    if len({part.data.shape[0] for part in stored.matrices[0]}) > 1:
        return "the matrices of {name} differ in height"
    if not all(t.is_contiguous() for t in stored.tensors):
        return "it reads experts apart as contiguous matrices, and one of {name} is not"
    if len({m.scales.dtype for parts in stored.matrices for m in parts if m.scales is not None}) > 1:
        return "the scales of {name} are of several dtypes"
    return None


def _stack(stored: PackedTensor, num_rows: int, form: WeightFormat) -> Any:
    scaling, data, scales, zeros = form.scaling, stored.data, stored.scales, stored.zeros
    assert native.module is not None
    size = data.element_size()
    is_stack = data.dim() == 3
    return native.module.stacked(
        (_ELEMENTS[form.element], 0 if scales is None else _SCALES[scales.dtype]),
        (num_rows, stored.shape[-1]),
        (1, 0) if scaling is None else (scaling.rows, scaling.columns),
        (data.stride(-2) * size, _bytes(scales, -2), _bytes(zeros, -2)),
        _addresses(stored),
        (data.stride(0) * size, _bytes(scales, 0), _bytes(zeros, 0), _bytes(stored.global_scales, 0))
        if is_stack
        else (0, 0, 0, 0),
    )


def _bytes(t: Tensor | None, dim: int) -> int:
    return 0 if t is None or t.dim() == 0 else t.stride(dim) * t.element_size()


def _addresses(matrix: PackedTensor) -> tuple[int, int, int, int]:
    scales, zeros, factors = matrix.scales, matrix.zeros, matrix.global_scales
    return (
        matrix.data.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        0 if factors is None else factors.data_ptr(),
    )
