"""A profile while it is taken: hooks on the parts of a model, and observers of the operations inside them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moestro.errors import invalid_input, unsupported
from moestro.moe import Dispatcher
from moestro.ops.dispatch import Prepared, observed
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.ops.grouping import GROUPING
from moestro.parallel.rebalance import CutLayer, find_cut_layers, without
from moestro.profiling.loads import LayerCounts
from moestro.profiling.marks import Clock, EventClock, HostClock, Marks
from moestro.profiling.parts import Part, parts_of
from moestro.routing.selection import ROUTE
from moestro.types import Routing

PROMPT, DECODE, FORWARD, TRAINING = "prompt", "decode", "forward", "training"


class Profiler:
    """Takes a profile of a model in the thread that made it.

    Args:
        model: with expert layers that moestro runs.
        clock: None for the one of the model's device.

    Attributes:
        marks: of stages. layers: counts of the expert layers. ran: implementations of `expert_mlp` that were seen.

    Raises:
        InvalidInputError: no module. UnsupportedError: a compiled model, or one without expert layers of moestro.
    """

    def __init__(self, model: nn.Module, clock: Clock | None = None) -> None:
        _check(model)
        self.parts, found = parts_of(model)
        self.model = model
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.layers = [LayerCounts(layer.name, layer.num_experts) for layer in found]
        self.names = {layer.name: index for index, layer in enumerate(found)}
        self.marks = Marks(clock or (EventClock() if self.device.type == "cuda" else HostClock()))
        self.ran: dict[str, None] = {}
        self.driven = False
        self._phase: str | None = None
        self._thread = threading.get_ident()
        self._layer: list[int] = []
        self._routing: list[int] = []
        self._cut: set[int] = set()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, all that runs in this thread is in the profile; afterwards nothing of it is left in the model."""
        grouping = self.marks.place("grouping", "group_by_expert")
        with ExitStack() as stack:
            self._hook_model(stack)
            for part in self.parts:
                self._hook(stack, part)
            self._wrap_dispatchers(stack)
            stack.enter_context(observed(EXPERT_MLP, self._tell_experts))
            stack.enter_context(observed(ROUTE, self._tell_logits))
            stack.enter_context(
                observed(GROUPING, lambda *_: self.marks.leave(grouping), lambda: self.marks.enter(grouping))
            )
            self.marks.start()
            try:
                yield
            finally:
                self.marks.end_pass(None if self.driven else self._phase or FORWARD)

    def begin(self, phase: str, at: float | None = None) -> None:
        """A pass of a phase begins, at this time.perf_counter(), whatever the model is called with."""
        self._end(self._phase if self.driven else None, at)
        self.driven, self._phase = True, phase

    def drop(self) -> None:
        """What has been since the last pass began is no pass."""
        self._end(None)
        self.driven, self._phase = True, None

    def _end(self, phase: str | None, at: float | None = None) -> None:
        self.marks.end_pass(phase, at if isinstance(self.marks.clock, HostClock) else None)

    def _hook_model(self, stack: ExitStack) -> None:
        code = self.marks.place("other", type(self.model).__name__)
        depth = 0

        def enter(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            nonlocal depth
            if threading.get_ident() != self._thread:
                return
            depth += 1
            if depth == 1 and not self.driven:
                if self._phase is not None:
                    self.marks.end_pass(self._phase)
                self._phase = _phase(module, arguments, named)
            self.marks.enter(code)

        def leave(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
            nonlocal depth
            if threading.get_ident() == self._thread:
                depth -= 1
                self.marks.leave(code)

        if any(part.module is self.model for part in self.parts):
            return  # a lone module of experts
        _until(stack, self.model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        _until(stack, self.model.register_forward_hook(leave, always_call=True))

    def _hook(self, stack: ExitStack, part: Part) -> None:
        code, marks, me = self.marks.place(part.stage, part.name), self.marks, self._thread
        running = {"experts": self._layer, "router": self._routing}.get(part.stage)
        is_router, layer = part.stage == "router", part.layer

        def enter(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if threading.get_ident() == me:
                marks.enter(code)
                if running is not None and layer is not None:
                    running.append(layer)

        def leave(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
            if threading.get_ident() == me:
                if running:
                    running.pop()
                if is_router and layer is not None:
                    self._take_logits(layer, result)
                marks.leave(code)

        _until(stack, part.module.register_forward_pre_hook(enter, prepend=True))
        _until(stack, part.module.register_forward_hook(leave, always_call=True))

    def _wrap_dispatchers(self, stack: ExitStack) -> None:
        """Of layers whose experts are cut over ranks: where rows come to their experts, and go back."""
        for name, cut in find_cut_layers(self.model).items():
            index = next((self.names[n] for n in (name, f"{name}.experts".lstrip(".")) if n in self.names), None)
            if index is None:
                continue
            self._cut.add(index)
            self.layers[index].num_experts = _placement(cut.dispatcher).num_experts
            codes = tuple(self.marks.place(stage, f"{name} {what}") for stage, what in _MOVES)
            timed = _Timed(cut.dispatcher, self, index, codes)
            cut.put_dispatcher(timed)
            stack.callback(_unwrap, cut, timed)

    def _tell_experts(self, prepared: Prepared, arguments: tuple[Any, ...], result: Any) -> None:
        self.ran.setdefault(prepared.implementation)
        if self._layer and self._layer[-1] not in self._cut:
            self.count(self._layer[-1], arguments[1].expert_ids, arguments[2].num_experts)

    def count(self, layer: int, ids: Tensor, num_experts: int) -> None:
        """A routing of a layer."""
        if layer == 0:
            self.marks.tokens += len(ids)
        self.layers[layer].add(ids, num_experts)

    def _tell_logits(self, prepared: Prepared, arguments: tuple[Any, ...], result: Any) -> None:
        if self._routing:
            self.layers[self._routing[-1]].add_logits(arguments[0])

    def _take_logits(self, layer: int, result: Any) -> None:
        """Those that a router of Transformers returns, beside what it has chosen."""
        if isinstance(result, Routing):
            return
        for each in result if isinstance(result, tuple) else (result,):
            count = self.layers[layer].num_experts
            if isinstance(each, Tensor) and each.is_floating_point() and each.shape[-1] == count:
                self.layers[layer].add_logits(each.reshape(-1, count))
                return


_MOVES = (("grouping", "dispatch"), ("combine", "combine"))


@dataclass(frozen=True, eq=False)
class _Timed(Dispatcher):
    """Another dispatcher, whose moves are marked, and whose routings are counted before anything is sent."""

    inner: Dispatcher
    profiler: Profiler
    layer: int
    codes: tuple[int, ...]

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing, Any]:
        profiler = self.profiler
        profiler.marks.enter(self.codes[0])
        profiler.count(self.layer, routing.expert_ids, profiler.layers[self.layer].num_experts)
        found = self.inner.dispatch(x, routing)
        profiler.marks.leave(self.codes[0])
        return found

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        self.profiler.marks.enter(self.codes[1])
        found = self.inner.combine(y, handle)
        self.profiler.marks.leave(self.codes[1])
        return found


def _placement(dispatcher: Any) -> Any:
    while not hasattr(dispatcher, "place"):
        dispatcher = dispatcher.inner
    return dispatcher.place.placement


def _unwrap(cut: CutLayer, timed: _Timed) -> None:
    cut.put_dispatcher(without(cut.dispatcher, lambda each: each is timed))


def _until(stack: ExitStack, hook: Any) -> None:
    stack.callback(hook.remove)


def _phase(model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Of a call of a whole model: training, or by the length of its sequences; plain modules have neither."""
    if model.training and torch.is_grad_enabled():
        return TRAINING
    ids = named.get("input_ids", named.get("inputs_embeds"))
    if ids is None and arguments and isinstance(arguments[0], Tensor) and not arguments[0].is_floating_point():
        ids = arguments[0]
    if not isinstance(ids, Tensor) or ids.dim() < 2:
        return FORWARD
    return PROMPT if ids.shape[1] > 1 else DECODE


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise invalid_input(
            "profile",
            got=f"a value of type {type(model).__name__}",
            needs="a torch.nn.Module",
            fix="moestro.profile(text_model.model) profiles what load_text_model loads.",
        )
    compiled = [name for name, module in model.named_modules() if _is_compiled(module)]
    if compiled:
        raise unsupported(
            "profile",
            got=f"{type(model).__name__}, compiled{' at ' + compiled[0] if compiled[0] else ''}",
            needs="modules that run one by one, since a graph has no stages",
            fix="Profile the model before torch.compile; its routing is the same.",
        )


def _is_compiled(module: nn.Module) -> bool:
    """By torch.compile, of which the class is not to be imported for a look."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
