"""Up to how many rows the engine outruns PyTorch's matmul: timed once on a machine."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.ops import measured

STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of rows that are tried."""

ALL = 1 << 40
"""More rows than there are: where the engine takes at most `FAR` of PyTorch's time with the most that are tried."""

FAR = 0.5

SIZE = 2048
"""Rows and columns of the matrix that is multiplied."""

Multiply = Callable[[Tensor, Tensor], object]
Call = Callable[[], object]


@functools.cache
def most_rows(isa: str, dtype: torch.dtype, num_threads: int, engine: Multiply) -> int | None:
    """The most of `STEPS` for which the engine was as fast as PyTorch's matmul; 0 if it never was, or `ALL`.

    None where threads waited for cores meanwhile, so that nobody knows.

    Args:
        isa: the instruction set's name.
        dtype: of rows and matrix.
        num_threads: of both.
        engine: multiplies rows [T, K] by a matrix [N, K] with this instruction set.
    """
    name = f"cpu-{isa}: {str(dtype).removeprefix('torch.')} linear modules, {num_threads} threads, most rows"
    known = ([0], *([rows] for rows in (*STEPS, ALL)))
    (most,), calm = measured.kept(name, lambda: [_search(dtype, engine)], known.__contains__)
    return int(most) if calm else None


def _search(dtype: torch.dtype, engine: Multiply) -> int:
    """It ends where a measurement gives up, since what it finds is not kept then."""
    low, high = -1, len(STEPS)  # the engine is ahead at low, and behind at high
    before = measured.times_given_up()
    while high - low > 1 and measured.times_given_up() == before:
        at = (low + high) // 2
        ahead = _is_ahead(*_both(STEPS[at], dtype, engine))
        low, high = (at, high) if ahead else (low, at)
    calm = measured.times_given_up() == before
    if calm and low == len(STEPS) - 1 and _is_ahead(*_both(STEPS[-1], dtype, engine), share=FAR):
        return ALL
    return STEPS[low] if low >= 0 else 0


def _both(num_rows: int, dtype: torch.dtype, engine: Multiply) -> tuple[Call, Call]:
    """The engine's product of so many rows, and PyTorch's."""
    matrix, rows = (torch.full((n, SIZE), 0.01, dtype=dtype, device="cpu") for n in (SIZE, num_rows))
    return functools.partial(engine, rows, matrix), functools.partial(F.linear, rows, matrix)


def _is_ahead(one: Call, other: Call, share: float = 1.0) -> bool:
    mine, others = measured.fastest((one, other), 0.0)
    return mine <= share * others
