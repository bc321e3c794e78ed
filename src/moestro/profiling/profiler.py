"""A profile while it is taken: observers of the parts of a model, and of the operations inside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from moestro.errors import invalid_input, unsupported
from moestro.moe import Dispatcher
from moestro.ops.dispatch import Prepared, observed
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.ops.grouping import GROUPING
from moestro.parallel.rebalance import CutLayer, find_cut_layers, without
from moestro.profiling.calls import observed_calls
from moestro.profiling.counters import Counters
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
        self._parts, found = parts_of(model)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.layers = [LayerCounts(layer.name, layer.num_experts) for layer in found]
        self.names = {layer.name: index for index, layer in enumerate(found)}
        self.marks = Marks(clock or (EventClock() if self.device.type == "cuda" else HostClock()))
        self.counters = Counters()
        self.ran: dict[str, None] = {}
        self.driven = False
        self._model: nn.Module | None = model
        self._phase: str | None = None
        self._thread = get_ident()
        self._depth = 0
        self._layer: list[int] = []
        self._routing: list[int] = []
        self._cut: set[int] = set()
        self._grouping = self.marks.place("grouping", "group_by_expert")

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, all that runs in this thread is in the profile; afterwards nothing of it is left in the model."""
        assert self._model is not None  # it is taken once
        model, parts = self._model, self._parts
        self._model, self._parts = None, []
        with ExitStack() as stack:
            for part in parts:
                self._observe(stack, part)
            self._observe_model(stack, model)
            self._wrap_dispatchers(stack, model)
            stack.enter_context(observed(EXPERT_MLP, self._tell_experts))
            stack.enter_context(observed(ROUTE, self._tell_logits))
            stack.enter_context(observed(GROUPING, self._end_grouping, self._begin_grouping))
            self.counters.start(model)
            self.marks.start()
            try:
                yield
            finally:
                rest = self._phase or (FORWARD if self.marks.has_begun else None)  # parts that ran by themselves
                self.marks.end_pass(None if self.driven else rest)
                self.counters.stop()

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

    def _observe_model(self, stack: ExitStack, model: nn.Module) -> None:
        code, marks, me = self.marks.place("other", type(model).__name__), self.marks, self._thread

        def begin(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if get_ident() != me:
                return
            self._depth += 1
            if self._depth == 1 and not self.driven:
                if self._phase is not None:
                    marks.end_pass(self._phase)
                self._phase = _phase(module, arguments, named)
            marks.enter(code)

        def end(result: Any) -> None:
            if get_ident() == me:
                self._depth -= 1
                marks.leave(code)

        stack.enter_context(observed_calls(model, begin, end))

    def _observe(self, stack: ExitStack, part: Part) -> None:
        marks, me, layer = self.marks, self._thread, part.layer
        code, running = marks.place(part.stage, part.name), {"experts": self._layer, "router": self._routing}
        now, add_mark, add_code = marks.now, marks.add_mark, marks.add_code
        mine, is_router = running.get(part.stage, []), part.stage == "router"

        def begin(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if get_ident() == me:
                add_mark(now())
                add_code(code)

        def end(result: Any) -> None:
            if get_ident() == me:
                add_mark(now())
                add_code(~code)

        def begin_layer(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if get_ident() == me:
                add_mark(now())
                add_code(code)
                mine.append(layer)  # type: ignore[arg-type]

        def end_layer(result: Any) -> None:
            if get_ident() == me:
                mine.pop()
                add_mark(now())
                add_code(~code)
                counts = self.layers[layer]  # type: ignore[index]
                if is_router:
                    counts.take_logits(result)
                counts.settle()

        stack.enter_context(observed_calls(part.module, *((begin, end) if layer is None else (begin_layer, end_layer))))

    def _wrap_dispatchers(self, stack: ExitStack, model: nn.Module) -> None:
        """Of layers whose experts are cut over ranks: where rows come to their experts, and go back."""
        for name, cut in find_cut_layers(model).items():
            index = next((self.names[n] for n in (name, f"{name}.experts".lstrip(".")) if n in self.names), None)
            if index is None:
                continue
            self._cut.add(index)
            self.layers[index].num_experts = _placement(cut.dispatcher).num_experts
            codes = tuple(self.marks.place(stage, f"{name} {what}") for stage, what in _MOVES)
            cut.put_dispatcher(_Timed(cut.dispatcher, self, index, codes))
            stack.callback(self._unwrap, cut)

    def _unwrap(self, cut: CutLayer) -> None:
        """Of what is there now: experts may have moved inside."""
        gone = without(cut.dispatcher, lambda each: isinstance(each, _Timed) and each.profiler is self)
        cut.put_dispatcher(gone)

    def is_here(self) -> bool:
        """Whether this is the thread that is profiled: others may have its context."""
        return get_ident() == self._thread

    def _tell_experts(self, prepared: Prepared, arguments: tuple[Any, ...], result: Any) -> None:
        if not self._layer or get_ident() != self._thread:
            return
        layer = self._layer[-1]
        self.ran[prepared.implementation] = None
        if layer not in self._cut:
            self.count(layer, arguments[1].expert_ids, arguments[2].num_experts)

    def count(self, layer: int, ids: Tensor, num_experts: int) -> None:
        """A routing of a layer."""
        tokens = self.layers[layer].add(ids, num_experts)
        if layer == 0:
            self.marks.come(tokens)

    def _tell_logits(self, prepared: Prepared, arguments: tuple[Any, ...], result: Any) -> None:
        if self._routing and get_ident() == self._thread:
            self.layers[self._routing[-1]].add_logits(arguments[0])

    def _begin_grouping(self) -> None:
        if self._is_inside():
            self.marks.enter(self._grouping)

    def _end_grouping(self, prepared: Prepared, arguments: tuple[Any, ...], result: Any) -> None:
        if self._is_inside():
            self.marks.leave(self._grouping)

    def _is_inside(self) -> bool:
        return bool(self._depth or self._layer) and get_ident() == self._thread


_SEQUENCES = ("decoder_input_ids", "input_ids", "decoder_inputs_embeds", "inputs_embeds")
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
        if not profiler.is_here():
            return self.inner.dispatch(x, routing)
        profiler.marks.enter(self.codes[0])
        profiler.count(self.layer, routing.expert_ids, profiler.layers[self.layer].num_experts)
        found = self.inner.dispatch(x, routing)
        profiler.marks.leave(self.codes[0])
        return found

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        if not self.profiler.is_here():
            return self.inner.combine(y, handle)
        self.profiler.marks.enter(self.codes[1])
        found = self.inner.combine(y, handle)
        self.profiler.marks.leave(self.codes[1])
        return found


def _placement(dispatcher: Any) -> Any:
    while not hasattr(dispatcher, "place"):
        dispatcher = dispatcher.inner
    return dispatcher.place.placement


def _phase(model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Of a call of a whole model: training, or by the length of its sequences; plain modules have neither."""
    if model.training and torch.is_grad_enabled():
        return TRAINING
    ids = next((named[name] for name in _SEQUENCES if named.get(name) is not None), None)
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
