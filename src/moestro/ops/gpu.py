"""Where Triton's kernels run, or the sentence why not: on NVIDIA GPUs, and where asked for in Triton's interpreter."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moestro import settings
from moestro.ops.tensors import TRACED, no_gradient, no_memory

LEAST_CAPABILITY = (8, 0)
"""Of a GPU: the first with bfloat16 and asynchronous copies."""

LEAST_FP8 = (8, 9)
"""Of the first whose tensor cores multiply 8-bit floats."""

IMPLEMENTATION = "triton"


@dataclass(frozen=True)
class Device:
    """What tuning has to know of a GPU: its multiprocessors, and bytes of shared memory that one program can have."""

    capability: tuple[int, int]
    num_sms: int
    shared_memory: int


INTERPRETER = Device((8, 0), 4, 99 << 10)
"""What stands for a device where there is none: kernels of the least that is supported, on few processors."""


@functools.cache
def missing() -> str | None:
    """Why no kernel of Triton can run at all; None if it can be imported."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"Triton is not there ({error}): pip install triton"
    return None


@functools.cache
def kernels(package: str) -> ModuleType:
    """Device code of a package; importing it imports Triton."""
    return importlib.import_module(f"{package}.triton_kernels")


@functools.cache
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    if missing() is not None:
        return False
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def unusable(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on a device; None if they can."""
    kind = device.type
    if kind == "cuda":
        return missing() or _too_old(device)
    if kind != "cpu" or settings.current().implementation != IMPLEMENTATION:
        return f"it computes on NVIDIA GPUs, and its argument is on {kind}"
    if missing() is None and not interpreted():
        return "it computes on the CPU in Triton's interpreter only: set TRITON_INTERPRET=1 before Python starts"
    return missing()


def unreadable(*tensors: Tensor) -> str | None:
    """Why kernels cannot read these tensors where they lie; None if they can."""
    if torch.compiler.is_compiling():  # a tracer follows no import of Triton
        return TRACED
    for tensor in tensors:
        reason = unusable(tensor.device)
        if reason is not None:
            return reason
    return no_memory(*tensors) or no_gradient(*tensors)


def runs_on(kind: str, index: int | None) -> bool:
    """Whether kernels run on this device, for code that a tracer follows."""
    return unusable(torch.device(kind) if index is None else torch.device(kind, index)) is None


def multiplies_fp8(kind: str, index: int | None) -> bool:
    """Whether kernels multiply 8-bit floats on this device, for code that a tracer follows."""
    if kind != "cuda":
        return interpreted()
    return _device(torch.device(kind) if index is None else torch.device(kind, index)).capability >= LEAST_FP8


# What torch.compiler.assume_constant_result does, without loading the compiler, and Triton with it, at import.
for _constant in (runs_on, multiplies_fp8):
    setattr(_constant, "_dynamo_marked_constant", True)  # noqa: B010


_HERE: AbstractContextManager[object] = nullcontext()


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """A block in which kernels are launched where the tensor lies: Triton launches on PyTorch's current device."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(tensor.device)


LEAST_OVERLAPPED = 256
"""Rows from which two computations are worth a second stream, where a CUDA graph does not make it free."""


def beside(x: Tensor, first: Callable[[], Tensor], second: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """What two independent computations on x return, the second on a stream of its own where that can overlap them.

    That is on a GPU, without gradients, in a CUDA graph that is being captured or with many rows of x.
    """
    if torch.compiler.is_compiling() or not _overlaps(x):
        return first(), second()
    main, side = _streams(x.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        other = second()
    own = first()
    main.wait_stream(side)
    other.record_stream(main)
    return own, other


def _overlaps(x: Tensor) -> bool:
    if not x.is_cuda or torch.is_grad_enabled():
        return False
    return x.shape[0] >= LEAST_OVERLAPPED or is_captured(x)


def is_captured(x: Tensor) -> bool:
    """Whether what is computed of x now becomes part of a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.current_stream(device), _side_stream(device)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Launch:
    """A kernel and the values it is compiled for; from the second launch on the first one's code runs at once.

    Triton's own launch looks at every argument anew. What it would look for must not change then: whether pointers are
    multiples of 16, and which of the integers it specialises on are 1 or multiples of 16.

    The compile-time parameters of `kernel` stand last; `values` are all of them by name, `resources` the options of a
    launch.
    """

    def __init__(self, kernel: Any, values: dict[str, Any], resources: dict[str, Any]) -> None:
        names = [p.name for p in kernel.params if p.is_constexpr] if hasattr(kernel, "params") else list(values)
        self._kernel, self._options = kernel, {**values, **resources}
        self._values = [values[name] for name in names]
        self._compiled: dict[int, Callable[..., None]] = {}
        self._driver = importlib.import_module("triton.runtime").driver

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Launch that many programs on the current device with the arguments that are not compile-time values."""
        if interpreted():
            self._kernel[(programs,)](*arguments, **self._options)
            return
        device = self._driver.active.get_current_device()
        compiled = self._compiled.get(device)
        if compiled is None:
            first = self._kernel[(programs,)](*arguments, **self._options)
            self._compiled[device] = _direct(first, self._values, device)
        else:
            compiled(programs, *arguments)

    def on(self, device: torch.device) -> Callable[..., None] | None:
        """The same for calls while that device is the current one, with addresses in place of tensors.

        None before the first launch there. In the interpreter, which reads tensors, it takes tensors.
        """
        return self if interpreted() else self._compiled.get(device.index or 0)


def _direct(compiled: Any, values: list[Any], device: int) -> Callable[..., None]:
    """Launches of compiled code on a device as Triton's own end, with no more on the way."""
    run, function, packed, every = compiled.run, compiled.function, compiled.packed_metadata, tuple(values)
    runtime = importlib.import_module("triton").knobs.runtime
    stream = importlib.import_module("triton.runtime").driver.active.get_current_stream

    def launch(programs: int, *arguments: Any) -> None:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", True) or getattr(leave, "calls", True):  # a profiler is told of launches
            compiled[programs, 1, 1](*arguments, *every)
        else:
            run(programs, 1, 1, stream(device), function, packed, None, None, None, *arguments, *every)

    return launch


ALIGNED = 16
"""Bytes of which addresses are multiples where kernels are compiled for that."""


Values = tuple[tuple[str, Any], ...]


@functools.lru_cache(maxsize=512)
def kept(kernel: Any, values: Values, resources: Values, given: tuple[Hashable, ...]) -> Launch:
    """The `Launch` of these values and resources, kept; `given` is what Triton would look for in the arguments."""
    return Launch(kernel, dict(values), dict(resources))


def aligned(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """What Triton looks for in tensors: their dtypes, and whether they lie at multiples of 16 bytes."""
    return tuple([None if t is None else (t.dtype, t.data_ptr() % ALIGNED == 0) for t in tensors])


def alignment(*tensors: Tensor) -> Hashable:
    """Which of the tensors lie at multiples of 16 bytes, for a call key that holds their dtypes."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % ALIGNED == 0 or tuple([t.data_ptr() % ALIGNED == 0 for t in tensors])


def device_of(tensor: Tensor) -> Device:
    """The device that a tensor's kernels run on."""
    return INTERPRETER if tensor.device.type != "cuda" else _device(tensor.device)


@functools.cache
def _device(device: torch.device) -> Device:
    found = torch.cuda.get_device_properties(device)
    capability = (found.major, found.minor)
    return Device(capability, found.multi_processor_count, shared_memory(capability))


def shared_memory(capability: tuple[int, int]) -> int:
    """Bytes that one program can have, after CUDA's table of compute capabilities; the least of it for unknown ones."""
    return {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(capability, 99) << 10


@functools.cache
def _too_old(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "its kernels are written for NVIDIA GPUs, and this is one of AMD"
    capability = _device(device).capability
    if capability < LEAST_CAPABILITY:
        least, has = (f"{major}.{minor}" for major, minor in (LEAST_CAPABILITY, capability))
        return f"it needs a GPU of compute capability {least} or more, and this one has {has}"
    return None
