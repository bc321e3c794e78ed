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
"""More rows than there are: what the engine outruns where it does so with the most that are tried."""

SIZE = 2048
"""Rows and columns of the matrix that is multiplied."""

Multiply = Callable[[Tensor, Tensor], object]


@functools.cache
def most_rows(isa: str, dtype: torch.dtype, num_threads: int, engine: Multiply) -> int:
    """The most of `STEPS` for which the engine was as fast as PyTorch's matmul; 0 if it never was, `ALL` of the last.

    Args:
        isa: the instruction set's name.
        dtype: of rows and matrix.
        num_threads: of both.
        engine: multiplies rows [T, K] by a matrix [N, K] with this instruction set.
    """
    name = f"cpu-{isa}: {str(dtype).removeprefix('torch.')} linear modules, {num_threads} threads, most rows"
    known = ([0], *([rows] for rows in STEPS[:-1]), [ALL])
    return int(measured.kept(name, lambda: [_search(dtype, engine)], known.__contains__)[0])


def _search(dtype: torch.dtype, engine: Multiply) -> int:
    matrix = torch.full((SIZE, SIZE), 0.01, dtype=dtype, device="cpu")
    low, high = -1, len(STEPS)  # the engine is ahead at low, and behind at high
    while high - low > 1:
        at = (low + high) // 2
        rows = torch.full((STEPS[at], SIZE), 0.01, dtype=dtype, device="cpu")
        ahead = _is_ahead(functools.partial(engine, rows, matrix), functools.partial(F.linear, rows, matrix))
        low, high = (at, high) if ahead else (low, at)
    return (0, *STEPS[:-1], ALL)[low + 1]


def _is_ahead(one: Callable[[], object], other: Callable[[], object]) -> bool:
    mine, others = measured.fastest((one, other), 0.0)
    return mine <= others
