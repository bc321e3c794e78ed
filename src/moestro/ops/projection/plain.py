"""A projection in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from moestro.formats import PackedTensor
from moestro.ops.dispatch import Prepared
from moestro.ops.expert_mlp.stored import recorded_product
from moestro.ops.tensors import without_autocast


def prepare(x: Tensor, weight: Tensor | PackedTensor, bias: Tensor | None) -> Prepared:
    """`torch.nn.functional.linear`; of a weight that is stored in a format a panel at a time."""
    return Prepared("torch", without_autocast(x, _stored if isinstance(weight, PackedTensor) else F.linear))


def _stored(x: Tensor, weight: PackedTensor, bias: Tensor | None) -> Tensor:
    y = recorded_product(x, (weight,))
    return y if bias is None else y + bias
