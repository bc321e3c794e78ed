"""Ask what would run, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from moestro import settings
from moestro.errors import UnsupportedError, invalid_input
from moestro.experts import Experts
from moestro.formats import SplitTensor
from moestro.moe import MoE
from moestro.ops import _select, gpu
from moestro.ops.expert_mlp import cpu, expert_mlp, explain_strategy
from moestro.ops.grouping import group_by_expert
from moestro.ops.projection import projection
from moestro.ops.topk import topk
from moestro.weights import ExpertWeights

_NAMES: dict[Callable[..., Any], str] = {
    expert_mlp: "expert_mlp",
    topk: "topk",
    group_by_expert: "grouping",
    projection: "projection",
}

_COUNTS = {"expert_mlp": (3, 4), "topk": (2, 2), "grouping": (2, 2), "projection": (2, 3)}
"""Fewest and most arguments that each operation takes."""


@dataclass(frozen=True)
class Explanation:
    """What a call would choose.

    Attributes:
        operation: its name.
        candidates: every implementation in order of priority; reason is None for those that can run the arguments.
        chosen: the implementation that would run, or None if nothing can.
        strategy: how it would walk the work (expert_mlp only), and why.
        strategy_reason: the sentence.
        weights: how the experts are stored, the bytes one of them reads, and how they are used (expert_mlp only).
        forced: the implementation forced by `moestro.use` or the environment, or None.
    """

    operation: str
    candidates: tuple[_select.Candidate, ...]
    chosen: str | None
    strategy: str | None = None
    strategy_reason: str | None = None
    weights: str | None = None
    forced: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        width = max(len(c.name) for c in self.candidates)
        lines = [f"{self.operation}: {self.chosen or 'nothing can run this'}"]
        if self.forced:
            lines[0] += f" (forced: {self.forced})"
        for c in self.candidates:
            mark = ">" if c.name == self.chosen else " "
            lines.append(f"  {mark} {c.name:<{width}}  {c.reason or 'can run this'}")
        if self.strategy:
            lines.append(f"  strategy {self.strategy}: {self.strategy_reason}")
        if self.weights:
            lines.append(f"  weights {self.weights}")
        return "\n".join(lines)


def explain(operation: Callable[..., Any] | nn.Module, *arguments: Any) -> Explanation:
    """What would run for these arguments: every implementation with its reason, and the strategy with its own.

    Args:
        operation: `moestro.expert_mlp`, `moestro.topk`, `moestro.group_by_expert`,
            `moestro.ops.projection.projection`, or an `Experts` or `MoE` module, or a linear module that
            `moestro.accelerate(model, projections=True)` serves.
        arguments: what the call would be given; a module's forward arguments for a module (its router is run).

    Raises:
        InvalidInputError: not something that chooses between implementations.
    """
    if isinstance(operation, MoE):
        (x,) = _arguments("MoE", arguments, 1, 1)
        x = x.reshape(-1, x.shape[-1])
        with torch.no_grad():
            routing = operation.route(x)
        return explain(operation.experts, x, routing)
    if isinstance(operation, Experts):
        x, routing = _arguments("Experts", arguments, 2, 2)
        return explain(expert_mlp, x, routing, operation.weights, operation.strategy)
    if hasattr(operation, "explained"):
        return explain(*operation.explained(*_arguments(type(operation).__name__, arguments, 1, 1)))
    name = _NAMES.get(operation)
    if name == "projection" and len(arguments) == 2:
        arguments = (*arguments, None)
    if name is None:
        raise invalid_input(
            "explain",
            got=f"{operation!r}",
            needs="moestro.expert_mlp, moestro.topk, moestro.group_by_expert, or an Experts or MoE module",
            fix="Pass the function itself and its arguments after it.",
        )
    forced = settings.current().implementation
    strategy, positional = "auto", arguments
    _arguments(name, arguments, *_COUNTS[name])
    if name == "expert_mlp" and len(arguments) == 4:
        strategy, positional = arguments[3], arguments[:3]
    try:
        chosen = _select.select(name, *positional).name
    except UnsupportedError:
        chosen = None
    walks = name == "expert_mlp" and chosen != "reference"  # the reference has one way to go
    choice = explain_strategy(chosen or "", positional[0], positional[1], positional[2], strategy) if walks else None
    return Explanation(
        operation=name,
        candidates=tuple(_select.candidates(name, *positional)),
        chosen=chosen,
        strategy=choice.strategy if choice else None,
        strategy_reason=choice.reason if choice else None,
        weights=_describe(positional[0], positional[2], chosen) if name == "expert_mlp" else None,
        forced=forced if forced in (None, *(i.name for i in _select.implementations(name))) else None,
    )


def _describe(x: torch.Tensor, weights: ExpertWeights, chosen: str | None) -> str:
    """The sentence about how experts are stored and read."""
    stored = (weights.gate_up, weights.down)
    names = dict.fromkeys(f"{s.format.name}{' (matrices apart)' if isinstance(s, SplitTensor) else ''}" for s in stored)
    text = f"{' and '.join(names)}: {weights.bytes_per_expert:,} bytes an expert"
    if weights.input_format != "float":
        numbers = "integers" if weights.input_format == "int8" else "8-bit floats"
        return f"{text}, multiplied as {numbers}: rows are rounded to {weights.input_format}"
    if all(s.format.is_dense for s in stored):
        return text
    if chosen == gpu.IMPLEMENTATION:
        return f"{text}, decoded in registers"
    if chosen is not None and chosen.startswith("cpu-"):
        pairs = "; rows, but those in tiles, as pairs of 8-bit integers" if cpu.takes_pairs(chosen, x, weights) else ""
        return f"{text}, decoded in registers, or for many rows four rows at a time{pairs}"
    reading = "a whole expert" if chosen == "reference" else "a panel of rows"
    return f"{text}, dequantised {reading} at a time"


def _arguments(name: str, arguments: tuple[Any, ...], least: int, most: int) -> tuple[Any, ...]:
    if not least <= len(arguments) <= most:
        raise invalid_input(
            "explain",
            got=f"{len(arguments)} arguments for {name}",
            needs=f"{least} to {most}, as the call itself takes"
            if most > least
            else f"{least}, as the call itself takes",
            fix="Pass the function or module and then its arguments: moestro.explain(moestro.topk, scores, 2).",
        )
    return arguments
