"""The formats that are a torch dtype and nothing more."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.formats.base import PackedTensor, WeightFormat

DENSE_FORMATS = tuple(
    WeightFormat(name, name, getattr(torch, name).itemsize * 8, getattr(torch, name))
    for name in ("float32", "bfloat16", "float16", "float64")
)
_BY_STORAGE = {f.storage: f for f in DENSE_FORMATS}


def dense(data: Tensor) -> PackedTensor:
    """Wrap an ordinary floating-point tensor [E, N, K]: its dtype is its whole format.

    Raises:
        InvalidInputError: the dtype is not float64, float32, float16 or bfloat16.
    """
    if data.dtype not in _BY_STORAGE:
        raise invalid_input(
            "dense",
            got=f"a tensor of {data.dtype}",
            needs=", ".join(f.name for f in DENSE_FORMATS),
            fix="Packed data needs a PackedTensor that names its format.",
        )
    return PackedTensor(data, _BY_STORAGE[data.dtype])
