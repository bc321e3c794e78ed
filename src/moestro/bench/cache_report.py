"""Budgets and policies compared on a recorded run: as plain values, as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from moestro.bench.measure import about
from moestro.bench.report import written
from moestro.bench.schema import document
from moestro.memory import Replayed, Trace, cycle_bytes, least_budget, total_bytes

if TYPE_CHECKING:
    from rich.table import Table

_NUMBERS = {
    "MB": ("megabytes", ",.1f"),
    "cycles": ("cycles", ",.2f"),
    "slots": ("slots", ",d"),
    "hits %": ("hit_percent", ".1f"),
    "behind Belady": ("regret_points", ".1f"),
    "prompt hits %": ("prompt_hit_percent", ".1f"),
    "MB a token": ("token_megabytes", ",.3f"),
    "tokens/s at most": ("tokens_per_second", ",.1f"),
}
"""Columns: the attribute of a line, and how it is written."""


_NO_SETTINGS = ("command", "date", "machine", "versions", "rows")


@dataclass(frozen=True)
class CacheReport:
    """Everything one replay found.

    Attributes:
        command, date, machine, versions: of the run.
        model: the trace's name of it.
        layers, experts: how many there are, experts of all layers together.
        prompt_tokens, decoded_tokens: of the trace.
        least_bytes, cycle_bytes, total_bytes: of the least budget, of one token's experts, of all experts.
        bytes_per_second: that experts are read at; None where nobody said.
        rows: one for each budget and policy.
    """

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    model: str
    layers: int
    experts: int
    prompt_tokens: int
    decoded_tokens: int
    least_bytes: int
    cycle_bytes: int
    total_bytes: int
    bytes_per_second: float | None
    rows: list[Replayed]

    @classmethod
    def of(cls, trace: Trace, rows: list[Replayed], bytes_per_second: float | None) -> CacheReport:
        """The report of a trace that was replayed."""
        return cls(
            **about("cpu"),
            model=trace.model,
            layers=len(trace.layers),
            experts=sum(layer.experts for layer in trace.layers),
            prompt_tokens=trace.prompted,
            decoded_tokens=trace.decoded,
            least_bytes=least_budget(trace.layers),
            cycle_bytes=cycle_bytes(trace.layers),
            total_bytes=total_bytes(trace.layers),
            bytes_per_second=bytes_per_second,
            rows=rows,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps, in the form of every benchmark."""
        settings = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NO_SETTINGS}
        return document(self, settings, self.rows)


@dataclass(frozen=True)
class _Line:
    """A row in the units of the table."""

    row: Replayed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    @property
    def megabytes(self) -> float:
        return self.row.budget / 1e6

    @property
    def hit_percent(self) -> float | None:
        return 100 * self.row.hit_rate if self.row.decode.lookups else None

    @property
    def regret_points(self) -> float | None:
        return 100 * self.row.regret if self.row.decode.lookups else None

    @property
    def prompt_hit_percent(self) -> float | None:
        return 100 * self.row.prompt_hit_rate if self.row.prompt.lookups else None

    @property
    def token_megabytes(self) -> float | None:
        return None if self.row.token_bytes is None else self.row.token_bytes / 1e6


def headline(report: CacheReport) -> list[str]:
    """Model, run and sizes, a line each."""
    sizes = report.least_bytes, report.cycle_bytes, report.total_bytes
    least, cycle, whole = (f"{size / 1e6:,.1f} MB" for size in sizes)
    rate, name = report.bytes_per_second, report.model if report.model.isprintable() else repr(report.model)
    return [
        f"model: {name}, {report.experts:,} experts in {report.layers} layers",
        f"run: {report.prompt_tokens:,} tokens of prompts, {report.decoded_tokens:,} decoded",
        f"experts: {whole}; of one token {cycle}; the least budget {least}",
        *([] if rate is None else [f"read at {rate / 1e9:g} GB/s"]),
    ]


def columns(report: CacheReport) -> tuple[str, ...]:
    """Of the table; tokens per second where a rate was given."""
    return "policy", *(name for name in _NUMBERS if report.bytes_per_second is not None or "tokens/s" not in name)


def cells(report: CacheReport) -> list[tuple[str, ...]]:
    """A line for each row, in `columns`."""
    numbers = [_NUMBERS[name] for name in columns(report)[1:]]
    return [(row.policy, *written(_Line(row), numbers)) for row in report.rows]


def table(report: CacheReport) -> Table:
    """The table for `rich.print`."""
    from rich.table import Table

    made = Table(padding=0)
    for name in columns(report):
        made.add_column(name.replace(" ", "\n"), justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for line, row, after in zip(cells(report), report.rows, _following(report.rows), strict=True):
        made.add_row(*line, end_section=after is None or after.budget != row.budget)
    return made


def _following(rows: Sequence[Replayed]) -> list[Replayed | None]:
    return [*rows[1:], None]
