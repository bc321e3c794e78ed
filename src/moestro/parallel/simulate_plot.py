"""A picture of a simulation: how even ranks are, what links carry, where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moestro.bench.plot import OURS_COLOURS, PEER_COLOURS, STYLE, check_ending
from moestro.parallel.simulate_report import Row, SimulationReport, headline

COLOURS = {"balanced": OURS_COLOURS[0], "contiguous": PEER_COLOURS[3], "eplb": PEER_COLOURS[0]}
DASHES = {"dense": "-", "unicast": "--", "sparse": ":"}
PARTS = {
    "columns": PEER_COLOURS[3],
    "dispatch": PEER_COLOURS[0],
    "experts": OURS_COLOURS[0],
    "combine": PEER_COLOURS[1],
}


def simulation_plot(report: SimulationReport, path: str | Path) -> None:
    """Write a picture (png, svg or pdf by the name's ending) of three panels.

    Pairs of each rank over the mean, from the fullest rank down; megabytes of each link, there and back, from the
    busiest down; and the times of each row's parts.

    Raises:
        InvalidInputError: the ending names no picture format.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    check_ending(path)
    with rc_context(STYLE):
        figure = Figure(figsize=(14.0, 2.6 + 0.28 * max(len(report.rows), 6)))
        left, middle, right = figure.subplots(1, 3)
        _ranks(left, {row.placement: row for row in report.rows})
        _links(middle, report.rows)
        _times(right, report.rows)
        figure.suptitle("\n".join(headline(report)))
        figure.savefig(path)


def _ranks(axis: Any, rows: dict[str, Row]) -> None:
    for name, row in rows.items():
        pairs = np.sort(row.simulation.pairs)[::-1]
        axis.plot(
            np.arange(1, len(pairs) + 1), pairs / max(pairs.mean(), 1e-9), color=COLOURS[name], label=name, marker="."
        )
    axis.set(title="load of a rank over the mean", xlabel="ranks, fullest first", ylim=(0, None))
    axis.legend()


def _links(axis: Any, rows: list[Row]) -> None:
    for row in rows:
        both = row.simulation.dispatch_bytes + row.simulation.combine_bytes
        falling = np.sort(both.reshape(-1))[::-1] / 1e6
        style = {
            "color": COLOURS[row.placement],
            "ls": DASHES[row.dispatch],
            "label": f"{row.placement}, {row.dispatch}",
        }
        axis.plot(np.arange(1, len(falling) + 1), falling, **style)
    axis.set(title="MB over a link, there and back", xlabel="links, busiest first", ylim=(0, None))
    axis.legend()


def _times(axis: Any, rows: list[Row]) -> None:
    begin = np.zeros(len(rows))
    for name, colour in PARTS.items():
        width = np.array([getattr(row, f"{name}_microseconds") for row in rows])
        axis.barh(range(len(rows)), width, left=begin, color=colour, label=name)
        begin += width
    axis.set_yticks(range(len(rows)), [f"{row.placement}, {row.dispatch}" for row in rows])
    axis.invert_yaxis()
    axis.set(title="time of a layer by the cost model", xlabel="microseconds")
    axis.legend()
