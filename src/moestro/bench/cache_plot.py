"""A picture of a replay: hit rates over budgets, and what is left to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moestro.bench.cache_report import CacheReport, headline
from moestro.bench.plot import INK, OURS_COLOURS, PEER_COLOURS, STYLE, check_ending
from moestro.memory.replay import BELADY

COLOURS = {
    "expected": OURS_COLOURS[0],
    "lru": PEER_COLOURS[0],
    "lfu": PEER_COLOURS[1],
    "layer_lfu": PEER_COLOURS[2],
    BELADY: INK,
}


def cache_plot(report: CacheReport, path: str | Path) -> None:
    """Write a picture (png, svg or pdf by the name's ending) of two panels over budgets in cycles.

    Hits of decoding in percent, and megabytes that are read for a token.

    Raises:
        InvalidInputError: the ending names no picture format.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    check_ending(path)
    with rc_context(STYLE):
        figure = Figure(figsize=(11.0, 4.4))
        left, right = figure.subplots(1, 2)
        for name in dict.fromkeys(row.policy for row in report.rows):
            rows = sorted((row for row in report.rows if row.policy == name), key=lambda row: row.budget)
            style: dict[str, Any] = {"color": COLOURS[name], "marker": ".", "ls": "--" if name == BELADY else "-"}
            cycles = [row.cycles for row in rows]
            left.plot(cycles, [100 * row.hit_rate for row in rows], label=name, **style)
            right.plot(cycles, [(row.token_bytes or 0) / 1e6 for row in rows], label=name, **style)
        left.set(title="hits of decoding, %", ylim=(0, 102))
        right.set(title="MB read for a token", ylim=(0, None))
        budgets = sorted({row.cycles for row in report.rows})
        for axis in (left, right):
            axis.set(xlabel="budget over the experts of one token", xscale="log")
            axis.set_xticks(budgets, [f"{cycles:.2g}" for cycles in budgets])
            axis.minorticks_off()
            axis.legend()
        figure.suptitle("\n".join(headline(report)), parse_math=False)
        figure.savefig(path)
