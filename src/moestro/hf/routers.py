"""The routers beside a model's expert layers, for guesses of what they will pick; the model's own code decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from moestro.hf.store import STORE
from moestro.memory.prefetch import Router

CORRECTION = "e_score_correction_bias"
"""Added to scores of 0 to 1 where experts are picked, in DeepSeek-V3 and its descendants."""


def router_of(model: nn.Module, path: str, num_experts: int, hidden_size: int) -> Router | None:
    """What scores rows [T, H] for the experts of the layer at `path`; None where no module, or several, could be it.

    A router is a module with a weight [E, H], inside the layer or at most two levels above it.
    """
    found = router_module(model, path, lambda module: _shape(module) == (num_experts, hidden_size))
    return None if found is None else _Scores(found[1], _correction(found[0], num_experts))


def router_module(model: nn.Module, path: str, fits: Callable[[nn.Module], bool]) -> tuple[nn.Module, nn.Module] | None:
    """The only module that fits in or around the layer at `path`, after the one in which it was looked for."""
    for name in _around(path):
        root = model.get_submodule(name)
        found = [module for module in _beside(root) if fits(module)]
        if found:
            return (root, found[0]) if len(found) == 1 else None
    return None


def scores_of(module: nn.Module, num_experts: int) -> bool:
    """Whether a module has a weight [E, H] of a router's."""
    shape = _shape(module)
    return shape is not None and len(shape) == 2 and shape[0] == num_experts


class _Scores:
    """The router's scores, with the parameters that it has at the time of the call."""

    def __init__(self, router: nn.Module, holder: nn.Module | None) -> None:
        self._router, self._holder = router, holder

    def __call__(self, rows: Tensor) -> Tensor:
        weight = self._router.get_parameter("weight")
        bias = getattr(self._router, "bias", None)
        scores = F.linear(rows.to(weight.dtype), weight, bias if isinstance(bias, Tensor) else None)
        return scores if self._holder is None else scores.float().sigmoid() + getattr(self._holder, CORRECTION)


def _around(path: str) -> Iterator[str]:
    for _ in range(3):
        yield path
        if not path:
            return
        path = path.rpartition(".")[0]


def _beside(root: nn.Module) -> list[nn.Module]:
    return [module for name, module in root.named_modules() if STORE not in name.split(".")]


def _shape(module: nn.Module) -> tuple[int, ...] | None:
    weight = module._parameters.get("weight")
    return None if weight is None else tuple(weight.shape)


def _correction(root: nn.Module, num_experts: int) -> nn.Module | None:
    found = [m for m in _beside(root) if getattr(m, CORRECTION, None) is not None]
    return found[0] if len(found) == 1 and tuple(getattr(found[0], CORRECTION).shape) == (num_experts,) else None
