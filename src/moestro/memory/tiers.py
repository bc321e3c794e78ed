"""Tiers: hot, the memory of the device that computes; warm, the host's; cold, the checkpoint's own files.

On a CPU hot and warm are one. Slots of a tier are filled by the one below: from files by reads, from slots of other
memory over a link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moestro.errors import invalid_input, unsupported
from moestro.formats import StoredExperts
from moestro.memory.policy import Visit
from moestro.memory.reader import OPERATION, Reader, Run
from moestro.memory.sizes import LayerSize

Rooms = Sequence[Tensor]
"""The bytes of a slot, or of all slots of a pool: uint8 [n] or [S, n] for each tensor of an expert."""


@dataclass(frozen=True)
class SlotTensor:
    """One of the tensors that make up an expert: its dtype, and its shape for one expert."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Source:
    """Where the files have one of these tensors: (file, offset) of each expert's, or of the first in a stack."""

    starts: tuple[tuple[int, int], ...]
    nbytes: int

    def run(self, expert: int, address: int) -> Run:
        """What is read of an expert, and to which address."""
        file, offset = self.starts[expert if len(self.starts) > 1 else 0]
        return Run(file, offset + (0 if len(self.starts) > 1 else expert * self.nbytes), self.nbytes, address)


Build = Callable[[Sequence[Tensor]], tuple[StoredExperts, StoredExperts]]
"""gate_up and down over S slots, made of the stacks of a pool as views."""


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One layer, before there are slots.

    Attributes:
        name: the layer's, for errors.
        size: how many experts, and what one takes; layers whose `pool_key` is equal share slots, so it says all of
            `tensors`, and all that `build` depends on.
        tensors: that make up an expert.
        sources: where each of them is in the files.
        build: makes the stored experts of a pool's stacks.
    """

    name: str
    size: LayerSize
    tensors: tuple[SlotTensor, ...]
    sources: tuple[Source, ...]
    build: Build


class Copy(Protocol):
    """An expert on its way over a link."""

    def use(self) -> None:
        """Have what is computed next on the device wait for it."""

    def settle(self) -> None:
        """Return once it has been read, and its source may be overwritten."""


class Arrival(Protocol):
    """An expert that a tier asked the one below for."""

    def wait(self) -> Copy | None:
        """Return once it is in its slot, or on its last way there; or raise why it does not come."""

    def settle(self) -> None:
        """Return once its slot is not written to any more; whether it came is not said."""

    def hurry(self) -> None:
        """Have it come before what nobody waits for yet."""

    @property
    def has_ended(self) -> bool:
        """Whether `wait` would not wait."""

    def drop(self) -> bool:
        """Whether it had not begun, and now never will."""


class Below(Protocol):
    """What fills the slots of a tier: the tier below it.

    Attributes:
        reader: of the files, below all tiers.
        one_by_one: whether what was asked for has to come before more is asked for.
    """

    reader: Reader
    one_by_one: bool

    @property
    def layers(self) -> Sequence[Any]:
        """Those of its slots; none of files."""

    def bring(self, visit: Visit, rooms: Mapping[int, Rooms], urgent: bool = True) -> Mapping[int, Arrival]:
        """Have the experts of a layer's visit put into the slots above that they are given; by experts."""

    def follow(self) -> None:
        """A call begins: have what it queues on the device come after what the call before it queued."""

    def keep(self, memory: Rooms) -> None:
        """Keep what is written to at least until nothing is written any more."""

    def statistics(self) -> dict[str, Any] | None:
        """What has happened in its slots; None where it has none."""


