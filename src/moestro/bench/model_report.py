"""Whole models case by case: measured under this machine's bandwidth, as plain values and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import torch

from moestro import machine
from moestro.bench.failures import sentence
from moestro.bench.layers import dtype_name
from moestro.bench.measure import Say, about
from moestro.bench.model import ModelCase, ModelPoint, measure
from moestro.bench.report import machine_line
from moestro.bench.schema import OK, document, roof_of
from moestro.errors import MoestroError
from moestro.machine import Roof

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 80
STORED, MAPPED = "stored", "none"
"""Formats and budgets that are not given: experts as their checkpoint stores them, and no budget."""
SKIPPED = "skipped"
PROCESSES = "processes"
ALONE = f"{PROCESSES} 1"
"""What is not said of all cases."""


@dataclass(frozen=True)
class ModelRow:
    """A case, and what was found; a point that is None has the reason why."""

    case: ModelCase
    point: ModelPoint | None
    reason: str | None = None

    def as_record(self, bytes_per_second: float) -> dict[str, Any]:
        """For a document: the case and the point side by side."""
        point = self.point
        shown = vars(self.case) | {"status": OK if point else SKIPPED, "reason": self.reason}
        if point is None:
            return shown
        return {
            **shown,
            **{name: value for name, value in vars(point).items() if name != "case"},
            "prompt_tokens_per_second": point.prompt_tokens_per_second,
            "decode_tokens_per_second": point.decode_tokens_per_second,
            "roof_tokens_per_second": roof_of_step(point, bytes_per_second),
            "roof_share": point.decode_tokens_per_second / roof_of_step(point, bytes_per_second),
        }


def roof_of_step(point: ModelPoint, bytes_per_second: float) -> float:
    """Tokens a second of all sequences, if a step took no longer than reading its weights."""
    return point.case.batch * bytes_per_second / max(point.step_bytes, 1)


@dataclass
class ModelReport:
    """Everything one run found."""

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    folder: str
    roofs: dict[str, Roof]
    rows: list[ModelRow] = field(default_factory=list)

    @property
    def bytes_per_second(self) -> float:
        """The measured rate of reading memory."""
        return max(roof.bytes_per_second for roof in self.roofs.values())

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps, in the form of every benchmark."""
        names = ("format", "memory", "batch", "prompt_tokens", "new_tokens", "projections", "processes")
        settings = {name: list(dict.fromkeys(getattr(row.case, name) for row in self.rows)) for name in names}
        records = [row.as_record(self.bytes_per_second) for row in self.rows]
        return document(self, {"folder": self.folder, **settings}, records, roof_of(self.roofs))


def run(
    cases: Sequence[ModelCase], on_case: Say = lambda text: None, measure: Callable[[ModelCase], ModelPoint] = measure
) -> ModelReport:
    """Measure the roof, then every case, each in a process of its own; `on_case` is told each before it begins.

    A case that is refused is a row with the reason; if all are, the last refusal is raised, a MoestroError.
    """
    roofs = {dtype_name(torch.bfloat16): machine.measure(torch.bfloat16)}
    report = ModelReport(**about("cpu"), folder=cases[0].folder, roofs=roofs)
    refusals: list[MoestroError] = []
    for case in cases:
        on_case(", ".join(f"{name} {options_of(case)[name]}" for name in differing(cases)))
        try:
            report.rows.append(ModelRow(case, measure(case)))
        except MoestroError as error:
            refusals.append(error)
            report.rows.append(ModelRow(case, None, sentence(error)))
    if len(refusals) == len(report.rows):
        refusal = refusals[-1]
        raise refusal
    return report


def options_of(case: ModelCase) -> dict[str, str]:
    """What a case is, by the name of each option, as it is written on the command line."""
    budget = MAPPED if case.memory is None else f"{case.memory / 1e9:g}GB"
    numbers = {"batch": case.batch, "prompt tokens": case.prompt_tokens, "new tokens": case.new_tokens}
    texts = {"format": case.format or STORED, "memory": budget, "projections": str(case.projections)}
    return texts | {name: str(number) for name, number in (numbers | {PROCESSES: case.processes}).items()}


def differing(cases: Sequence[ModelCase]) -> list[str]:
    """The names of what is not the same in all cases; of one case its batch."""
    found = [options_of(case) for case in cases]
    return [name for name in found[0] if len({each[name] for each in found}) > 1] or ["batch"]


def headline(report: ModelReport) -> list[str]:
    """The machine, its bandwidth, the model, and what all cases have in common, a line each."""
    cases = [row.case for row in report.rows]
    found = next(row.point for row in report.rows if row.point is not None)
    same = [f"{name} {text}" for name, text in options_of(cases[0]).items() if name not in differing(cases)]
    same = [each for each in same if each != ALONE]
    return [
        machine_line(report.machine),
        f"bandwidth: {report.bytes_per_second / 1e9:.1f} GB/s",
        f"model: {report.folder}; {found.dtype}, {found.threads} thread{'' if found.threads == 1 else 's'}",
        f"every case: {', '.join(same)}",
    ]


def table(report: ModelReport) -> Table:
    """A line for each case, at most 80 columns wide, for `rich.print`."""
    from rich import box
    from rich.table import Table

    names = differing([row.case for row in report.rows])
    found = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in names:
        found.add_column(name.replace(" ", "\n"), overflow="fold")
    for name in ("prompt\ntok/s", "decode\ntok/s", "roof\ntok/s", "of\nroof", "step\nMB", "peak\nMB"):
        found.add_column(name, justify="right", no_wrap=True)
    for row in report.rows:
        what = options_of(row.case)
        found.add_row(*(what[name] for name in names), *_cells(row.point, report.bytes_per_second))
    return found


def _cells(point: ModelPoint | None, bytes_per_second: float) -> list[str]:
    if point is None:
        return ["-"] * 6
    roof = roof_of_step(point, bytes_per_second)
    return [
        f"{point.prompt_tokens_per_second:,.1f}",
        f"{point.decode_tokens_per_second:,.1f}",
        f"{roof:,.1f}",
        f"{point.decode_tokens_per_second / roof:.0%}",
        f"{point.step_bytes / 1e6:,.1f}",
        f"{point.peak_bytes / 1e6:,.0f}",
    ]


def lines(report: ModelReport) -> list[str]:
    """Where the time of each case goes, and why others have no numbers; at most 80 columns wide."""
    names, found = differing([row.case for row in report.rows]), []
    for row in report.rows:
        what = ", ".join(f"{name} {options_of(row.case)[name]}" for name in names)
        if row.point is None:
            found.append(f"{what}: {row.reason}")
            continue
        for phase, stages in row.point.stages.items():
            total = sum(stages.values()) or 1.0
            parts = sorted(((seconds / total, stage) for stage, seconds in stages.items() if seconds), reverse=True)
            shares = ", ".join(f"{stage} {share:.0%}" for share, stage in parts)
            found.append(f"{what}, {phase}, {total * 1e3:,.2f} ms profiled: {shares}")
    return [line for text in found for line in wrap(text, WIDTH, subsequent_indent="  ")]
