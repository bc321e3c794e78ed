"""Ask what would run, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from moestro import settings
from moestro.errors import invalid_input
from moestro.experts import Experts
from moestro.formats import SplitTensor
from moestro.moe import MoE
from moestro.ops.attention import ATTENTION, attention
from moestro.ops.dispatch import Candidate, KernelUse, Operation, Prepared, allowed, candidates
from moestro.ops.expert_mlp import EXPERT_MLP, cpu, expert_mlp
from moestro.ops.grouping import GROUPING, group_by_expert
from moestro.ops.inputs import check_call, check_tensor, no_tensor
from moestro.ops.projection import PROJECTION, projection
from moestro.ops.topk import TOPK, topk
from moestro.routing.scoring import Scoring
from moestro.routing.selection import ROUTE, as_routed, route
from moestro.weights import ExpertWeights

_OPERATIONS: dict[Callable[..., Any], Operation] = {
    attention: ATTENTION,
    expert_mlp: EXPERT_MLP,
    topk: TOPK,
    group_by_expert: GROUPING,
    projection: PROJECTION,
    route: ROUTE,
}
"""By public function."""


@dataclass(frozen=True)
class Explanation:
    """What a call would choose.

    Attributes:
        operation: its name.
        candidates: every implementation in order of priority; reason is None for those that can run the arguments.
        chosen: the implementation that would run, or None if nothing can.
        strategy: how it would walk the work (expert_mlp only), and why; None where there is one way.
        strategy_reason: the sentence.
        kernels: the kernels that would run for these very arguments, where the implementation has kernels of its own.
        threads: threads of the host that would compute; 0 where PyTorch's own operations do.
        workspace_bytes: memory beside arguments and result; None where PyTorch's own operations allocate it.
        weights: how the experts are stored, the bytes one of them reads, and how they are used (expert_mlp only).
        forced: the implementation forced by `moestro.use` or the environment, or None.
        dispatch: how rows would reach their experts and why, of a layer whose dispatcher chooses; else None.
        predictions: seconds by implementation, where what was measured on this machine decides (expert_mlp on a CPU).
        too_busy: whether there are none because threads waited for cores while this process measured.
    """

    operation: str
    candidates: tuple[Candidate, ...]
    chosen: str | None
    strategy: str | None = None
    strategy_reason: str | None = None
    kernels: tuple[KernelUse, ...] = ()
    threads: int = 0
    workspace_bytes: int | None = None
    weights: str | None = None
    forced: str | None = None
    dispatch: str | None = None
    predictions: dict[str, float] = field(default_factory=dict)
    too_busy: bool = False

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
        if self.predictions:
            times = ", ".join(f"{name} {_milliseconds(seconds)}" for name, seconds in self.predictions.items())
            lines.append(f"  predicted {times}, by what was measured on this machine")
        if self.too_busy:
            lines.append(
                "  not predicted: threads waited for cores while this was measured; the next process measures again"
            )
        if self.dispatch:
            lines.append(f"  dispatch {self.dispatch}")
        if self.strategy:
            lines.append(f"  strategy {self.strategy}: {self.strategy_reason}")
        for use in self.kernels:
            lines.append(f"  kernel {use.stage}: {use.kernel} ({use.rows} rows, entered {use.units} times)")
        if self.threads:
            room = "" if self.workspace_bytes is None else f", {self.workspace_bytes:,} bytes of workspace"
            lines.append(f"  threads {self.threads}{room}")
        if self.weights:
            lines.append(f"  weights {self.weights}")
        return "\n".join(lines)


def explain(operation: Callable[..., Any] | nn.Module, *arguments: Any) -> Explanation:
    """What would run for these arguments: every implementation with its reason, and the strategy with its own.

    Args:
        operation: `moestro.expert_mlp`, `moestro.topk`, `moestro.group_by_expert`,
            `moestro.ops.projection.projection`,
            `moestro.ops.attention.attention`, or an `Experts` or `MoE` module, or a linear module that
            `moestro.accelerate(model, projections="auto")` serves.
        arguments: what the call would be given; a module's forward arguments for a module (its router is run).

    Raises:
        InvalidInputError: not something that chooses between implementations.
    """
    if isinstance(operation, MoE):
        (x,) = _arguments(operation.forward, arguments, "MoE")
        check_tensor("MoE", "x", x)
        x = x.reshape(-1, x.shape[-1])
        with torch.no_grad():
            routing = operation.route(x)
            dispatcher, said = operation.dispatcher, None
            if dispatcher is not None:
                x, routing, handle = dispatcher.dispatch(x, routing)
                said = dispatcher.describe(handle) if hasattr(dispatcher, "describe") else None
        return replace(explain(operation.experts, x, routing), dispatch=said)
    if isinstance(operation, Experts):
        x, routing = _arguments(operation.forward, arguments, "Experts")
        return explain(expert_mlp, x, routing, operation.weights, operation.strategy)
    if hasattr(operation, "explained"):
        return explain(*operation.explained(*_arguments(operation.explained, arguments, type(operation).__name__)))
    if operation not in _OPERATIONS:
        raise invalid_input(
            "explain",
            got=f"{type(operation).__name__} {getattr(operation, '__name__', '')}".strip(),
            needs="moestro.expert_mlp, topk, group_by_expert, routing.route, ops.projection.projection, "
            "ops.attention.attention, an Experts or MoE module",
            fix="Pass the function itself and its arguments after it; of a model, one of its expert layers "
            "(moestro.hf.served(model) lists those of Transformers).",
        )
    chooser = _OPERATIONS[operation]
    whole = _arguments(operation, arguments, chooser.name)
    if operation is expert_mlp:
        check_call(chooser.name, *whole[:3])
    elif not isinstance(whole[0], Tensor):
        raise no_tensor(chooser.name, next(iter(inspect.signature(operation).parameters)), whole[0])
    if operation is route:
        logits, top_k, scoring, *rest = whole
        whole = (as_routed(logits), top_k, Scoring.of(scoring), *rest)
    return _explain(chooser, whole)


def _explain(operation: Operation, asked: tuple[Any, ...]) -> Explanation:
    planned_for = getattr(asked[2], "planned_for", None) if operation is EXPERT_MLP else None
    arguments = asked if planned_for is None else (*asked[:2], planned_for(asked[0]), *asked[3:])
    found = candidates(operation, *arguments)
    chosen = next((p for i in allowed(operation) if isinstance(p := found[i.name], Prepared)), None)
    forced = settings.current().implementation
    name = None if chosen is None else chosen.implementation
    return Explanation(
        operation=operation.name,
        candidates=tuple(Candidate(n, p if isinstance(p, str) else None) for n, p in found.items()),
        chosen=name,
        strategy=None if chosen is None else chosen.walk or None,
        strategy_reason=None if chosen is None else chosen.why or None,
        kernels=() if chosen is None else chosen.kernels(*arguments),
        threads=0 if chosen is None else chosen.threads,
        workspace_bytes=None if chosen is None else chosen.workspace_bytes,
        weights=_describe(asked[2], name) if operation is EXPERT_MLP else None,
        forced=forced if forced in found else None,
        predictions=cpu.predictions(*arguments[:3]) if operation is EXPERT_MLP else {},
        too_busy=operation is EXPERT_MLP and cpu.too_busy(*arguments[:3]),
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _describe(weights: ExpertWeights, chosen: str | None) -> str:
    """The sentence about how experts are stored and read."""
    stored = (weights.gate_up, weights.down)
    names = dict.fromkeys(f"{s.format.name}{' (unstacked)' if isinstance(s, SplitTensor) else ''}" for s in stored)
    text = f"{' and '.join(names)}: {weights.bytes_per_expert:,} bytes an expert"
    if (note := getattr(weights, "note", "")) and isinstance(note, str):
        text = f"{text}, {note}"
    if weights.input_format != "float":
        return f"{text}, input format {weights.input_format}"
    if all(s.format.is_dense for s in stored) or chosen is None:
        return text
    if chosen in ("torch", "reference"):
        return f"{text}, dequantised {'a whole expert' if chosen == 'reference' else 'a panel of rows'} at a time"
    return f"{text}, decoded in registers, or for many rows a few rows at a time"


def _arguments(call: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """The arguments of a call, with those that it may leave out."""
    signature = inspect.signature(call)
    try:
        bound = signature.bind(*arguments)
    except TypeError:
        raise invalid_input(
            "explain",
            got=f"{len(arguments)} arguments for {name}",
            needs=f"{', '.join(signature.parameters)}, as the call itself takes them",
            fix="Pass the function or module and then its arguments: moestro.explain(moestro.topk, scores, 2).",
        ) from None
    bound.apply_defaults()
    return bound.args
