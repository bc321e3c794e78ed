"""Random numbers at the speed of a disk: windows into pools drawn once.

A pool holds one kind of numbers, `PERIOD` of them and the same again, so that every run of up to `PERIOD` numbers is a
view. A tensor is the pool read round and round from a place that follows from the seed and the tensor's name alone: it
has the same bytes whichever file it lands in. `PERIOD` is prime, so no two of a matrix's first `PERIOD` rows are equal.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moestro.checkpoint import TensorSpec
from published.tensors import RMS, Fill

PERIOD = 524_287
Draw = Callable[[torch.Generator, float], Tensor]


def _normal(generator: torch.Generator, size: float) -> Tensor:
    return torch.randn(PERIOD, generator=generator) * size


def _near(generator: torch.Generator, size: float) -> Tensor:
    return (torch.rand(PERIOD, generator=generator) * 0.5 + 0.75) * size


def _exponents(generator: torch.Generator, size: float) -> Tensor:
    return torch.randint(-1, 2, (PERIOD,), generator=generator) + 127 + round(math.log2(size))


def _codes(generator: torch.Generator, _: float) -> Tensor:
    return torch.randint(0, 256, (PERIOD,), generator=generator)


def _e4m3(generator: torch.Generator, _: float) -> Tensor:
    return _normal(generator, RMS["e4m3"]).clamp_(-448, 448)


def _int8(generator: torch.Generator, _: float) -> Tensor:
    return _normal(generator, RMS["int8"]).round_().clamp_(-127, 127)


DRAWS: dict[str, Draw] = {
    "ones": lambda _generator, _size: torch.ones(PERIOD),
    "normal": _normal,
    "near": _near,
    "exponents": _exponents,
    "zero_points": lambda generator, _: torch.randint(7, 10, (PERIOD,), generator=generator),
    "e2m1": _codes,
    "int4": _codes,
    "uint4": _codes,
    "e4m3": _e4m3,
    "int8": _int8,
}


class Filler:
    """Draws every tensor of a checkpoint, in pieces along the first dimension.

    Args:
        fills: by a tensor's name, how its numbers are drawn.
        seed: of everything random.
        on_bytes: called with the size of each piece once the next one is asked for.
    """

    def __init__(self, fills: dict[str, Fill], seed: int, on_bytes: Callable[[int], object] = lambda _: None) -> None:
        self.fills = fills
        self.seed = seed
        self.on_bytes = on_bytes
        self._pools: dict[tuple[Fill, torch.dtype], Tensor] = {}

    def __call__(self, spec: TensorSpec) -> Iterator[Tensor]:
        """The pieces of one tensor; each is valid until the next is asked for, and must not be written to."""
        pool = self._pool(self.fills[spec.name], spec.dtype)
        place = random.Random(f"{self.seed}/{spec.name}").randrange(PERIOD)
        row = math.prod(spec.shape[1:])
        height = max(1, PERIOD // row)
        for start in range(0, spec.shape[0], height):
            rows = min(height, spec.shape[0] - start)
            yield _run(pool, place, rows * row).view(rows, *spec.shape[1:])
            place = (place + rows * row) % PERIOD
            self.on_bytes(rows * row * spec.dtype.itemsize)

    def _pool(self, fill: Fill, dtype: torch.dtype) -> Tensor:
        key = (fill, dtype)
        if key not in self._pools:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{fill}/{dtype}".encode()))
            numbers = DRAWS[fill.kind](generator, fill.size).to(dtype)
            self._pools[key] = torch.cat([numbers, numbers])
        return self._pools[key]


def _run(pool: Tensor, place: int, count: int) -> Tensor:
    """`count` numbers from a place on: a view where one round suffices."""
    if count <= PERIOD:
        return pool[place : place + count]
    rounds, rest = divmod(count, PERIOD)
    return torch.cat([pool[place : place + PERIOD]] * rounds + [pool[place : place + rest]])
