"""The projections beside the experts (attention, the head) through the engine: `nn.Linear` served in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moestro.errors import invalid_input, unsupported
from moestro.ops.projection import of_rows, projection

_SERVED = (torch.bfloat16, torch.float16)


class Projection(nn.Linear):
    """An `nn.Linear` whose forward is `moestro.ops.projection` where no gradient is asked for.

    Parameters, hooks and state dict are those of the module it was made from. Under autocast and in graphs of
    torch.compile and torch.export it is PyTorch's own linear.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        matches = input.dtype == weight.dtype and input.shape[-1] == weight.shape[1]
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(input.device.type) or not matches:
            return super().forward(input)
        return of_rows(input, weight, bias)

    def explained(self, input: Tensor) -> tuple[Callable[..., Tensor], Tensor, Tensor, Tensor | None]:
        """The call behind this one and its arguments, for `moestro.explain`."""
        return projection, input.reshape(-1, input.shape[-1]), self.weight, self.bias


def check_choice(projections: Any, operation: str) -> None:
    """Refuse what is neither True nor False: a format, say, which only experts have."""
    if not isinstance(projections, bool):
        raise invalid_input(
            operation,
            got=f"projections={projections!r}",
            needs="True or False",
            fix="Weights outside the experts keep their dtype; True only has the engine multiply them.",
        )


def check_projections(model: nn.Module, operation: str) -> None:
    """Refuse a model of which `serve_projections` could serve nothing."""
    if any(_is_servable(module) for module in model.modules()):
        return
    dtypes = sorted({str(m.weight.dtype).removeprefix("torch.") for m in model.modules() if type(m) is nn.Linear})
    found = ", ".join(dtypes) or "other classes"
    raise unsupported(
        operation,
        got=f"projections=True for {type(model).__name__}, whose linear modules have {found}",
        needs="nn.Linear modules in bfloat16 or float16",
        fix='Load the model with dtype="bfloat16", or leave projections out: PyTorch reads float32 as fast.',
    )


def serve_projections(model: nn.Module) -> None:
    """Turn every plain `nn.Linear` of 16 bits in `model` into a `Projection`, in place.

    Quantised linear modules, those of other classes and those of float32 stay as they are.
    """
    for module in model.modules():
        if _is_servable(module):
            module.__class__ = Projection


def served_projections(model: nn.Module) -> dict[str, Projection]:
    """The linear modules of `model` that run in the engine, by their names; none unless projections were asked for."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Projection)}


def _is_servable(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Projection) and module.weight.dtype in _SERVED
