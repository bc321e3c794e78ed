"""A projection in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from moestro.ops.dispatch import Prepared


def prepare(x: Tensor, weight: Tensor, bias: Tensor | None) -> Prepared:
    """`torch.nn.functional.linear`."""
    return Prepared("torch", F.linear)
