"""A projection in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from moestro.formats import PackedTensor, dequantize
from moestro.ops.dispatch import Prepared
from moestro.ops.expert_mlp.stored import recorded_product
from moestro.ops.tensors import is_intercepted, without_autocast


def prepare(x: Tensor, weight: Tensor | PackedTensor, bias: Tensor | None) -> Prepared:
    """`torch.nn.functional.linear`; of a weight that is stored in a format a panel at a time."""
    return Prepared("torch", without_autocast(x, _way(weight)))


def _way(weight: Tensor | PackedTensor) -> Callable[..., Tensor]:
    if not isinstance(weight, PackedTensor):
        return F.linear
    if torch.compiler.is_compiling() or not (is_intercepted() or forward_ad._current_level >= 0):
        return _stored
    return _decoded  # for vmap and forward mode, to which panels are no operation they know


def _decoded(x: Tensor, weight: PackedTensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, dequantize(weight, x.dtype), bias)


def _stored(x: Tensor, weight: PackedTensor, bias: Tensor | None) -> Tensor:
    y = recorded_product(x, (weight,))
    return y if bias is None else y + bias
