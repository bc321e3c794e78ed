"""One slice along I of shared experts: the outputs of all slices add up to those of the whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.errors import invalid_input, unsupported
from moestro.reference import activate
from moestro.shared import SharedExperts


class SharedSlice(nn.Module):
    """Part `part` of `parts` of shared experts, computed from views of their parameters: nothing is copied.

    Attributes:
        whole: the shared experts.
        part, parts: which slice of the intermediate size, as even as it goes.
    """

    def __init__(self, whole: SharedExperts, part: int, parts: int) -> None:
        super().__init__()
        self.whole, self.part, self.parts = whole, part, parts

    @classmethod
    def of(cls, shared: nn.Module, part: int, parts: int) -> SharedSlice:
        """The slice of shared experts.

        Raises:
            UnsupportedError: a module of another class.
            InvalidInputError: more parts than the intermediate size.
        """
        if not isinstance(shared, SharedExperts):
            raise unsupported(
                "SharedSlice",
                got=f"shared experts of the class {type(shared).__name__}",
                needs="moestro.SharedExperts, whose projections can be cut",
                fix="Build them as moestro.SharedExperts.",
            )
        if shared.down.shape[1] < parts:
            raise invalid_input(
                "SharedSlice",
                got=f"an intermediate size of {shared.down.shape[1]}, to be cut into {parts}",
                needs="at least one row a part",
                fix="Use fewer ranks.",
            )
        return cls(shared, part, parts)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> this slice's part of the output, [..., H]; errors as of `SharedExperts`."""
        shared, size = self.whole, self.whole.down.shape[1]
        start, stop = size * self.part // self.parts, size * (self.part + 1) // self.parts
        gated, bias = shared.activation.gated, shared.gate_up_bias
        spans = [(start, stop), (size + start, size + stop)] if gated else [(start, stop)]
        wide = torch.float32 if x.dtype == torch.float16 else x.dtype
        rows = x.to(wide)
        halves = [
            F.linear(rows, shared.gate_up[a:b].to(wide), None if bias is None else bias[a:b].to(wide)) for a, b in spans
        ]
        h = activate(halves[0] if len(halves) == 1 else torch.cat(halves, -1), shared.activation)
        last = shared.down_bias if self.part == 0 else None
        y = F.linear(h, shared.down[:, start:stop].to(wide), None if last is None else last.to(wide)).to(x.dtype)
        gate = shared.output_gate
        return y if gate is None else y * torch.sigmoid(F.linear(x, gate))
