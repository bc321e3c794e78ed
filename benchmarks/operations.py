"""Timing one operation: its implementations against each other and against what torch offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from moestro.bench.timing import alternate, ratio, wall_clock
from moestro.errors import invalid_input
from moestro.tolerances import disagreement

Call = Callable[[], object]


@dataclass(frozen=True)
class OpCase:
    """One shape of an operation.

    Attributes:
        label: the shape in words ("T=512 E=64 k=8").
        calls: variant -> one call per input, as many for each; the first variant is what the others are compared with.
        outputs: variant -> its answer to the first input, in the form of `expected`.
        expected: what the reference answers.
    """

    label: str
    calls: Mapping[str, Sequence[Call]]
    outputs: Mapping[str, Callable[[], Sequence[Tensor]]]
    expected: Sequence[Tensor]


@dataclass(frozen=True)
class OpBenchmark:
    """How an operation is timed.

    Attributes:
        op: its name, the folder under ops/.
        shapes: what is timed by default.
        make: makes the case of a shape.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    make: Callable[..., OpCase]


@dataclass(frozen=True)
class OpRow:
    """One variant on one shape; `ratio` is its time over the first variant's, `status` "ok" or "wrong output"."""

    op: str
    case: str
    variant: str
    status: str
    samples: int = 0
    microseconds: float | None = None
    ratio: float | None = None


def run_op(benchmark: OpBenchmark, seconds: float) -> list[OpRow]:
    """Check and time every variant of every case.

    Raises:
        InvalidInputError: seconds that are not positive.
    """
    if not seconds > 0:
        raise invalid_input("bench op", got=f"seconds={seconds}", needs="more than 0", fix="Try 0.5.")
    rows: list[OpRow] = []
    with torch.inference_mode():
        for shape in benchmark.shapes:
            rows += _run_case(benchmark.op, benchmark.make(*shape), seconds)
    return rows


def _run_case(op: str, case: OpCase, seconds: float) -> list[OpRow]:
    wrong = {name for name in case.calls if not _agrees(case.outputs[name](), case.expected)}
    times = alternate({name: calls for name, calls in case.calls.items() if name not in wrong}, seconds, wall_clock())
    baseline = next(iter(case.calls))
    rows = []
    for name in case.calls:
        if name in wrong:
            rows.append(OpRow(op, case.label, name, "wrong output"))
            continue
        against = None if name == baseline or baseline in wrong else ratio(times[name], times[baseline]).median
        rows.append(OpRow(op, case.label, name, "ok", len(times[name]), median(times[name]) * 1e6, against))
    return rows


def _agrees(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Integers exactly, floating-point numbers within the one table of tolerances."""
    return len(actual) == len(expected) and all(
        disagreement(a, e, a.dtype) is None if a.is_floating_point() else torch.equal(a, e)
        for a, e in zip(actual, expected, strict=True)
    )


def markdown(rows: list[OpRow]) -> str:
    """A table of the rows."""
    lines = ["| op | case | variant | us | time / first variant's |", "|---|---|---|---:|---:|"]
    for row in rows:
        time = row.status if row.microseconds is None else f"{row.microseconds:,.1f}"
        against = "-" if row.ratio is None else f"{row.ratio:.2f}x"
        lines.append(f"| {row.op} | {row.case} | {row.variant} | {time} | {against} |")
    return "\n".join(lines) + "\n"
