"""The one way in: each operation has a priority list of implementations, and the first that can be prepared runs.

A `Prepared` says what will run and how, and can be called. It is kept under a call key: everything that the choice
depends on but the addresses of tensors. Of the tensors whose addresses it has taken the layout key is kept beside it,
and it is made anew where one of them has moved, or has another dtype, shape or strides.
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moestro import settings
from moestro.errors import unsupported
from moestro.ops.tensors import Layout, layout_key

MANY = 64
"""Tensors of which all are asked for more than their addresses; unstacked experts have more, and asking takes long."""

MOST_KEPT = 4096
"""Prepared calls that are kept; then the oldest goes."""


@dataclass(frozen=True)
class KernelUse:
    """A kernel of a prepared call, and what of the operation it computes, e.g. "gate_up".

    `units` is how often it is entered (of expert_mlp, blocks of rows), and `rows` are those of x that it meets.
    """

    stage: str
    kernel: str
    units: int
    rows: int


@dataclass(frozen=True)
class InWaves:
    """A prepared call of experts in parts, whose sums are those of one call.

    Attributes:
        room: of (x, routing): memory for the rows of all pairs, in a layout of its own.
        rows: of (x, routing, weights, room): writes the row of each pair that the routing names.
        put: of (x, routing, rows, room): the same of rows float32 [T, K, H] that were computed elsewhere, before their
            routing weights on outputs.
        total: of (x, routing, room, num_experts): the sum of each token's slots, from the rows of all pairs.
    """

    room: Callable[..., Tensor]
    rows: Callable[..., None]
    put: Callable[..., None]
    total: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A call that has been decided: it can be run, explained, observed and kept.

    Attributes:
        implementation: its name.
        compute: the computation; takes the operation's arguments, whatever their values.
        walk: how it goes through the work, e.g. a strategy's name; empty where there is one way.
        why: the sentence why that walk.
        threads: threads of the host that compute; 0 where PyTorch's own operations do.
        workspace_bytes: memory beside arguments and result; None where PyTorch's own operations allocate it.
        kernels: what exactly runs for these very arguments, as far as the implementation can tell.
        routed_only: whether of unstacked experts it reads those that ids name, and no others.
        in_waves: the same in parts, where it can be computed so.
        handle: the engine's call, where `compute` does nothing else; None of every other implementation.
    """

    implementation: str
    compute: Callable[..., Any] = field(repr=False)
    walk: str = ""
    why: str = ""
    threads: int = 0
    workspace_bytes: int | None = None
    kernels: Callable[..., tuple[KernelUse, ...]] = field(default=lambda *arguments: (), repr=False)
    routed_only: bool = False
    in_waves: InWaves | None = field(default=None, repr=False)
    handle: Any = field(default=None, repr=False)

    def __call__(self, *arguments: Any) -> Any:
        return self.compute(*arguments)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation: `prepare` returns a `Prepared`, or the reason why it cannot run arguments."""

    name: str
    prepare: Callable[..., Prepared | str]


@dataclass(frozen=True)
class Candidate:
    """One line of an explanation: an implementation and why it would not run (None if it would)."""

    name: str
    reason: str | None


Looked = tuple[Hashable, Sequence[Tensor]]
"""Of arguments: a key of everything but addresses that decides how they are computed, and the tensors whose addresses a
`Prepared` may have taken."""


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation and its implementations, best first.

    Attributes:
        name: what explanations and errors call it.
        implementations: the priority list.
        check: raises where its arguments do not belong together; asked where a call is prepared.
        look: what is looked at of its arguments; None where nothing may be kept. What is kept goes when the first of
            its tensors goes.
        routed: of its arguments, the indices of `look`'s tensors that a call of routed experts only reads; None for
            all of them.
    """

    name: str
    implementations: tuple[Implementation, ...]
    check: Callable[..., None] = lambda *arguments: None
    look: Callable[..., Looked | None] = lambda *arguments: None
    routed: Callable[..., Sequence[int] | None] = lambda *arguments: None


@dataclass(frozen=True, eq=False)
class _Kept:
    prepared: Prepared
    addresses: list[int]
    layout: list[Layout]
    owner: weakref.ref[Any] | None


_OPERATIONS: dict[str, Operation] = {}
_KEPT: OrderedDict[Hashable, _Kept] = OrderedDict()

Observer = Callable[[Prepared, tuple[Any, ...], Any], object]
Before = Callable[[], object]
_Observers = Mapping[Operation, tuple[tuple[Observer, Before | None], ...]]
_NOBODY: _Observers = MappingProxyType({})
_OBSERVERS: contextvars.ContextVar[_Observers] = contextvars.ContextVar("observers", default=_NOBODY)


def register(operation: Operation) -> Operation:
    """Make an operation known by its name."""
    _OPERATIONS[operation.name] = operation
    return operation


def operations() -> list[Operation]:
    """All registered operations, by name."""
    return [_OPERATIONS[name] for name in sorted(_OPERATIONS)]


def run(operation: Operation, *arguments: Any) -> Any:
    """`call`, or the first implementation that can where a tracer follows: nothing is kept or observed of that."""
    if torch.compiler.is_compiling():
        return _first(operation, arguments).compute(*arguments)
    return call(operation, *arguments)


