"""The weights that a call touches, read and nothing computed: the least time that memory allows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from moestro.bench.layers import DENSE, Layer
from moestro.bench.peers.variant import Bind, Call, Cost, Variant, cost
from moestro.errors import unsupported
from moestro.ops import native
from moestro.types import Routing
from moestro.weights import ExpertWeights

NAME = "plain-read"


class PlainRead:
    """A call that reads every byte of tensors on the CPU once and computes nothing, by all of PyTorch's threads.

    Threads take parts of 256 KiB, and read each as four streams at once.

    Raises:
        UnsupportedError: there is no native engine, or a tensor is not on the CPU or has gaps between its values.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kept = list(tensors)
        for tensor in self._kept:
            _check(tensor)
        self._pieces = [(tensor.data_ptr(), tensor.nbytes) for tensor in self._kept]

    @property
    def nbytes(self) -> int:
        """Bytes that a call reads."""
        return sum(tensor.nbytes for tensor in self._kept)

    def __call__(self) -> None:
        native.engine().plain_read(self._pieces, torch.get_num_threads())


def _check(tensor: Tensor) -> None:
    """Refuse what is not one piece of the host's memory; in which order its dimensions lie does not matter."""
    reason = native.unreadable(tensor) or (None if _is_dense(tensor) else "there are gaps between its values")
    if reason is not None:
        raise unsupported(
            "plain read",
            got=f"a tensor {list(tensor.shape)} on {tensor.device}: {reason}",
            needs="tensors on the CPU without gaps, and the native engine",
            fix="Read a contiguous copy.",
        )


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


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
        if form not in (DENSE, *layer.quantized):
            got, needs = f"no weights in {form}", "those that moestro computes with"
            raise unsupported("plain read", got=got, needs=needs, fix="See why moestro was skipped.")
        weights = layer.in_format(form)
        return lambda x, routing: _call(x, PlainRead(tensors_of(weights, routing)))

    name = NAME if form == DENSE else f"{NAME}-{form}"
    numbers = replace(variant.numbers, bits_per_weight=None, bound=None, products="float")
    return Variant(name, variant.refuses, prepare, _cost, numbers=numbers)


def _cost(layer: Layer, routing: Routing) -> Cost:
    return replace(cost(layer, routing), flops=0, workspace=0)


def _call(x: Tensor, read: PlainRead) -> Call:
    """As a call of a variant, which returns rows."""

    def call() -> Tensor:
        read()
        return x

    return call
