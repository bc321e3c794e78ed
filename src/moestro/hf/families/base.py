"""What an adapter is: one family outside Transformers' experts interface, served through the same primitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moestro.hf.experts import PLAN, Plan, refuse
from moestro.hf.layout import SETTLING, why_not_in_place
from moestro.hf.projections import Find


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


def present(module: nn.Module) -> None:
    """Check that what an adapter reads past its own module is in memory, and not offloaded."""
    if any(t.is_meta for t in module.parameters()):
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


def plain(module: nn.Module, name: str, wanted: type[nn.Module] | str) -> Any:
    """The sub-module `name`, whose parameters an adapter reads past its forward.

    Args:
        module: what the adapter serves.
        name: of the sub-module.
        wanted: the class it must be, or the name of a class of Transformers.

    Raises:
        UnsupportedError: it is wrapped or replaced (LoRA): what its forward adds would be lost.
    """
    layer = module.get_submodule(name)
    own = type(layer)
    known = own is wanted or (own.__name__ == wanted and own.__module__.startswith("transformers."))
    if not known:
        raise refuse(
            module,
            f"{name} as {own.__module__}.{own.__name__}",
            f"a plain {wanted if isinstance(wanted, str) else wanted.__name__}, whose weights it reads directly",
            "Adapt other layers, merge the adapter before the call, or run the model without moestro.",
        )
    return layer


def join(parameters: list[Tensor], dim: int) -> Tensor:
    """`parameters`, all of one shape, stacked along a new dimension `dim`.

    Where autograd needs the parameters themselves, or somebody else looks at their bytes, the result is a copy.
    Otherwise they are moved into one storage, once, and become views of it: nothing is kept twice. What moved since
    (``.to()``, a copy) moves again.
    """
    if differentiates(parameters) or torch.compiler.is_compiling():
        return torch.stack(parameters, dim)
    with SETTLING, torch.no_grad():
        whole = _joined(parameters, dim)
        if whole is not None:
            return whole
        apart = len({p.data_ptr() for p in parameters}) == len(parameters)
        if not apart or any(why_not_in_place(p) is not None for p in parameters):
            return torch.stack(parameters, dim)
        with torch.inference_mode(False):
            whole = torch.stack([p.detach() for p in parameters], dim)
            for parameter, part in zip(parameters, whole.unbind(dim), strict=True):
                parameter.data = part
        return whole


def _joined(parameters: list[Tensor], dim: int) -> Tensor | None:
    """The tensor that the parameters are the slices of along `dim`, if they lie in memory that way."""
    first = parameters[0]
    shape = [*first.shape[:dim], len(parameters), *first.shape[dim:]]
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    step = strides.pop(dim)
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    lie = all(
        p.stride() == tuple(strides)
        and p.storage_offset() == offset + i * step
        and p.untyped_storage().data_ptr() == storage
        and p.dtype == first.dtype
        and p.device == first.device
        for i, p in enumerate(parameters)
    )
    return first.detach().as_strided(shape, [*strides[:dim], step, *strides[dim:]], offset) if lie else None
