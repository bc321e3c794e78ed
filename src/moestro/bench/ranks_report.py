"""What the ranks of a job measured, as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moestro.bench.ranks import STAGES
from moestro.bench.ranks_records import RanksReport
from moestro.bench.report import machine_line

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("T", "dispatcher", *(f"{stage} us" for stage in STAGES), "layer us", "imbalance")
BYTES = ("rows MB", "least MB", "rows / least", "beside MB")
MOST_PAIRS_OF_RANKS = 64
"""The most pairs of ranks that are printed one by one."""


def headline(report: RanksReport) -> list[str]:
    """Machine, layer and ranks, a line each."""
    sizes = ", ".join(f"{name} {size}" for name, size in report.sizes.items())
    load = f"zipf {report.exponent:g}" if report.exponent else "uniform"
    threads = f"{report.threads} thread{'' if report.threads == 1 else 's'}"
    return [
        machine_line(report.machine),
        f"{report.layer} {report.dtype}, weights {report.format} ({sizes}), {load} load",
        f"{report.ranks} processes of {threads} on {', '.join(report.hosts)}, gloo",
    ]


def stages_table(report: RanksReport) -> Table:
    """A line for each dispatcher and number of tokens. Stages are those of the rank whose experts take longest."""
    from rich.table import Table

    made = Table(padding=0)
    for name in (*COLUMNS, *BYTES):
        made.add_column(name, justify="left" if name == "dispatcher" else "right", no_wrap=True)
    for row in report.rows:
        stages = (f"{row.stages[stage][row.slowest]:,.0f}" for stage in STAGES)
        made.add_row(
            str(row.num_tokens),
            row.dispatcher,
            *stages,
            f"{row.microseconds:,.0f}",
            f"{row.imbalance:.3f}",
            *_bytes(_total(row.row_bytes), _total(row.least_row_bytes), _total(row.other_bytes)),
        )
    return made


def pairs_table(report: RanksReport) -> Table | None:
    """Bytes from each rank to each other beside the fewest; None where that is a long table."""
    from rich.table import Table

    if report.ranks**2 > MOST_PAIRS_OF_RANKS:
        return None
    made = Table(padding=0)
    for name in ("T", "dispatcher", "from", "to", *BYTES):
        made.add_column(name, justify="left" if name == "dispatcher" else "right", no_wrap=True)
    for row in report.rows:
        for a in range(report.ranks):
            for b in range(report.ranks):
                if a != b:
                    found = _bytes(row.row_bytes[a][b], row.least_row_bytes[a][b], row.other_bytes[a][b])
                    made.add_row(str(row.num_tokens), row.dispatcher, str(a), str(b), *found)
        made.add_section()
    return made


def cost_lines(report: RanksReport) -> list[str]:
    """The ranks beside one process with as many threads, a line for each row that has it."""
    together = report.ranks * report.threads
    return [
        f"T={row.num_tokens} {row.dispatcher}: {report.ranks} processes of {report.threads} "
        f"{row.microseconds:,.0f} us, 1 process of {together} {row.alone_microseconds:,.0f} us: "
        f"{row.ratio:.2f}x ({row.ratio_low:.2f}-{row.ratio_high:.2f}, {row.rounds} rounds in turns)"
        for row in report.rows
        if row.alone_microseconds is not None
    ]


def error_lines(report: RanksReport) -> list[str]:
    """What rows in 8 bits cost, a line for each row that has them."""
    return [
        f"T={row.num_tokens} {row.dispatcher}: outputs are {row.error:.2%} off (relative L2)"
        for row in report.rows
        if row.error
    ]


def _bytes(rows: int, least: int, other: int) -> list[str]:
    share = f"{rows / least:.3f}" if least else "-"
    return [f"{rows / 1e6:,.3f}", f"{least / 1e6:,.3f}", share, f"{other / 1e6:,.3f}"]


def _total(by_pair: list[list[int]]) -> int:
    return sum(map(sum, by_pair))
