"""The projections beside the experts (attention, the head) through the engine: `nn.Linear` served in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moestro.ops.projection import of_rows

_SERVED = (torch.bfloat16, torch.float16)


class Projection(nn.Linear):
    """An `nn.Linear` whose forward is `moestro.ops.projection` where no gradient is asked for.

    Parameters, hooks and state dict are those of the module it was made from. Under autocast and in graphs of
    torch.compile and torch.export it is PyTorch's own linear.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        fits = input.dtype == weight.dtype and input.shape[-1] == weight.shape[1]
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(input.device.type) or not fits:
            return super().forward(input)
        return of_rows(input, weight, bias)


def serve_projections(model: nn.Module) -> int:
    """Turn every plain `nn.Linear` of 16 bits in `model` into a `Projection`, in place; returns how many there are.

    Quantised linear modules, those of other classes and those of float32 stay as they are.
    """
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype in _SERVED:
            module.__class__ = Projection
    return sum(isinstance(module, Projection) for module in model.modules())