class Files:
    """The cold tier: the files of a checkpoint."""

    one_by_one = False
    layers: Sequence[Any] = ()

    def __init__(self, reader: Reader, plans: Sequence[LayerPlan]) -> None:
        self.reader, self._plans = reader, tuple(plans)

    def bring(self, visit: Visit, rooms: Mapping[int, Rooms], urgent: bool = True) -> Mapping[int, Arrival]:
        """As of every tier: reads of its runs, each of which can be waited for by itself."""
        plan = self._plans[visit.layer]
        return {expert: self._read(plan, expert, room, urgent) for expert, room in rooms.items()}

    def follow(self) -> None:
        """As of every tier; a CPU has no queue."""

    def keep(self, memory: Rooms) -> None:
        """As of every tier."""
        self.reader.keep(memory)

    def statistics(self) -> dict[str, Any] | None:
        """None: files have no slots."""
        return None

    def __str__(self) -> str:
        how = "past" if self.reader.direct else "through"
        return f"{self.reader.threads} threads read {how} the page cache"

    def _read(self, plan: LayerPlan, expert: int, room: Rooms, urgent: bool) -> Arrival:
        runs = [source.run(expert, part.data_ptr()) for source, part in zip(plan.sources, room, strict=True)]
        return self.reader.submit(runs, f"expert {expert} of {plan.name}", urgent)


class Link(Protocol):
    """Copies experts from slots of the host's memory to slots of a device's."""

    def copy(self, to: Rooms, source: Rooms) -> Copy | None:
        """Begin; None where it is done. Work that was queued on the device before may still read `to`."""

    def follow(self) -> None:
        """As of `Below`."""


class HostLink:
    """Between two memories of a CPU."""

    def copy(self, to: Rooms, source: Rooms) -> Copy | None:
        """At once."""
        for own, given in zip(to, source, strict=True):
            own.copy_(given)
        return None

    def follow(self) -> None:
        """As of every link; nothing is queued."""


class CudaLink:
    """From the host's memory to a GPU, on a stream of its own.

    Args:
        device: the GPU.
        memory: of the host, all that is copied from. It is locked, so that the GPU reads it by itself.

    Raises:
        InvalidInputError: memory that the system does not lock.
    """

    def __init__(self, device: torch.device, memory: Rooms) -> None:
        self._locked: list[Tensor] = []  # first, for `close`
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Stream | None = None
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for part in memory:
            error = self._runtime.cudaHostRegister(part.data_ptr(), part.nbytes, 0)
            if int(error):
                self.close()
                with suppress(RuntimeError):
                    torch.ones(1, device=device)  # the next kernel is told of the error, whoever launches it
                raise invalid_input(
                    OPERATION,
                    got=f"{part.nbytes:,} bytes of host memory that could not be locked (CUDA error {int(error)})",
                    needs="memory that the GPU reads by itself",
                    fix="Lower memory=, or raise the limit of locked memory (`ulimit -l`).",
                )
            self._locked.append(part)

    def copy(self, to: Rooms, source: Rooms) -> Copy | None:
        """After what the device was given to compute so far, beside what it is given from now on."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for own, given in zip(to, source, strict=True):
                own.copy_(given, non_blocking=True)
            return _CudaCopy(self._device, self._stream.record_event())

    def follow(self) -> None:
        """As of every link: threads, and blocks of `torch.cuda.stream`, have streams of their own."""
        now, last = torch.cuda.current_stream(self._device), self._last
        if last is not None and last != now:
            now.wait_stream(last)
        self._last = now

    def close(self) -> None:
        """Give the memory back to the system's care."""
        if self._locked:
            self._stream.synchronize()
        while self._locked:
            self._runtime.cudaHostUnregister(self._locked.pop().data_ptr())

    def __del__(self) -> None:
        self.close()


class _CudaCopy:
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device, self._event = device, event

    def use(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def settle(self) -> None:
        self._event.synchronize()


def link_to(device: torch.device, memory: Rooms) -> Link:
    """What copies from memory of the host to a device.

    Raises:
        UnsupportedError: a device that is neither the CPU nor an NVIDIA GPU.
    """
    if device.type == "cpu":
        return HostLink()
    if device.type != "cuda":
        raise unsupported(
            OPERATION,
            got=f"device_memory= of {str(device)!r}",
            needs="an NVIDIA GPU, or the CPU to see the tiers at work",
            fix="Load the model without device_memory=.",
        )
    return CudaLink(device, memory)
