"""The projections beside the experts (attention, the head) through the engine: `nn.Linear` served in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers.utils.logging import tqdm

from moestro.errors import invalid_input, unsupported
from moestro.formats import FORMATS, PackedTensor, check_shape, dequantize, find_format, quantize
from moestro.ops.projection import of_rows, projection

PROJECTIONS = ("torch", "auto")
"""What projections may be, besides a format's name: PyTorch's own linear modules, or whoever is faster."""

_SERVED = (torch.bfloat16, torch.float16)
_FLOATS = (*_SERVED, torch.float32)
_ROUTED = re.compile(r"(^|[._])(gate|gating|switch|router\w*)(\.|$)|(^|\.)experts?\.")
"""In names of routers' linear modules, and of experts' own."""

_OF_EXPERTS = re.compile(r"(^|\.)experts?\.")
"""In names of experts' own linear modules, which their adapter reads."""

_READ = re.compile(r"(^|\.)(weights_proj|dt_proj)$")
"""In names of small linear modules whose weight their models read themselves: sparse attention's choice of tokens, and
the time steps of state spaces."""


class Projection(nn.Linear):
    """An `nn.Linear` whose forward is `moestro.ops.projection` where no gradient is asked for.

    Parameters, hooks and state dict are those of the module it was made from. Under autocast and in graphs of
    torch.compile and torch.export it is PyTorch's own linear.
    """

    stored = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.weight.dtype

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if _is_watched(input) or not _fit(input, weight.shape, weight.dtype, bias):
            return super().forward(input)
        return of_rows(input, weight, bias)

    def explained(self, input: Tensor) -> tuple[Callable[..., Tensor], Tensor, Tensor, Tensor | None]:
        """The call behind this one and its arguments, for `moestro.explain`."""
        return projection, input.reshape(-1, input.shape[-1]), self.weight, self.bias


class StoredProjection(nn.Linear):
    """An `nn.Linear` whose weight is stored in a format, and is no parameter.

    Attributes:
        stored: the weight [N, K] as stored.
        dtype: what the weight was, and what it is decoded to where PyTorch multiplies.
    """

    stored: PackedTensor
    dtype: torch.dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight [N, K], decoded anew for whoever asks."""
        return dequantize(self.stored, self.dtype)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of any module; one that is given a weight, as tied heads are, is no longer stored."""
        if name == "weight":
            del self.stored, self.dtype
            self.__class__ = Projection  # type: ignore[assignment]
            self._parameters["weight"] = None
        nn.Module.register_parameter(self, name, param)

    def forward(self, input: Tensor) -> Tensor:
        if _is_watched(input) or not _fit(input, self.stored.shape, self.dtype, self.bias):
            return F.linear(input, self.weight, self.bias)
        return of_rows(input, self.stored, self.bias)

    def explained(self, input: Tensor) -> tuple[Callable[..., Tensor], Tensor, PackedTensor, Tensor | None]:
        """The call behind this one and its arguments, for `moestro.explain`."""
        return projection, input.reshape(-1, input.shape[-1]), self.stored, self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.stored.format.name}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredProjection:
        device = fn(torch.empty(0, dtype=torch.uint8, device=self.stored.device)).device
        parts = {name: getattr(self.stored, name).to(device) for name in self.stored.format.names}
        self.stored = PackedTensor(format=self.stored.format, **parts)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        super()._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        raise unsupported(
            "save",
            got=f"{prefix.removesuffix('.')}, which projections={self.stored.format.name!r} rounded to that format",
            needs="linear modules as their checkpoint has them",
            fix="Load the model without projections=, and save that.",
        )


def _is_watched(input: Tensor) -> bool:
    return torch.compiler.is_compiling() or torch.is_autocast_enabled(input.device.type)


def _fit(input: Tensor, shape: Sequence[int], dtype: torch.dtype, bias: Tensor | None) -> bool:
    """Whether they can be multiplied and added as they are; what cannot is PyTorch's to refuse."""
    if input.dtype != dtype or input.shape[-1] != shape[1]:
        return False
    return bias is None or (bias.dtype == dtype and bias.shape == shape[:1])


