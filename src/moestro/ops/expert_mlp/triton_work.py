"""The launches of one call: on tensors, or on addresses where all of it has been compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moestro.formats import PackedTensor, StoredExperts
from moestro.ops import gpu
from moestro.ops.dispatch import KernelUse
from moestro.ops.expert_mlp.triton_kernels import Rows
from moestro.ops.expert_mlp.triton_maps import items
from moestro.ops.gpu import Launch
from moestro.ops.grouping import triton as grouping
from moestro.ops.triton_order import Arranging
from moestro.ops.triton_rows import Rounding
from moestro.weights import ExpertWeights

_SPACING = 256
"""Bytes of which the offsets of workspaces in one allocation are multiples."""


@dataclass(frozen=True, eq=False)
class Work:
    """What a call's launches are given beside its tensors and its workspaces.

    Attributes:
        tokens: T, K, E.
        sizes: T * K, H, I.
        x_stride: from row to row of x.
        block: rows of a block; 0 where pairs are not ordered.
        launches: gate_up, down and the sum over slots, then those that order rows and round them before each product;
            None for the one that orders them where it takes two, or is not done. The last one arranges x, where it is.
        programs: of the first three.
        gate_up, down: the arguments of these two that describe weights.
        arranging: how the columns of x are put into the order in which gate_up meets them; None as they come.
        roundings: how the rows that meet gate_up and down are inputs; empty where they are floats.
        spaces: numbers and dtype of each workspace: what stands between the products, the pieces of the sums, the
            tensors of `grouping.triton.sizes` where rows are ordered, codes and scales where they are inputs, x
            where it is arranged.
    """

    tokens: tuple[int, int, int]
    sizes: tuple[int, int, int]
    x_stride: int
    block: int
    launches: tuple[Any, ...]
    programs: tuple[int, ...]
    gate_up: tuple[Any, ...]
    down: tuple[Any, ...]
    roundings: tuple[Rounding, ...]
    arranging: Arranging | None
    spaces: tuple[tuple[int, torch.dtype], ...]

    def __call__(self, given: tuple[Any, Any, Any], slots: Any, out: Any, spaces: Sequence[Any]) -> None:
        """Launch everything: `given` x, ids and routing weights, to write out [T, H], with memory for `spaces`.

        What names no expert among the ids `slots` [T, K] is left out of the sums.
        """
        (num_tokens, _, num_experts), hidden = self.tokens, self.sizes[1]
        self.rows(given, spaces)
        parts = self.programs[2] // num_tokens
        self.launches[2](self.programs[2], spaces[1], slots, out, num_tokens, hidden, parts, num_experts)

    def rows(self, given: tuple[Any, Any, Any], spaces: Sequence[Any]) -> None:
        """Launch all but the sums: the second of `spaces` has the pieces of each pair that names an expert."""
        x, ids, weights = given
        (_, top_k, num_experts), inner = self.tokens, self.sizes[2]
        gate_up, down, *_ = self.launches
        h, pieces, *more = spaces
        rows = self._ordered(ids, weights, more) if self.block else Rows(ids, weights, top_k, num_experts)
        left, stride, scales, right, right_scales = x, self.x_stride, None, h, None
        if self.arranging is not None:
            self._arrange(x, stride, more[-1])
            left, stride = more[-1], self.arranging.size
        if self.roundings:
            left, scales, right, right_scales = more[-4:]
            self._round(0, x, stride, (left, scales))
            stride = self.roundings[0].size
        if inner:
            gate_up(self.programs[0], left, stride, rows, *self.gate_up, h, *self.sizes, scales)
        if self.roundings:
            self._round(1, h, inner, (right, right_scales))
        down(self.programs[1], right, rows, *self.down, pieces, *self.sizes, right_scales)

    def _ordered(self, ids: Any, weights: Any, more: Sequence[Any]) -> Rows:
        (_, top_k, num_experts), sort = self.tokens, self.launches[3]
        placed, bound = more[:5], self.spaces[4][0]
        if sort is None:
            grouping.in_chunks(ids, placed, num_experts, (self.block, bound))
        else:
            sort(num_experts, ids, *placed, self.sizes[0], num_experts, bound)
        return Rows(ids, weights, top_k, num_experts, *placed)

    def _arrange(self, x: Any, stride: int, to: Any) -> None:
        """Launch what writes x with its columns in order."""
        of, columns = self.arranging, self.sizes[1]
        assert of is not None
        self.launches[-1](self.tokens[0] * of.parts, x, stride, to, columns, of.size, of.parts, of.order)

    def _round(self, which: int, rows: Any, stride: int, to: tuple[Any, Any]) -> None:
        """Launch what rounds the rows that meet a product to codes and scales."""
        of, launch = self.roundings[which], self.launches[4 + which]
        count = (self.tokens[0], self.sizes[0])[which] * of.parts
        launch(count, rows, stride, *to, of.size, of.count, of.parts)

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        """The result [T, H] for tensors that lie as those that this was made for."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        spaces = [torch.empty(size, dtype=dtype, device=x.device) for size, dtype in self.spaces]
        self((x, ids, weights), slots, out, spaces)
        return out

    def uses(self) -> tuple[KernelUse, ...]:
        """The launches, in order, with their programs and the rows that they meet."""
        (num_tokens, _, num_experts), (num_pairs, _, inner) = self.tokens, self.sizes
        uses = [KernelUse("order rows", "rows_kernel", num_experts, num_pairs)] if self.launches[3] is not None else []
        if self.block and self.launches[3] is None:
            uses += [KernelUse("order rows", "count_kernel, place_kernel", 2, num_pairs)]
        inputs = [
            KernelUse("round inputs", "round_rows_kernel", rows * rounding.parts, rows)
            for rows, rounding in zip((num_tokens, num_pairs), self.roundings, strict=False)
        ]
        first, last, add = self.programs
        if (of := self.arranging) is not None:
            uses.append(KernelUse("order columns", "arrange_rows_kernel", num_tokens * of.parts, num_tokens))
        uses += inputs[:1]
        uses += [KernelUse("gate_up", "gate_up_kernel", first, num_pairs)] if inner else []
        uses += inputs[1:]
        return (
            *uses,
            KernelUse("down", "down_kernel", last, num_pairs),
            KernelUse("sum over slots", "sum_slots_kernel", add, num_tokens),
        )

    def by_address(self, x: Tensor) -> Callable[..., Tensor] | None:
        """`compute` of addresses, in one allocation; None unless all has been compiled for the device of x.

        Triton's own launch looks at every tensor anew; what it would find is the same for every call of one call key.
        It keeps no tensor of the weights.
        """
        if gpu.interpreted() or (self.block and self.launches[3] is None):
            return None
        compiled = [launch.on(x.device) if isinstance(launch, Launch) else None for launch in self.launches]
        if any(launch is not None and done is None for launch, done in zip(self.launches, compiled, strict=True)):
            return None
        work = replace(self, launches=tuple(compiled), gate_up=_addresses(self.gate_up), down=_addresses(self.down))
        maps = tuple(_map_fields(arguments[1]) for arguments in (self.gate_up, self.down))
        tables = self.gate_up[0].table, self.down[0].table
        *starts, size = [0, *_ends(self.spaces)]
        shape, strides, dtype, device = x.shape, (x.shape[1], 1), x.dtype, x.device

        def call(held_tables: Any, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
            out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            held = torch.empty_strided((size,), (1,), dtype=torch.uint8, device=device)
            first, slots = held.data_ptr(), ids.data_ptr()
            launches = work if maps == (None, None) else _with_maps(work, maps, (experts.gate_up, experts.down))
            launches((x.data_ptr(), slots, weights.data_ptr()), slots, out.data_ptr(), [first + s for s in starts])
            return out

        return partial(call, tables)  # which the addresses in `work` do not keep


def _ends(spaces: Sequence[tuple[int, torch.dtype]]) -> list[int]:
    return list(accumulate(-(-size * dtype.itemsize // _SPACING) * _SPACING for size, dtype in spaces))


def _map_fields(map: TensorDescriptor | None) -> tuple[Any, ...] | None:
    return None if map is None else (map.shape, map.strides, map.block_shape)


def _with_maps(work: Work, maps: Sequence[Any], stored: Sequence[StoredExperts]) -> Work:
    """The work with tensor maps over these experts; a map kept from call to call would keep the weights alive."""
    found = []
    for (first, _, *rest), fields, experts in zip((work.gate_up, work.down), maps, stored, strict=True):
        map = None if fields is None else TensorDescriptor(items(cast(PackedTensor, experts)), *fields)
        found.append((first, map, *rest))
    return replace(work, gate_up=found[0], down=found[1])


def _addresses(arguments: Any) -> Any:
    """The same with the address of each tensor in its place, and no tensor map, which holds a tensor."""
    if isinstance(arguments, Tensor):
        return arguments.data_ptr()
    if isinstance(arguments, TensorDescriptor):
        return None
    if isinstance(arguments, tuple):
        made = map(_addresses, arguments)
        return type(arguments)(*made) if hasattr(arguments, "_fields") else tuple(made)
    return arguments
