"""Which module of a model is which stage: as few modules as tell the stages apart."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from moestro.errors import unsupported
from moestro.experts import Experts
from moestro.moe import MoE

_MIXES = re.compile(r"(Attention|Attn|Mixer|DeltaNet|Mamba|ShortConv)")
"""In names of classes that mix tokens: attention, or what a model has in its place."""

_ROUTER = re.compile(r"^(gate|gating|router|switch)$")
_ROUTER_CLASS = re.compile(r"(Router|Gate)$")


@dataclass(frozen=True)
class Part:
    """A module that is one stage; `layer` is the expert layer that a router or experts belong to."""

    module: nn.Module
    name: str
    stage: str
    layer: int | None = None


@dataclass(frozen=True)
class ExpertLayer:
    """A module in which the primitive is called, by its name in the model, and its router if there is one to see.

    `num_experts` is 0 where only a call tells it.
    """

    name: str
    module: nn.Module
    num_experts: int
    router: tuple[str, nn.Module] | None


def parts_of(model: nn.Module) -> tuple[list[Part], list[ExpertLayer]]:
    """The parts of a model, and its expert layers in the order of the model.

    Raises:
        UnsupportedError: a model without expert layers that moestro runs.
    """
    layers = _layers(model)
    if not layers:
        raise unsupported(
            "profile",
            got=f"{type(model).__name__}, of which moestro runs no expert layer",
            needs="a model with layers of moestro, or one of Transformers that moestro serves",
            fix="Call moestro.accelerate(model) first.",
        )
    parts = [Part(layer.module, layer.name, "experts", index) for index, layer in enumerate(layers)]
    for index, layer in enumerate(layers):
        if layer.router is not None and layer.router[1] not in {part.module for part in parts}:
            parts.append(Part(layer.router[1], layer.router[0], "router", index))
    return [*parts, *other_parts(model, {part.module for part in parts})], layers


def _layers(model: nn.Module) -> list[ExpertLayer]:
    found = _served(model)
    inside = {module for layer in found.values() for module in layer.module.modules()}
    routers = {
        module.experts: (f"{name}.router".lstrip("."), module.router)
        for name, module in model.named_modules()
        if isinstance(module, MoE)
    }
    for name, module in model.named_modules():
        if isinstance(module, Experts) and module not in inside:
            found[name] = ExpertLayer(name, module, module.num_experts, routers.get(module))
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return sorted(found.values(), key=lambda layer: order[layer.name])


def _served(model: nn.Module) -> dict[str, ExpertLayer]:
    """Those of Transformers. Nothing is served before `moestro.hf` was imported."""
    if "moestro.hf.serving" not in sys.modules:
        return {}
    from moestro.hf.routers import router_module, scores_of
    from moestro.hf.serving import num_experts_of, served

    found: dict[str, ExpertLayer] = {}
    names = {module: name for name, module in model.named_modules()}
    for path in (layer.path for layer in served(model)):
        module = model.get_submodule(path)
        count = num_experts_of(module)
        beside = None if count is None else router_module(model, path, partial(scores_of, num_experts=count))
        router = None if beside is None else _whole(model, names[beside[1]])
        found[path] = ExpertLayer(path, module, count or 0, router or _named_router(model, path))
    return found


def _whole(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    """The router that a module with its scores is, or is in."""
    above = name.rpartition(".")[0]
    if above and _ROUTER_CLASS.search(type(model.get_submodule(above)).__name__):
        name = above
    return name, model.get_submodule(name)


def _named_router(model: nn.Module, path: str) -> tuple[str, nn.Module] | None:
    """The module beside or inside an expert layer that is called a router."""
    for root in (path, path.rpartition(".")[0]):
        for name, child in model.get_submodule(root).named_children():
            if _ROUTER.match(name):
                return f"{root}.{name}".lstrip("."), child
    return None


def other_parts(model: nn.Module, taken: set[nn.Module]) -> Iterator[Part]:
    """Attention and dense modules, the outermost that hold no part of another stage."""
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        inside = set(module.modules())
        stage = None if module is model or module in taken else _stage(module)
        if stage is not None and not inside & taken and not _holds_mixers(module, stage):
            yield Part(module, name, stage)
        else:
            waiting += [(f"{name}.{child}".lstrip("."), m) for child, m in module.named_children()]


def _stage(module: nn.Module) -> str | None:
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Embedding):
        return None  # which nobody calls, or which looks up
    if _MIXES.search(type(module).__name__):
        return "attention"
    dense = any(
        isinstance(m, nn.Linear) or any(p.dim() > 1 for p in m.parameters(recurse=False))
        for m in module.modules()
        if not isinstance(m, nn.Embedding)
    )
    return "dense" if dense else None


def _holds_mixers(module: nn.Module, stage: str) -> bool:
    """Whether a module that looks dense has attention inside: a layer, or a whole decoder."""
    return stage == "dense" and any(_MIXES.search(type(m).__name__) for m in module.modules())
