"""What a projection must compute."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.formats import PackedTensor, dequantize
from moestro.ops.dispatch import Prepared


def prepare(x: Tensor, weight: Tensor | PackedTensor, bias: Tensor | None) -> Prepared:
    """The call of the reference."""
    return Prepared("reference", projection)


def projection(x: Tensor, weight: Tensor | PackedTensor, bias: Tensor | None) -> Tensor:
    """y[t, n] = sum over k of W[n, k] * x[t, k], plus b[n]; in float32 at least, rounded once to the dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    matrix = dequantize(weight, wide) if isinstance(weight, PackedTensor) else weight.to(wide)
    y = (x.to(wide)[:, None, :] * matrix).sum(-1)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)
