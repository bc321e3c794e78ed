"""One tensor of a checkpoint, and the rule by which random numbers fill it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moestro.checkpoint import TensorSpec
from moestro.formats import WeightFormat, check_shape

BF16, F32, U8, F8 = torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn
BLOCK = 128

RMS = {"e2m1": 2.93, "int4": 4.61, "uint4": 4.69, "int8": 40.0, "e4m3": 64.0}
"""Root mean square of the values that random codes of an element stand for, before the scale."""


@dataclass(frozen=True)
class Fill:
    """How a tensor's numbers are drawn.

    Attributes:
        kind: "ones"; "normal" (standard deviation `size`); "near" (uniform within a quarter of `size`); "exponents"
            (e8m0 bytes within one of the power of two next to `size`); "zero_points"; or an element of `RMS`.
        size: see kind.
    """

    kind: str
    size: float = 0.0


@dataclass(frozen=True)
class Item:
    """A tensor of the checkpoint and its fill."""

    spec: TensorSpec
    fill: Fill

    @property
    def name(self) -> str:
        return self.spec.name


def item(name: str, shape: tuple[int, ...], fill: Fill, dtype: torch.dtype = BF16) -> Item:
    """A tensor by its parts."""
    return Item(TensorSpec(name, dtype, shape), fill)


def normal(fan_in: int) -> Fill:
    """Weights that keep the size of what a product sums over `fan_in` entries."""
    return Fill("normal", 1 / math.sqrt(fan_in))


def norm(name: str, size: int) -> Item:
    """The weight of a normalisation: ones."""
    return item(f"{name}.weight", (size,), Fill("ones"))


def bias(name: str, *shape: int) -> Item:
    """A small bias."""
    return item(name, shape, Fill("normal", 0.02))


def table(name: str, rows: int, columns: int) -> Item:
    """An embedding: rows of unit variance."""
    return item(f"{name}.weight", (rows, columns), Fill("normal", 1.0))


def router(name: str, rows: int, columns: int) -> Item:
    """A router's weight, in bfloat16 in every family: on a normalised input its logits spread over the experts."""
    return item(f"{name}.weight", (rows, columns), normal(columns))


@dataclass(frozen=True)
class Linear:
    """How a family stores its linear layers.

    Attributes:
        scales: dtype of `weight_scale_inv`, one scale for each block of 128 x 128, where the weights are FP8; None
            where they are bfloat16.
    """

    scales: torch.dtype | None = None

    def __call__(self, name: str, rows: int, columns: int) -> Iterator[Item]:
        """The tensors of one layer [rows, columns]."""
        if self.scales is None:
            yield item(f"{name}.weight", (rows, columns), normal(columns))
            return
        grid = (-(-rows // BLOCK), -(-columns // BLOCK))
        size = 1 / math.sqrt(columns) / RMS["e4m3"]
        yield item(f"{name}.weight", (rows, columns), Fill("e4m3"), F8)
        yield item(f"{name}.weight_scale_inv", grid, Fill("near", size), self.scales)


@dataclass(frozen=True)
class Stack:
    """The experts of one layer: E experts from H to I and back, below the name `path`."""

    path: str
    num_experts: int
    hidden_size: int
    intermediate_size: int

    @property
    def projections(self) -> dict[str, tuple[int, int, int]]:
        """[E, N, K] of the fused projections: K is what a product sums over."""
        e, h, i = self.num_experts, self.hidden_size, self.intermediate_size
        return {"gate_up_proj": (e, 2 * i, h), "down_proj": (e, h, i)}


@dataclass(frozen=True)
class Apart:
    """Experts with one tensor for each matrix: `path.0.gate_proj.weight` and so on."""

    linear: Linear = Linear()
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def __call__(self, stack: Stack) -> Iterator[Item]:
        h, i = stack.hidden_size, stack.intermediate_size
        gate, up, down = self.names
        for expert in range(stack.num_experts):
            yield from self.linear(f"{stack.path}.{expert}.{gate}", i, h)
            yield from self.linear(f"{stack.path}.{expert}.{up}", i, h)
            yield from self.linear(f"{stack.path}.{expert}.{down}", h, i)


def fused(stack: Stack) -> Iterator[Item]:
    """Experts stacked, gate over up: the layout in which Transformers holds them in memory."""
    for projection, shape in stack.projections.items():
        yield item(f"{stack.path}.{projection}", shape, normal(shape[-1]))


def transposed(stack: Stack) -> Iterator[Item]:
    """Experts stacked and transposed, as Llama 4 stores them."""
    for projection, (e, n, k) in stack.projections.items():
        yield item(f"{stack.path}.{projection}", (e, k, n), normal(k))


def mxfp4_blocks(stack: Stack) -> Iterator[Item]:
    """Experts as gpt-oss stores them: 32 nibbles to a block of 16 bytes, one e8m0 byte for each block."""
    for projection, (e, n, k) in stack.projections.items():
        size = 1 / math.sqrt(k) / RMS["e2m1"]
        yield item(f"{stack.path}.{projection}_blocks", (e, n, k // 32, 16), Fill("e2m1"), U8)
        yield item(f"{stack.path}.{projection}_scales", (e, n, k // 32), Fill("exponents", size), U8)


def rows_together(stack: Stack) -> Iterator[Item]:
    """Experts as DBRX stores them: the rows of all experts in one matrix; the way back transposed."""
    shape = (stack.num_experts * stack.intermediate_size, stack.hidden_size)
    for name, fan_in in (("w1", shape[1]), ("v1", shape[1]), ("w2", stack.intermediate_size)):
        yield item(f"{stack.path}.{name}", shape, normal(fan_in))


@dataclass(frozen=True)
class InFormat:
    """Experts as moestro's own checkpoints store them, in one of its formats.

    The names start with the parameters' own, and Transformers calls Mixtral's `block_sparse_moe` `mlp`.
    """

    format: WeightFormat

    def __call__(self, stack: Stack) -> Iterator[Item]:
        target = stack.path.replace(".block_sparse_moe.", ".mlp.")
        for projection, shape in stack.projections.items():
            yield from self._stored(f"{target}.{projection}", shape)

    def _stored(self, name: str, shape: tuple[int, int, int]) -> Iterator[Item]:
        element, scaling = self.format.element, self.format.scaling
        assert scaling is not None
        e, n, k = shape
        check_shape(self.format, n, k, f"make_checkpoint {name}")
        grid = (e, *scaling.blocks(n, k))
        size = 1 / math.sqrt(k) / RMS[element]
        yield item(f"{name}_data", (e, n, k // self.format.per_item), Fill(element), self.format.storage)
        dtype = scaling.dtypes[0]
        near = Fill("exponents" if dtype == U8 else "near", 1.0 if scaling.global_scales else size)
        yield item(f"{name}_scales", grid, near, dtype)
        if scaling.zeros:
            yield item(f"{name}_zeros", grid, Fill("zero_points"), U8)
        if scaling.global_scales:
            yield item(f"{name}_global_scales", (e,), Fill("near", size), F32)
