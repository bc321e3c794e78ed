"""The weights that a call touches, read and nothing computed: the least time that memory allows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moestro.bench.layers import DENSE, Layer
from moestro.bench.peers.variant import Bind, Call, Variant, cost
from moestro.ops import native
from moestro.types import Routing
from moestro.weights import ExpertWeights

NAME = "plain-read"


class PlainRead:
    """A call that reads every byte of tensors on the CPU once and computes nothing, by all of PyTorch's threads.

    Threads take parts of 256 KiB, and read each as four streams at once. It needs the native engine.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kept = list(tensors)
        self._pieces = [piece for tensor in self._kept for piece in _pieces(tensor)]

    @property
    def nbytes(self) -> int:
        """Bytes that a call reads."""
        return sum(tensor.nbytes for tensor in self._kept)

    def __call__(self) -> None:
        native.engine().plain_read(self._pieces, torch.get_num_threads())


def _pieces(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Addresses and numbers of bytes."""
    if tensor.is_contiguous():
        yield tensor.data_ptr(), tensor.nbytes
    else:
        for part in tensor:
            yield from _pieces(part)


def tensors_of(weights: ExpertWeights, routing: Routing) -> list[Tensor]:
    """What is stored of the experts that a routing names: weights, scales and biases."""
    experts = sorted({e for e in routing.expert_ids.flatten().tolist() if e >= 0})
    matrices = [block for e in experts for stored in (weights.gate_up, weights.down) for block in stored.blocks(e)]
    biases = [bias for bias in (weights.gate_up_bias, weights.down_bias) if bias is not None]
    return [tensor for matrix in matrices for tensor in matrix.tensors] + [bias[e] for bias in biases for e in experts]


def plain_reads(ours: Iterable[Variant], device: str) -> tuple[Variant, ...]:
    """One for each way in which moestro's variants store their weights, named "plain-read" and the format.

    None on an accelerator, whose memory no thread of the host reads, and none without the native engine.
    """
    if torch.device(device).type != "cpu" or native.missing() is not None:
        return ()
    return tuple({variant.numbers.reference: _of(variant) for variant in ours}.values())


def _of(variant: Variant) -> Variant:
    form = variant.numbers.reference

    def prepare(layer: Layer) -> Bind:
        weights = layer.in_format(form)
        return lambda x, routing: _call(x, PlainRead(tensors_of(weights, routing)))

    name = NAME if form == DENSE else f"{NAME}-{form}"
    return Variant(name, variant.refuses, prepare, cost, numbers=replace(variant.numbers, bound=None, products="float"))


def _call(x: Tensor, read: PlainRead) -> Call:
    """As a call of a variant, which returns rows."""

    def call() -> Tensor:
        read()
        return x

    return call
