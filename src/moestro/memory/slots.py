"""The bytes of a budget: slots that hold one expert each, as its checkpoint stores it.

A pool keeps each stored tensor of its slots in one stack [S, ...], in the checkpoint's own layout and dtype, so that a
layer is computed by the one primitive on a routing that names slots.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.memory.tiers import Arrival, Build, Copy, Rooms, SlotTensor
from moestro.weights import ExpertWeights

POISON = False
"""Whether slots are filled with 0xFF (NaN, or scales that are) when their expert goes: tests look for stale slots."""

Key = tuple[int, int]
"""An expert: the number of its layer, and its own."""


@dataclass(frozen=True, eq=False)
class SlotWeights(ExpertWeights):
    """Experts in slots. Calls are planned for all experts of the layer, so that bits do not depend on the slots."""

    planned_experts: int = 0


class SlotPool:
    """S slots for experts that are stored alike.

    Attributes:
        tensors: what a slot holds.
        holds: the expert that each slot has whole; None for one that is empty, or being read into.
        coming: what is being read into a slot before its layer asks for it.
        copies: to and from slots, that the device may not have ended.
        unbiased: slots whose experts came without their biases.
    """

    def __init__(self, tensors: Sequence[SlotTensor], num_slots: int, build: Build, device: torch.device) -> None:
        self.tensors, self.device = tuple(tensors), device
        self.holds: list[Key | None] = [None] * num_slots
        self.coming: dict[int, tuple[Key, Arrival]] = {}
        self.copies: dict[int, Copy] = {}
        self.unbiased: set[int] = set()
        self._bytes = [_room(tensor.nbytes, num_slots, device) for tensor in self.tensors]
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

    def rooms(self, slot: int) -> Rooms:
        """The bytes of a slot."""
        return [room[slot] for room in self._bytes]

    def use(self, slots: Iterable[int]) -> None:
        """Have what is computed next wait for copies to these slots."""
        if self.copies:
            for slot in slots:
                if (copy := self.copies.get(slot)) is not None:
                    copy.use()
                    del self.copies[slot]  # now, so that Ctrl-C loses none

    def empty(self, slot: int) -> None:
        """What the slot holds is to be overwritten, once nobody copies it any more."""
        self.holds[slot] = None
        if (copy := self.copies.get(slot)) is not None:
            copy.settle()
            del self.copies[slot]
        if POISON:
            for room in self._bytes:
                room[slot].fill_(0xFF)
            for bias in self._biases.values():
                bias[slot] = math.nan

    def weights(self, like: ExpertWeights) -> ExpertWeights:
        """The experts in the slots as a value, with what else `like` has; its biases are to be put in by `set_bias`."""
        first, last = (None if b is None else self._bias(i, b) for i, b in enumerate(biases_of(like)))
        dtypes = tuple(None if b is None else b.dtype for b in (first, last))
        key = (like.activation, like.output_norm, like.input_format, like.num_experts, dtypes)
        found = self._weights.get(key)
        if found is None:
            stored = (*self._stored, first, last)
            rest = like.activation, like.output_norm, like.input_format
            found = SlotWeights(*stored, *rest, planned_experts=like.num_experts)
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
                found = self._biases[key] = torch.zeros(
                    self.num_slots, like.shape[1], dtype=like.dtype, device=self.device
                )
        return found


def biases_of(weights: ExpertWeights) -> tuple[Tensor | None, Tensor | None]:
    """Of gate_up and of down, without what autograd knows of them."""
    first, last = weights.gate_up_bias, weights.down_bias
    return (None if first is None else first.detach()), (None if last is None else last.detach())


def _room(nbytes: int, num_slots: int, device: torch.device) -> Tensor:
    """Bytes [S, nbytes] that nobody has touched: the system gives memory of the host as slots are filled."""
    with torch.inference_mode(False):
        if device.type != "cpu":
            return torch.empty(num_slots, nbytes, dtype=torch.uint8, device=device)
        mapping = mmap.mmap(-1, num_slots * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(mapping, dtype=torch.uint8).view(num_slots, nbytes)
