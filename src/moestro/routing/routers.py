"""The routers as modules: a weight, its optional biases, and `route`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.errors import invalid_input, several_devices
from moestro.ops.inputs import no_rows
from moestro.routing.groups import GroupLimit
from moestro.routing.scoring import Scoring
from moestro.routing.selection import route
from moestro.types import Routing


def router_input(x: Tensor, weight: Tensor, operation: str) -> Tensor:
    """Floating-point x [..., H] as [T, H] in the dtype of routing: float64 if x or weight is that, else float32."""
    if x.dim() < 1 or x.shape[-1] != weight.shape[-1] or not x.is_floating_point():
        raise no_rows(operation, x, weight.shape[-1])
    if x.device != weight.device:
        raise several_devices(operation, x=x.device, weight=weight.device)
    wide = torch.float64 if torch.float64 in (x.dtype, weight.dtype) else torch.float32
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return x if x.dtype == wide else x.to(wide)


class TopKRouter(nn.Module):
    """Selects top_k of num_experts experts for each token.

    The maths runs in float32 whatever the dtypes of x and weight (float64 if one of them is), autocast or not.

    Args:
        hidden_size: H.
        num_experts: E, without shared experts.
        top_k: K, 1 <= K <= E.
        scoring: a `Scoring` or the name of a preset, e.g. "softmax", "softmax-topk", "sigmoid-renormalized", "llama4".
        bias: whether the logits have a learned bias.
        correction_bias: whether selection has a bias of its own, which never reaches the weights.
        device, dtype: of the parameters, as torch modules have it.

    Attributes:
        num_experts: how many experts the ids name: E, or E + S with scoring.shared_experts S.
        weight: parameter [E, H] ([E + S, H] with scoring.shared_experts S).
        bias: parameter [E] ([E + S]), or None.
        correction_bias: buffer [E], float32, zero until loaded or set, or None.

    Raises:
        InvalidInputError: sizes do not fit.
    """

    correction_bias: Tensor | None
    groups: GroupLimit | None = None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        scoring: str | Scoring = "softmax-renormalized",
        bias: bool = False,
        correction_bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden_size < 1 or not 1 <= top_k <= num_experts:
            raise invalid_input(
                type(self).__name__,
                got=f"hidden_size={hidden_size}, num_experts={num_experts}, top_k={top_k}",
                needs="hidden_size >= 1 and 1 <= top_k <= num_experts",
                fix="Lower top_k or raise num_experts.",
            )
        self.top_k = top_k
        self.scoring = Scoring.of(scoring)
        rows = num_experts + self.scoring.shared_experts
        self.num_experts = rows
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        own = torch.zeros(num_experts, device=device, dtype=torch.float32) if correction_bias else None
        self.register_buffer("correction_bias", own)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(H), as nn.Linear; biases zero."""
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        for b in (self.bias, self.correction_bias):
            if b is not None:
                nn.init.zeros_(b)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        """The correction bias stays float32 at least: in 16 bits the steps of `balanced_bias` are lost in it."""
        before = self.correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.correction_bias
        if before is not None and after is not None and after.dtype.itemsize < before.dtype.itemsize:
            self.correction_bias = before.to(after.device)
        return self

    def logits(self, x: Tensor) -> Tensor:
        """Logits [T, E] of x [..., H] in float32, or float64: what losses on the router want.

        Raises:
            InvalidInputError: x is not floating point or not [..., H].
        """
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        x = router_input(x, weight, type(self).__name__)
        if weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        if not torch.is_autocast_enabled("cpu" if x.is_cpu else x.device.type):
            return F.linear(x, weight, bias)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight, bias)

    def forward(self, x: Tensor, logits: Tensor | None = None) -> Routing:
        """Route x [..., H]; the Routing is [T, K] with T the product of the leading dimensions.

        Args:
            x: hidden states.
            logits: those of `self.logits(x)`, for who has them already.

        Raises:
            InvalidInputError: x is not floating point or not [..., H], or a logit is NaN (see `route`).
        """
        return route(
            self.logits(x) if logits is None else logits, self.top_k, self.scoring, self.correction_bias, self.groups
        )

    def extra_repr(self) -> str:
        e, h = self.weight.shape
        groups = "" if self.groups is None else f", groups={self.groups}"
        return f"hidden_size={h}, num_experts={e}, top_k={self.top_k}, scoring={self.scoring}{groups}"


class GroupLimitedRouter(TopKRouter):
    """Selects top_k experts within each token's best groups of experts (DeepSeek-V2, V3 and descendants).

    Always has a `correction_bias` [E]: zero does nothing.

    Args:
        hidden_size: H.
        num_experts: E, divisible by groups.num_groups.
        top_k: K, at most the number of experts in the kept groups.
        groups: e.g. GroupLimit(num_groups=8, top_groups=4).
        scoring: as for `TopKRouter`. DeepSeek-V3: Scoring("sigmoid", renormalize=True, epsilon=1e-20, scale=2.5).
        bias, device, dtype: as for `TopKRouter`.

    Raises:
        InvalidInputError: sizes do not fit.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        groups: GroupLimit,
        scoring: str | Scoring = "sigmoid-renormalized",
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        where: Any = {"device": device, "dtype": dtype}
        super().__init__(hidden_size, num_experts, top_k, scoring, bias, correction_bias=True, **where)
        groups.check(num_experts, top_k)
        self.groups = groups
