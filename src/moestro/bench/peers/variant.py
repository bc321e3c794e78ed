"""What every peer, and moestro itself, is to the benchmark: a way to compute a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moestro.bench.layers import DENSE, Layer, LayerSpec, active_experts, dtype_name, flops, working_bytes
from moestro.types import Routing

Call = Callable[[], Tensor]
Bind = Callable[[Tensor, Routing], Call]
Refuses = Callable[[LayerSpec, torch.dtype], str | None]


@dataclass(frozen=True)
class Cost:
    """What one call takes at the least: FLOP, bytes moved, and bytes of memory beyond weights and output."""

    flops: int
    nbytes: int
    workspace: int


@dataclass(frozen=True)
class Numbers:
    """The numbers a variant computes with.

    Attributes:
        format: the name of how its weights are stored; "dense" for the layer's own, of which it makes no copy.
        bits: of a weight in whole numbers: variants of as many are compared. None for the layer's own.
        bits_per_weight: of its own copy of the weights, scales included. None where it makes none.
        reference: the format of the weights on which the expected output is computed: the layer's own ("dense") for
            a variant that chooses its stored weights itself, one of moestro's for moestro.
        bound: None where the output has to be the expected one within the tolerance of the layer's dtype; else the
            most by which a token's output may be off, as the L2 norm of the difference over that of the expected.
        products: what is multiplied, and so of which peak its rate is a share.
        bits_to_prepare: of a weight, in memory while the copy is made, beside it and whatever it is made from.
    """

    format: str = DENSE
    bits: int | None = None
    bits_per_weight: float | None = None
    reference: str = DENSE
    bound: float | None = None
    products: Literal["float", "int8", "fp8-e4m3"] = "float"
    bits_to_prepare: float = 0.0

    def bits_in(self, dtype: torch.dtype) -> int:
        """Bits of a weight in a layer of this dtype."""
        return self.bits or 8 * dtype.itemsize

    def name_in(self, dtype: torch.dtype) -> str:
        """The format's name in a layer of this dtype ("bfloat16" where it is the layer's own)."""
        return dtype_name(dtype) if self.format == DENSE else self.format

    def bytes_per_expert(self, layer: Layer) -> int:
        """Stored bytes that computing with one expert reads, biases and scales included."""
        if self.reference in layer.quantized:
            return layer.quantized[self.reference].bytes_per_expert
        if self.bits_per_weight is None:
            return layer.weights.bytes_per_expert
        spec = layer.spec
        biases = (2 * spec.intermediate_size + spec.hidden_size) * 4 if spec.bias else 0
        return round(3 * spec.hidden_size * spec.intermediate_size * self.bits_per_weight / 8) + biases


@dataclass(frozen=True)
class Variant:
    """One way to compute a layer.

    Attributes:
        name: what is printed, and what `--peers` takes.
        refuses: None, or the sentence why it cannot run such a layer.
        prepare: maps a layer to a function (x, routing) -> call; both run before the clock starts.
        cost: decides whether a call fits into memory and time.
        device: the only type of device it runs on, or None for any.
        numbers: what it computes with.
        absent: None, or the sentence why it cannot run on this machine at all.
        compiles: whether calls compile kernels, for the first of their kind.
    """

    name: str
    refuses: Refuses
    prepare: Callable[[Layer], Bind]
    cost: Callable[[Layer, Routing], Cost]
    device: str | None = None
    numbers: Numbers = Numbers()
    absent: Callable[[], str | None] = lambda: None
    compiles: bool = False


def cost(layer: Layer, routing: Routing) -> Cost:
    """Of a variant that computes each (token, expert) pair once and reads each active expert once."""
    workspace = working_bytes(layer.spec, layer.dtype, routing.expert_ids.numel())
    nbytes = active_experts(routing.expert_ids) * layer.weights.bytes_per_expert
    return Cost(flops(layer.spec, routing), nbytes, workspace)


def gathering_cost(layer: Layer, routing: Routing) -> Cost:
    """Of one that copies the weights of every (token, expert) pair: read, written, read again."""
    copies = routing.expert_ids.numel() * layer.weights.bytes_per_expert
    return Cost(flops(layer.spec, routing), 3 * copies, copies)


def dense_cost(layer: Layer, routing: Routing) -> Cost:
    """Of one that computes every expert on every token."""
    h, i, rows = layer.spec.hidden_size, layer.spec.intermediate_size, routing.num_tokens * layer.num_experts
    nbytes = layer.num_experts * layer.weights.bytes_per_expert
    return Cost(6 * h * i * rows, nbytes, rows * (2 * h + 4 * i) * layer.dtype.itemsize)
