"""A projection in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def projection(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`."""
    return F.linear(x, weight, bias)
