"""What an adapter is: one family outside Transformers' experts interface, served through the same primitive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moestro.hf.experts import PLAN, Plan, check_dense, refuse


@dataclass(frozen=True)
class Adapter:
    """How one family is served.

    Attributes:
        family: what users call it ("Llama 4").
        module: name of the module class whose forward is replaced.
        inspect: reads a module without changing it; raises `UnsupportedError`.
        settle: rearranges storage where the family needs it, and remembers the plan in the module.
        forward: takes the module, then what the family's own forward takes, and a keyword `strategy`.
        layout: what is unusual about its experts, in words.
        left: module classes of the family that route but are no expert MLPs, and stay with Transformers.
    """

    family: str
    module: str
    inspect: Callable[[nn.Module], Plan]
    settle: Callable[[nn.Module, Plan], Plan]
    forward: Callable[..., Any]
    layout: str = ""
    left: tuple[str, ...] = ()


def present(module: nn.Module, tensors: Iterable[Tensor]) -> None:
    """Check the weights an adapter reads past their own module: dense, and not offloaded."""
    tensors = list(tensors)
    check_dense(module, tensors)
    if any(t.is_meta for t in tensors):
        raise refuse(module, "weights on the meta device (offloaded, or not loaded yet)", "weights in memory")


def remember(module: nn.Module, plan: Plan) -> Plan:
    """Keep the plan in the module and leave its storage as it is."""
    module.__dict__[PLAN] = plan
    return plan


def recall(module: nn.Module, inspect: Callable[[nn.Module], Plan]) -> Plan:
    """The remembered plan, or a new one for a module that was copied or loaded since."""
    plan: Plan | None = module.__dict__.get(PLAN)
    return remember(module, inspect(module)) if plan is None else plan


def differentiates(tensors: Iterable[Tensor]) -> bool:
    """Whether autograd will look for these very parameters: then joint storage is no substitute for them."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


class Joint:
    """Tensors of several parameters in one piece of memory, which the parameters are views of.

    A copied or unpickled module finds None in its place: its parameters are separate again.
    """

    def __init__(self, whole: Tensor, parts: list[Tensor]) -> None:
        self.whole = whole
        self.places = [(p.data_ptr(), p.stride()) for p in parts]

    def holds(self, parameters: list[Tensor]) -> bool:
        """Whether the parameters still are the views that were made of them."""
        whole = self.whole
        return all(
            p.data_ptr() == place and p.stride() == stride and p.dtype == whole.dtype and p.device == whole.device
            for p, (place, stride) in zip(parameters, self.places, strict=True)
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def join(module: nn.Module, name: str, parameters: list[Tensor], dim: int) -> Tensor:
    """`parameters`, all of one shape, stacked along a new dimension `dim`.

    Where autograd needs the parameters themselves the result is a differentiable copy. Otherwise they are moved into
    one storage, once, and become views of it: nothing is kept twice. What moved since (``.to()``, a copy) moves again.
    """
    if differentiates(parameters) or torch.compiler.is_compiling():
        return torch.stack(parameters, dim)
    key = f"{PLAN}_{name}"
    joint: Joint | None = module.__dict__.get(key)
    if joint is not None and joint.holds(parameters):
        return joint.whole
    first = parameters[0]
    with torch.inference_mode(False), torch.no_grad():
        shape = [*first.shape[:dim], len(parameters), *first.shape[dim:]]
        whole = torch.empty(shape, dtype=first.dtype, device=first.device)
        parts = list(whole.unbind(dim))
        for parameter, part in zip(parameters, parts, strict=True):
            part.copy_(parameter)
            parameter.data = part
    module.__dict__[key] = Joint(whole, parts)
    return whole
