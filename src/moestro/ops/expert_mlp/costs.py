"""What each way to multiply experts costs on this machine, measured on a sample whose weights a cache holds, and the
time of a call that follows from it.

The sample is one expert with the columns of the layer's and few rows, so it takes milliseconds whatever the layer. A
call is predicted to take the time of its products or that of reading its weights, whichever is longer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moestro import machine
from moestro.formats import PackedTensor, WeightFormat, find_format
from moestro.ops import measured
from moestro.types import InputFormat, Routing
from moestro.weights import ExpertWeights

ROWS = (1, 2, 3, 6, 12, 20, 60, 84)
"""Rows of a sample's expert: few, then such as fill the last tile, of 16 tokens or of 8, to one half on average, as
those of a batch do; of more rows than a block has, each block would read the weights again."""

PLAIN_ROWS = (1, 24, 200)
"""Those for plain torch, whose time is all but linear between them."""

PLAIN = "torch"

NEVER = 1 << 40
"""As wide_rows: more rows than there are."""

WEIGHTS = 1 << 19
"""Of a sample, for each thread."""

NOISE = 0.05
"""As a logarithm, what all numbers of rows together may take longer with wide kernels from fewer rows on: below some
both are the same kernel, as of float32 without eight-row dots, and either may seem faster."""

SECONDS = 0.0015
"""That the calls of a sample with one number of rows take, unless three take longer."""

BLOCK = 512
"""Columns that kernels of integers take at once: fewer cost as much."""

LEAST_COLUMNS, MOST_COLUMNS = 256, 8192
COMMON_COLUMNS = 2048
"""Of a sample that stands for no layer, as `moestro info --measure` takes it."""

LEAST_PROBE, MOST_PROBE = 64 << 20, 256 << 20
"""Bytes of the buffer that is read: twice the largest cache within these."""

Bind = Callable[[Tensor, Routing, ExpertWeights, int], Callable[[], object]]
"""Of a sample and wide_rows, what computes it one way."""


@dataclass(frozen=True)
class Costs:
    """Of one way to multiply experts of one format and so many columns.

    Attributes:
        rows: that were tried.
        call: seconds that every expert of a call takes beside its products.
        narrow, wide: seconds for a weight with each number of rows, without wide kernels and with them; the same for a
            way that has none.
        calm: whether threads had their cores while this was measured; else it may be far off.
    """

    rows: tuple[int, ...]
    call: float
    narrow: tuple[float, ...]
    wide: tuple[float, ...]
    calm: bool = True

    @functools.cached_property
    def wide_rows(self) -> int:
        """Rows from which on wide kernels are taken: where all numbers of rows together take least."""

        def total(first: int) -> float:
            pairs = zip(self.rows, self.narrow, self.wide, strict=True)
            return sum(math.log(wide if rows >= first else narrow) for rows, narrow, wide in pairs)

        best = min((NEVER, *reversed(self.rows)), key=total)
        return best if best == NEVER else next(rows for rows in self.rows if total(rows) <= total(best) + NOISE)

    def at(self, rows: float) -> float:
        """Seconds for a weight that meets so many rows."""
        found = self.wide if rows >= self.wide_rows else self.narrow
        points = list(zip(self.rows, found, strict=True))
        for (few, low), (many, high) in pairwise(points):
            if rows <= many:
                return low + (high - low) * max(rows - few, 0) / (many - few)
        return found[-1] * rows / self.rows[-1]


@dataclass(frozen=True)
class Work:
    """What a call computes, with ids that are spread evenly.

    Attributes:
        experts: that have rows.
        rows: of each.
        first, second: weights of gate_up and of down, of each.
        nbytes: that are read.
        cached: whether the layer fits into the last cache.
    """

    experts: float
    rows: float
    first: int
    second: int
    nbytes: float
    cached: bool

    @classmethod
    def of(cls, routing: Routing, weights: ExpertWeights) -> Work:
        pairs, all_experts = routing.expert_ids.numel(), max(weights.planned_experts, 1)
        per_token = min(routing.top_k, all_experts) / all_experts
        experts = all_experts * (1 - (1 - per_token) ** routing.num_tokens)
        _, n, h = weights.gate_up.shape
        size = weights.bytes_per_expert
        return cls(
            experts=experts,
            rows=pairs / experts if experts else 0.0,
            first=n * h,
            second=h * weights.intermediate_size,
            nbytes=experts * size,
            cached=all_experts * size <= max(machine.cache_bytes().values(), default=0),
        )

    def seconds(self, first: Costs, second: Costs, bytes_per_second: float) -> float:
        """Predicted, with the costs at the columns of gate_up and at those of down."""
        return self.experts * first.call + max(self.products(first, second), self.reading(bytes_per_second))

    def products(self, first: Costs, second: Costs) -> float:
        """Seconds of multiplying weights that a cache holds."""
        return self.experts * (self.first * first.at(self.rows) + self.second * second.at(self.rows))

    def reading(self, bytes_per_second: float) -> float:
        """Seconds that memory needs for the weights."""
        return 0.0 if self.cached else self.nbytes / bytes_per_second


def columns_of(size: int) -> int:
    """Columns that a sample has in place of `size`: the next power of two."""
    return min(max(1 << (size - 1).bit_length(), LEAST_COLUMNS), MOST_COLUMNS)


@dataclass(frozen=True)
class Sample:
    """What is timed in place of a layer.

    Attributes:
        dtype: of the tokens.
        form: the weights' format, by name.
        inputs: what the products take of the tokens.
        columns: of the weights; see `columns_of`.
        threads: PyTorch's.
    """

    dtype: torch.dtype
    form: str
    inputs: InputFormat
    columns: int
    threads: int

    def __str__(self) -> str:
        given = str(self.dtype).removeprefix("torch.") + ("" if self.inputs == "float" else f" as {self.inputs}")
        return f"{given} by {self.form}, {self.columns} columns, {self.threads} threads"


@functools.cache
def costs(way: str, bind: Bind, case: Sample) -> Costs:
    """Those of one way, an instruction set by its name or plain torch, measured where they are not known."""
    rows, choices = (PLAIN_ROWS, (0,)) if way == PLAIN else (ROWS, (NEVER, 1))

    def measure() -> list[float]:
        stored = find_format(case.form)
        weights, tiny = sample(stored, case.columns, case.inputs), sample(stored, 256, case.inputs, 1)
        (call,) = _timed(bind, case.dtype, tiny, 1, choices[:1])
        size = sum(math.prod(each.shape) for each in (weights.gate_up, weights.down))
        times = [_timed(bind, case.dtype, weights, n, choices) for n in rows]
        return [call, *(t / size for each in zip(*times, strict=True) for t in _rising(each, call))]

    count = 1 + len(rows) * len(choices)
    (call, *found), calm = measured.kept(
        f"{way}, to {rows[-1]} rows: {case}", measure, lambda numbers: len(numbers) == count and min(numbers) > 0
    )
    return Costs(rows, call, tuple(found[: len(rows)]), tuple(found[-len(rows) :]), calm)


def _rising(times: Sequence[float], call: float) -> list[float]:
    """Without what a call takes; more rows cannot take less, so what does shows a disturbed measurement."""
    return [max(min(times[i:]) - call, min(times[i:]) / 2) for i in range(len(times))]


def read_rate() -> float:
    """Bytes per second that all threads read of memory."""
    return _read_rate(torch.get_num_threads())[0]


def read_is_calm() -> bool:
    """Whether threads had their cores while that was measured."""
    return _read_rate(torch.get_num_threads())[1]


@functools.cache
def _read_rate(threads: int) -> tuple[float, bool]:
    def measure() -> list[float]:
        cache = max(machine.cache_bytes().values(), default=0)
        memory = torch.ones(min(max(2 * cache, LEAST_PROBE), MOST_PROBE) // 4, device="cpu")
        (seconds,) = measured.fastest((memory.sum,), 4 * SECONDS)
        return [memory.nbytes / seconds]

    found, calm = measured.kept(f"{threads} threads read", measure, lambda found: len(found) == 1 and found[0] > 0)
    return found[0], calm


def sample(form: WeightFormat, columns: int, inputs: InputFormat, size: int = 0) -> ExpertWeights:
    """One expert of so many columns, and as wide as makes `WEIGHTS` a thread; its numbers mean nothing."""
    wanted = size or WEIGHTS * torch.get_num_threads() // (3 * columns)
    inner = max(wanted // BLOCK * BLOCK, BLOCK)
    gate_up, down = _filled(form, (1, 2 * inner, columns)), _filled(form, (1, columns, inner))
    return ExpertWeights(gate_up, down, input_format=inputs)


_CODES = {"zeros": {torch.uint8: 1}, "scales": {torch.uint8: 120, torch.float8_e8m0fnu: 120}}
"""Bytes that stand for numbers of usual size, where 0x22 does not: it does as every kind of weight and as e4m3."""


def _filled(form: WeightFormat, shape: Sequence[int]) -> PackedTensor:
    tensors = {}
    for name, (dtypes, size) in form.parts(shape).items():
        dtype = dtypes[0]
        if dtype.is_floating_point and dtype.itemsize > 1:
            tensors[name] = torch.full(size, 0.01, dtype=dtype, device="cpu")
        else:
            code = _CODES.get(name, {}).get(dtype, 0x22)
            tensors[name] = torch.full(size, code, dtype=torch.uint8, device="cpu").view(dtype)
    return PackedTensor(tensors.pop("data"), form, **tensors)


def _timed(bind: Bind, dtype: torch.dtype, weights: ExpertWeights, rows: int, choices: Sequence[int]) -> list[float]:
    x = torch.linspace(-1, 1, weights.hidden_size, device="cpu").to(dtype).repeat(rows, 1)
    ids = torch.zeros(rows, 1, dtype=torch.int64, device="cpu")
    routing = Routing(ids, torch.ones(rows, 1, device="cpu"))
    return measured.fastest([bind(x, routing, weights, wide) for wide in choices], SECONDS)
