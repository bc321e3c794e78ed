"""A projection in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from moestro.ops.dispatch import Prepared
from moestro.ops.tensors import without_autocast


def prepare(x: Tensor, weight: Tensor, bias: Tensor | None) -> Prepared:
    """`torch.nn.functional.linear`."""
    return Prepared("torch", without_autocast(x, F.linear))