def call(operation: Operation, *arguments: Any) -> Any:
    """Compute by the prepared call, and tell observers; errors as of `prepare`."""
    prepared = prepare(operation, *arguments)
    observers = _OBSERVERS.get().get(operation)
    if observers is None:
        return prepared.compute(*arguments)
    for _, before in observers:
        if before is not None:
            before()
    result = prepared.compute(*arguments)
    tell(operation, prepared, arguments, result)
    return result


def prepare(operation: Operation, *arguments: Any) -> Prepared:
    """The prepared call of these arguments: one that was kept, or the first of the list that can be prepared.

    Raises:
        UnsupportedError: the forced name does not exist or cannot run the arguments, or nothing can.
    """
    looked = operation.look(*arguments)
    if looked is None:
        return _first(operation, arguments)
    key, tensors = looked
    kept = _KEPT.get(key)
    if kept is not None and _is_current(kept, tensors, operation, arguments):
        return kept.prepared
    prepared = _first(operation, arguments)
    _keep(key, prepared, tensors)
    return prepared


def _is_current(kept: _Kept, tensors: Sequence[Tensor], operation: Operation, arguments: tuple[Any, ...]) -> bool:
    """Whether every tensor that the call reads lies as it lay. There is no other rule of staleness."""
    if not tensors:
        return True
    read = operation.routed(*arguments) if kept.prepared.routed_only else None
    if read is not None:
        return [kept.layout[i] for i in read] == layout_key([tensors[i] for i in read])
    if len(tensors) > MANY:
        return kept.addresses == list(map(Tensor.data_ptr, tensors))
    return kept.layout == layout_key(tensors)


def _keep(key: Hashable, prepared: Prepared, tensors: Sequence[Tensor]) -> None:
    owner = weakref.ref(tensors[0], functools.partial(_drop, key)) if tensors else None
    while len(_KEPT) >= MOST_KEPT:
        _KEPT.popitem(last=False)  # in one step: other threads, and owners that go, change it meanwhile
    _KEPT[key] = _Kept(prepared, list(map(Tensor.data_ptr, tensors)), layout_key(tensors), owner)


def _drop(key: Hashable, owner: weakref.ref[Any], prepared: dict[Hashable, _Kept] = _KEPT) -> None:
    kept = prepared.get(key)
    if kept is not None and kept.owner is owner:
        prepared.pop(key, None)


def _first(operation: Operation, arguments: tuple[Any, ...]) -> Prepared:
    operation.check(*arguments)
    entries = allowed(operation)
    reasons = []
    for entry in entries:
        found = entry.prepare(*arguments)
        if isinstance(found, Prepared):
            return found
        reasons.append(f"{entry.name}: {found}")
    raise unsupported(
        operation.name,
        got="arguments that no allowed implementation runs",
        needs="; ".join(reasons),
        fix="Drop the forced implementation, or change what the sentence names.",
    )


def allowed(operation: Operation) -> tuple[Implementation, ...]:
    """The implementations that may run: all, or the one that is forced by name, which some operation must have."""
    forced = settings.current().implementation
    if forced is None:
        return operation.implementations
    named = tuple(i for i in operation.implementations if i.name == forced)
    if named:
        return named
    if not any(i.name == forced for other in operations() for i in other.implementations):
        names = (f"{other.name}: {', '.join(i.name for i in other.implementations)}" for other in operations())
        raise unsupported(
            operation.name,
            got=f"implementation={forced!r}",
            needs=f"one of these ({'; '.join(names)})",
            fix=f"See moestro.use and the variable {settings.IMPLEMENTATION_VARIABLE}.",
        )
    return operation.implementations  # a name that only other operations know does not concern this one


def candidates(operation: Operation, *arguments: Any) -> dict[str, Prepared | str]:
    """Every implementation in order of priority: prepared, or the reason why it cannot run these arguments."""
    operation.check(*arguments)
    return {i.name: i.prepare(*arguments) for i in operation.implementations}


@contextmanager
def observed(operation: Operation, observer: Observer, before: Before | None = None) -> Iterator[None]:
    """Inside, tell the observer of every call of an operation in this context: prepared call, arguments and result.

    Calls that the observer makes itself are not told of. Threads started inside have a context of their own. `before`
    is called where a call that `call` computes begins; one that fails is never told of.
    """
    mine, others = (observer, before), _OBSERVERS.get()
    _OBSERVERS.set({**others, operation: (*others.get(operation, ()), mine)})
    try:
        yield
    finally:  # what is there now without it: blocks may overlap
        now = _OBSERVERS.get()
        left = {each: tuple(o for o in told if o is not mine) for each, told in now.items()}
        _OBSERVERS.set({each: told for each, told in left.items() if told} or _NOBODY)


def is_unwatched(*operations: Operation) -> bool:
    """Whether calls of these may be computed together: nobody is told of them, and no implementation is forced."""
    return settings.current().implementation is None and _OBSERVERS.get().keys().isdisjoint(operations)


def tell(operation: Operation, prepared: Prepared, arguments: tuple[Any, ...], result: Any) -> None:
    """Tell observers of a call that was computed by its prepared one, in whatever parts."""
    observers = _OBSERVERS.get().get(operation, ())
    token = _OBSERVERS.set(_NOBODY)
    try:
        for observer, _ in observers:
            observer(prepared, arguments, result)
    finally:
        _OBSERVERS.reset(token)


def leave_to_python(function: Callable[..., Any]) -> None:
    """Keep torch.compile, where it has left a call to Python, from compiling this frame and those below it.

    That is what `torch.compiler.disable` does, which costs a microsecond a call and loads the compiler at import.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


leave_to_python(call)
