"""The formats that are a torch dtype and nothing more."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.formats.base import PackedTensor, WeightFormat

FLOAT64 = WeightFormat("float64", "float64", 64, torch.float64)
FLOAT32 = WeightFormat("float32", "float32", 32, torch.float32)
FLOAT16 = WeightFormat("float16", "float16", 16, torch.float16)
BFLOAT16 = WeightFormat("bfloat16", "bfloat16", 16, torch.bfloat16)

DENSE_FORMATS = (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)
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
