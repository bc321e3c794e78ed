"""The bytes of a budget: slots that hold one expert each, as its checkpoint stores it.

A pool keeps each stored tensor of its slots in one stack [S, ...], in the checkpoint's own layout and dtype, so that a
layer is computed by the one primitive on a routing that names slots.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.formats import StoredExperts
from moestro.memory.reader import Run, Ticket
from moestro.weights import ExpertWeights

POISON = False
"""Whether slots are filled with 0xFF (NaN, or scales that are) when their expert goes: tests look for stale slots."""

Key = tuple[int, int]
"""An expert: the number of its layer, and its own."""


@dataclass(frozen=True)
class SlotTensor:
    """One of the tensors that make up an expert: its dtype, and its shape for one expert."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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


class SlotPool:
    """S slots for experts that are stored alike.

    Attributes:
        tensors: what a slot holds.
        holds: the expert that each slot has whole; None for one that is empty, or being read into.
        coming: what is being read into a slot before its layer asks for it.
    """

    def __init__(self, tensors: Sequence[SlotTensor], num_slots: int, build: Build) -> None:
        self.tensors = tuple(tensors)
        self.holds: list[Key | None] = [None] * num_slots
        self.coming: dict[int, tuple[Key, Ticket]] = {}
        self._bytes = [_room(tensor.nbytes, num_slots) for tensor in self.tensors]
        stacks = [
            room.view(tensor.dtype).view(num_slots, *tensor.shape)
            for room, tensor in zip(self._bytes, self.tensors, strict=True)
        ]
        self._stored = build(stacks)
        self._biases: dict[Hashable, Tensor] = {}
        self._weights: dict[Hashable, ExpertWeights] = {}

    @property
    def num_slots(self) -> int:
        return len(self.holds)

    @property
    def nbytes(self) -> int:
        """Of all slots, biases left out."""
        return sum(room.numel() for room in self._bytes)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """What is read into."""
        return tuple(self._bytes)

    @property
    def bias_bytes(self) -> int:
        """Of the biases that slots have beside their experts."""
        return sum(bias.nbytes for bias in self._biases.values())

    def runs(self, sources: Sequence[Source], expert: int, slot: int) -> list[Run]:
        """What is read to have an expert in a slot."""
        return [source.run(expert, room[slot].data_ptr()) for source, room in zip(sources, self._bytes, strict=True)]

    def empty(self, slot: int) -> None:
        """What the slot holds is to be overwritten."""
        self.holds[slot] = None
        if POISON:
            for room in self._bytes:
                room[slot].fill_(0xFF)
            for bias in self._biases.values():
                bias[slot] = math.nan

    def weights(self, like: ExpertWeights) -> ExpertWeights:
        """The experts in the slots as a value, with what else `like` has; its biases are to be put in by `set_bias`."""
        first, last = (None if b is None else self._bias(i, b) for i, b in enumerate(biases_of(like)))
        dtypes = tuple(None if b is None else b.dtype for b in (first, last))
        key = (like.activation, like.output_norm, like.input_format, dtypes)
        found = self._weights.get(key)
        if found is None:
            stored = (*self._stored, first, last)
            found = ExpertWeights(*stored, like.activation, like.output_norm, like.input_format)
            self._weights[key] = found
        return found

    def set_bias(self, like: ExpertWeights, expert: int, slot: int) -> None:
        """Copy the biases of an expert of `like` to its slot."""
        for i, bias in enumerate(biases_of(like)):
            if bias is not None:
                self._bias(i, bias)[slot].copy_(bias[expert])

    def _bias(self, index: int, like: Tensor) -> Tensor:
        key = (index, like.dtype, like.shape[1])
        found = self._biases.get(key)
        if found is None:
            with torch.inference_mode(False):
                found = self._biases[key] = torch.zeros(self.num_slots, like.shape[1], dtype=like.dtype)
        return found


def biases_of(weights: ExpertWeights) -> tuple[Tensor | None, Tensor | None]:
    """Of gate_up and of down, without what autograd knows of them."""
    first, last = weights.gate_up_bias, weights.down_bias
    return (None if first is None else first.detach()), (None if last is None else last.detach())


def _room(nbytes: int, num_slots: int) -> Tensor:
    """Bytes [S, nbytes] that nobody has touched: the system gives memory as slots are filled."""
    mapping = mmap.mmap(-1, num_slots * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with torch.inference_mode(False):
        return torch.frombuffer(mapping, dtype=torch.uint8).view(num_slots, nbytes)
