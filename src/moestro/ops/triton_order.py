"""Rows whose columns lie in memory as Hopper's matrix instruction meets decoded weights, so that no step moves them.

A thread of that instruction holds columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of 16, for q of 0 to 3. What a thread reads
of packed weights at once are neighbours. So column c of a `unit`, of which thread q reads the quarter q, goes to

- of nibbles, c = unit / 4 * q + 8 s + 4 h + j (h of 0 and 1, j of 0 to 3): place 32 s + 8 j + 2 q + h;
- of bytes, c = unit / 4 * q + 2 s + h: place 8 s + 2 q + h.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from moestro.errors import invalid_input
from moestro.formats import StoredExperts
from moestro.ops.gpu import Launch
from moestro.types import InputFormat

_BYTES = 64
"""Columns of a unit of bytes: 16 of each of four threads."""
_COLUMNS = 1024
"""Of a row, that a program puts into order: whole units, of which none is longer."""


class Order(NamedTuple):
    """The order of the columns of rows for one product's weights and steps.

    Attributes:
        step: columns of a step. Zeros fill up rows to whole ones.
        unit: columns that change places among themselves.
        nibbles: whether weights are nibbles, else bytes.
    """

    step: Any
    unit: Any
    nibbles: Any

    def whole(self, columns: int) -> int:
        """Columns of a row in memory."""
        step = int(self.step.value)
        return -(-columns // step) * step


def order_of(stored: StoredExperts, step: int, input_format: InputFormat = "float") -> Order:
    """The order of rows that meet such weights in steps of so many columns, a power of two.

    Raises:
        InvalidInputError: if the weights are not decoded, rows are rounded, or a step is shorter than 64 columns.
    """
    if stored.format.is_dense or input_format != "float" or step < _BYTES:
        raise invalid_input(
            "expert_mlp",
            got=f"rows in order for {stored.format.name}, {input_format} inputs and steps of {step} columns",
            needs=f"packed weights, float inputs and steps of {_BYTES} columns or more",
            fix="Leave arranged out of the plan.",
        )
    nibbles = stored.format.per_item == 2
    return Order(tl.constexpr(step), tl.constexpr(step if nibbles else _BYTES), tl.constexpr(nibbles))


class Arranging:
    """How rows of `columns` are put into an order, as rows of `size`, by `launch` with `parts` programs for each."""

    def __init__(self, order: Order, columns: int) -> None:
        self.order, self.size = order, order.whole(columns)
        self.parts = -(-self.size // _COLUMNS)
        self.launch = Launch(arrange_rows_kernel, {"COLUMNS": _COLUMNS}, {"num_warps": 4})


@triton.jit
def arrange_rows_kernel(x, x_stride, out, K, whole, parts, order, COLUMNS: tl.constexpr):
    """x [R, K] -> out [R, whole], columns in their places, 0 beyond K."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    first = tl.program_id(0) % parts * COLUMNS
    turn = tl.arange(0, COLUMNS)
    inside = turn % order.unit
    quarter, half = inside // 2 % 4, inside % 2
    if order.nibbles:
        column = inside // 32 * 8 + half * 4 + inside // 8 % 4
    else:
        column = inside // 8 * 2 + half
    columns = first + turn - inside + quarter * (order.unit // 4) + column
    x = tl.load(x + row * x_stride + columns, mask=columns < K, other=0)
    tl.store(out + row * whole + first + turn, x.to(out.dtype.element_ty), mask=first + turn < whole)


@triton.jit
def in_order(tile, order):
    """[n, W] of columns from a multiple of W on, a power of two from 16 -> the same, ordered as `column_offsets`."""
    n: tl.constexpr = tile.shape[0]
    W: tl.constexpr = tile.shape[1]
    UNITS: tl.constexpr = max(W // order.unit, 1)
    QUARTERS: tl.constexpr = min(max(4 * W // order.unit, 1), 4)
    if order.nibbles:
        tile = tl.reshape(tile, (n, UNITS, QUARTERS, W // (8 * UNITS * QUARTERS), 2, 4))
        return tl.reshape(tl.permute(tile, (0, 1, 3, 5, 2, 4)), (n, W))
    else:
        tile = tl.reshape(tile, (n, UNITS, QUARTERS, W // (2 * UNITS * QUARTERS), 2))
        return tl.reshape(tl.permute(tile, (0, 1, 3, 2, 4)), (n, W))


@triton.jit
def column_offsets(first, W: tl.constexpr, order):
    """Where in a row columns `first`, a multiple of W, to first + W - 1 stand, in the order of `in_order`: [W]."""
    UNITS: tl.constexpr = max(W // order.unit, 1)
    QUARTERS: tl.constexpr = min(max(4 * W // order.unit, 1), 4)
    RUN: tl.constexpr = 2 * QUARTERS
    SIZE: tl.constexpr = W // UNITS  # of a unit, or of the part of one
    turn = tl.arange(0, W)
    inside = first % order.unit if order.unit > W else 0
    quarter, rest = inside // (order.unit // 4), inside % (order.unit // 4)
    begin = first - inside + rest * 4 + quarter * 2
    place = begin + turn // SIZE * order.unit + turn % SIZE // RUN * 8 + turn % RUN
    return tl.max_contiguous(tl.multiple_of(place, RUN), RUN)