def check_choice(projections: Any, operation: str) -> None:
    """Refuse what is neither of `PROJECTIONS` nor the name of a packed format."""
    packed = [name for name, form in FORMATS.items() if not form.is_dense]
    if projections not in (*PROJECTIONS, *packed):
        raise invalid_input(
            operation,
            got=f"projections={projections!r}",
            needs=f"one of {', '.join((*PROJECTIONS, *packed))}",
            fix='"auto" lets the engine read them where it is faster; "int8" stores them in 8 bits.',
        )


def check_projections(model: nn.Module, projections: str, operation: str) -> None:
    """Refuse a model whose linear modules cannot be stored in a format that is asked for."""
    if projections in PROJECTIONS:
        return
    check_whole(model, projections, operation)
    form, modules = find_format(projections), dict(storable(model))
    stored = {module.stored.format.name for module in model.modules() if isinstance(module, StoredProjection)}
    if stored - {form.name}:
        raise unsupported(
            operation,
            got=f"projections={projections!r} for linear modules that are stored as {', '.join(sorted(stored))}",
            needs="linear modules as their checkpoint has them",
            fix="Load the model again.",
        )
    if not modules and not stored:
        raise unsupported(
            operation,
            got=f"projections={projections!r} for {type(model).__name__}, which has no nn.Linear beside its routers",
            needs="nn.Linear modules in float32, bfloat16 or float16",
            fix="Leave projections out.",
        )
    for name, module in modules.items():
        check_shape(form, module.weight.shape[0], module.weight.shape[1], f"{operation} {name}")
        if not module.weight.is_meta and not bool(module.weight.isfinite().all()):
            raise invalid_input(
                operation,
                got=f"{name}, in whose weight are NaN or infinities",
                needs=f"finite weights for {form.name}",
                fix="Mend the checkpoint, or leave projections out.",
            )


def check_whole(model: nn.Module, projections: str, operation: str) -> None:
    """Refuse a model whose linear modules are cut over processes where they are to be stored in a format."""
    if projections in PROJECTIONS:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and isinstance(module._parameters.get("weight"), DTensor):
            raise unsupported(
                operation,
                got=f"projections={projections!r} for {name}, which Transformers has cut over processes",
                needs="whole linear modules",
                fix='Take projections="auto"; or load the model by moestro.load on a mesh, which cuts experts only.',
            )


def serve_projections(model: nn.Module, projections: str) -> None:
    """Have the engine multiply the linear modules of `model`, in place.

    "auto" takes every plain `nn.Linear` of 16 bits. A format also stores its weight so, module by module; routers,
    and the embedding that shares the head's weight, keep theirs. Modules of other classes stay as they are.
    """
    if projections == "auto":
        for name, module in model.named_modules():
            if type(module) is nn.Linear and module.weight.dtype in _SERVED and not _OF_EXPERTS.search(name):
                module.__class__ = Projection
    elif projections not in PROJECTIONS:
        modules = list(storable(model))
        for name, module in tqdm(modules, desc="Quantizing projections", delay=1):
            _store(module, projections, name)


def served_projections(model: nn.Module) -> dict[str, Projection | StoredProjection]:
    """The linear modules of `model` that run in the engine, by their names; none unless projections were asked for."""
    kinds = Projection, StoredProjection
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def storable(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear modules that a format may store, by their names."""
    precise = _precise(model)
    for name, module in model.named_modules():
        plain = type(module) in (nn.Linear, Projection) and type(module.weight) is nn.Parameter
        kept = _ROUTED.search(name) or _READ.search(name) or any(each.search(f"{name}.weight") for each in precise)
        if plain and module.weight.dtype in _FLOATS and not kept:
            yield name, module


def _precise(model: nn.Module) -> list[re.Pattern[str]]:
    """Patterns of the names of what the model's family wants in float32 where all else has 16 bits."""
    listed = "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"
    found = {each for m in model.modules() for name in listed for each in getattr(m, name, None) or ()}
    return [re.compile(each.replace("*", ".*")) for each in sorted(found)]


def _store(module: Any, form: str, name: str) -> None:
    weight = module.weight
    stored = quantize(weight, form, name=name)
    del module._parameters["weight"]
    module.__class__ = StoredProjection
    module.stored, module.dtype = stored, weight.dtype
