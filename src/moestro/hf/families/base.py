"""What an adapter is: one family outside Transformers' experts interface, served through the same primitive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moestro.formats import SplitTensor, StoredExperts, dense
from moestro.hf import experts
from moestro.hf.experts import PLAN, Plan, refuse
from moestro.hf.store import Find


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
        projections: where its experts' weights are, for families whose experts can be stored in a checkpoint's own way.
        left: module classes of the family that route but are no expert MLPs, and stay with Transformers.
    """

    family: str
    module: str
    inspect: Callable[[nn.Module], Plan]
    settle: Callable[[nn.Module, Plan], Plan]
    forward: Callable[..., Any]
    layout: str = ""
    projections: Find | None = None
    left: tuple[str, ...] = ()


INTERFACE = Adapter(
    "experts interface", "*", experts.inspect, experts.settle, experts.serve, projections=experts.projections
)
"""Every experts module that Transformers' own decorator prepared."""


def remember(module: nn.Module, plan: Plan) -> Plan:
    """Keep the plan in the module and leave its storage as it is."""
    module.__dict__[PLAN] = plan
    return plan


def recall(module: nn.Module, inspect: Callable[[nn.Module], Plan]) -> Plan:
    """The remembered plan, or a new one for a module that was copied or loaded since."""
    plan: Plan | None = module.__dict__.get(PLAN)
    return remember(module, inspect(module)) if plan is None else plan


def is_recorded(tensors: Iterable[Tensor]) -> bool:
    """Whether autograd, or a graph that is being made, will look for these very parameters."""
    return torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def plain(module: nn.Module, name: str, wanted: type[nn.Module] | str) -> Any:
    """The sub-module `name`, of a class or of Transformers' class of this name, whose parameters an adapter reads.

    One that is wrapped or replaced (LoRA) is refused: what its forward adds would be lost.
    """
    layer = module.get_submodule(name)
    own = type(layer)
    if own is not wanted and (own.__name__ != wanted or not own.__module__.startswith("transformers.")):
        raise refuse(
            module,
            f"{name} as {own.__module__}.{own.__name__}",
            f"a plain {wanted if isinstance(wanted, str) else wanted.__name__}, whose weights it reads directly",
            "Adapt other layers, merge the adapter before the call, or run the model without moestro.",
        )
    return layer


def stacked(parameters: list[Tensor]) -> StoredExperts:
    """One matrix an expert as experts [E, N, K]: as they are, or a copy where they are recorded."""
    if is_recorded(parameters):
        return dense(torch.stack(parameters))
    return SplitTensor(tuple((dense(p),) for p in parameters))
