"""Placements and dispatches compared on one batch: as plain values, as a table for a terminal, as a Markdown page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from moestro.errors import invalid_input
from moestro.parallel.balance import Balanced, balance
from moestro.parallel.eplb import Eplb
from moestro.parallel.placement import Placement
from moestro.parallel.simulate import Dispatch, Simulation, simulate
from moestro.parallel.simulate_links import Mesh

if TYPE_CHECKING:
    from rich.table import Table

POLICIES = ("contiguous", "eplb", "balanced")
DISPATCHES: tuple[Dispatch, ...] = ("dense", "unicast", "sparse")
_NUMBERS = {
    "imbalance": ("imbalance", ".3f"),
    "rows held": ("rows_held", ",d"),
    "MB sent": ("megabytes_sent", ",.2f"),
    "MB busiest link": ("megabytes_busiest_link", ",.2f"),
    "hops": ("mean_hops", ".2f"),
    "dispatch us": ("dispatch_microseconds", ",.1f"),
    "experts us": ("experts_microseconds", ",.1f"),
    "combine us": ("combine_microseconds", ",.1f"),
    "total us": ("total_microseconds", ",.1f"),
    "published dispatch us": ("published_microseconds", ",.1f"),
}
"""Columns: the attribute of a row, and how it is written."""
COLUMNS = ("placement", "dispatch", *_NUMBERS)


@dataclass(frozen=True)
class Row:
    """One placement with one dispatch, in numbers; `simulation` has those of every rank and link.

    Attributes:
        placement, dispatch: their names.
        slots: experts that all ranks hold together.
        imbalance: the most pairs of a rank over the mean.
        rows_held: the most rows of a rank.
        megabytes_sent: of all rows that leave their rank, there and back.
        megabytes_busiest_link: there or back, whichever is more.
        mean_hops, max_hops: of a (token, rank).
        dispatch_microseconds, experts_microseconds, combine_microseconds, columns_microseconds: see `Simulation`;
            experts are those of the slowest rank.
        total_microseconds: the sum of these four.
        published_microseconds: of the dispatch, by the figures of one design.
    """

    placement: str
    dispatch: str
    slots: int
    imbalance: float
    rows_held: int
    megabytes_sent: float
    megabytes_busiest_link: float
    mean_hops: float
    max_hops: int
    dispatch_microseconds: float
    experts_microseconds: float
    combine_microseconds: float
    columns_microseconds: float
    total_microseconds: float
    published_microseconds: float | None
    simulation: Simulation

    @classmethod
    def of(cls, name: str, placement: Placement, dispatch: str, row_bytes: int, found: Simulation) -> Row:
        """The numbers of a simulation."""
        return cls(
            placement=name,
            dispatch=dispatch,
            slots=placement.num_slots,
            imbalance=found.imbalance,
            rows_held=int(found.buffer_rows.max()),
            megabytes_sent=2 * found.sent_rows * row_bytes / 1e6,
            megabytes_busiest_link=max(int(found.dispatch_bytes.max()), int(found.combine_bytes.max())) / 1e6,
            mean_hops=found.mean_hops,
            max_hops=found.max_hops,
            dispatch_microseconds=found.dispatch_microseconds,
            experts_microseconds=found.makespan,
            combine_microseconds=found.combine_microseconds,
            columns_microseconds=found.columns_microseconds,
            total_microseconds=found.total_microseconds,
            published_microseconds=found.published_microseconds,
            simulation=found,
        )


@dataclass(frozen=True)
class Batch:
    """What was routed: a name, sizes, bytes of a row, and how many other tokens the loads were measured on."""

    name: str
    num_tokens: int
    num_experts: int
    top_k: int
    row_bytes: int
    history: int


@dataclass(frozen=True)
class SimulationReport:
    """Everything one run found."""

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    mesh: Mesh
    batch: Batch
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps: the attributes by name, arrays as lists."""
        return {key: _plain(value) for key, value in asdict(self).items()}


def placements(
    names: Sequence[str], loads: Tensor, num_ranks: int, num_slots: int, nested: tuple[int, int] = (1, 1)
) -> dict[str, Placement]:
    """Placements by the names of `POLICIES`; "contiguous" has every expert once.

    Args:
        names: of policies.
        loads: [E].
        num_ranks, num_slots: of all.
        nested: groups of experts and nodes of ranks.

    Raises:
        InvalidInputError: another name, or what `balance` refuses.
    """
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise invalid_input(
            "simulate",
            got=f"policies {list(names)}",
            needs=f"some of {', '.join(POLICIES)}",
            fix="Leave it out for two.",
        )
    made = {}
    for name in names:
        policy = Eplb(*nested) if name == "eplb" else Balanced(*nested)
        plain = name == "contiguous"
        made[name] = (
            Placement.contiguous(len(loads), num_ranks) if plain else balance(loads, num_ranks, num_slots, policy)
        )
    return made


def compare(
    expert_ids: Tensor, mesh: Mesh, placed: Mapping[str, Placement], dispatches: Sequence[Dispatch], row_bytes: int
) -> list[Row]:
    """Each placement with each dispatch, on the same batch [T, K]."""
    return [
        Row.of(name, placement, kind, row_bytes, simulate(expert_ids, mesh, placement, row_bytes, kind))
        for name, placement in placed.items()
        for kind in dispatches
    ]


def headline(report: SimulationReport) -> list[str]:
    """Mesh and batch, a line each."""
    batch = report.batch
    sizes = f"{batch.num_tokens:,} tokens, {batch.num_experts} experts, top-k {batch.top_k}, {batch.row_bytes:,} bytes"
    slots = ", ".join(dict.fromkeys(f"{row.placement} {row.slots}" for row in report.rows))
    return [
        f"mesh: {report.mesh}, {report.mesh.num_ranks} ranks",
        f"batch: {batch.name}, {sizes} a row",
        f"placed by the loads of {batch.history:,} other tokens; slots: {slots}",
    ]


def cells(report: SimulationReport) -> list[tuple[str, ...]]:
    """A line for each row, in `COLUMNS`."""
    from moestro.bench.report import written

    return [(row.placement, row.dispatch, *written(row, _NUMBERS.values())) for row in report.rows]


def table(report: SimulationReport) -> Table:
    """The table for `rich.print`."""
    from rich.table import Table

    made = Table(padding=0)
    for name in COLUMNS:
        made.add_column(name.replace(" ", "\n"), justify="right" if name in _NUMBERS else "left", no_wrap=True)
    lines = cells(report)
    for line, after in zip(lines, [*lines[1:], ("",)], strict=True):
        made.add_row(*line, end_section=line[0] != after[0])
    return made


def markdown(report: SimulationReport) -> str:
    """The whole report as a dated page: versions, command, table."""
    lines = [
        f"# Simulation, {report.date[:10]}",
        "",
        f"- versions: {', '.join(f'{k} {v}' for k, v in report.versions.items())}",
        f"- command: `{report.command}`",
        *(f"- {line}" for line in headline(report)),
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|" + "---:|" * len(_NUMBERS),
        *(f"| {' | '.join(line)} |" for line in cells(report)),
    ]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
