"""A roofline picture of a report: each variant's points under the roof measured in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moestro.bench.records import Report, Row
from moestro.bench.report import by_layer, machine_line, title
from moestro.errors import invalid_input
from moestro.machine import Roof

OURS_COLOURS = ("#d1495b", "#e08e45", "#8f2d56", "#f2b134", "#b56576")
PEER_COLOURS = ("#30638e", "#5b8e7d", "#7d7aa8", "#8a8d91", "#3f88c5", "#6b705c")
OURS_MARKERS = "o*phH8"
PEER_MARKERS = "sD^vPX"
INK = "#2b2d33"
COLUMNS = 2
ENDINGS = (".png", ".svg", ".pdf")


def roofline(report: Report, path: str | Path) -> None:
    """Write a picture (png, svg or pdf by the name's ending): a panel per layer, dtype and bits of a weight.

    x is FLOP per byte of active weights as a variant stores them, y is GFLOP/s, both logarithmic; every dot is a number
    of tokens, every format has a marker of its own. The solid roof is the matmuls'; the peaks are those of registers.

    Raises:
        InvalidInputError: the report has no measured row, or the ending names no picture format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_ending(path)
    panels = [rows for _, rows in by_layer(report.rows) if any(row.gigaflops for row in rows)]
    if not panels:
        raise invalid_input(
            "plot", got="a report without times", needs="a measured row", fix="See the table's reasons."
        )
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.6 * lines + 1.0), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    styles = _styles(report.rows)
    for axis, rows in zip(axes, panels, strict=False):
        _panel(axis, rows, report, styles)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    handles = [figure.axes[0].plot([], [], label=name, **style)[0] for name, style in styles.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(styles), 5), frameon=False)
    figure.suptitle(f"{machine_line(report.machine)}\n{report.date[:10]}", fontsize=9, color=INK)
    figure.savefig(path, dpi=160)


def check_ending(path: str | Path) -> None:
    """Refuse a name whose ending is not one of `ENDINGS`.

    Raises:
        InvalidInputError: it is not.
    """
    if Path(path).suffix not in ENDINGS:
        raise invalid_input(
            "plot", got=f"{str(path)!r}", needs=f"a name ending in {', '.join(ENDINGS)}", fix="Try .png."
        )


def _styles(rows: list[Row]) -> dict[str, dict[str, Any]]:
    kinds = {row.variant: row.kind for row in rows if row.gigaflops}
    ours = [name for name, kind in kinds.items() if kind == "moestro"]
    peers = [name for name, kind in kinds.items() if kind == "peer"]
    styles: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(ours):
        colour = OURS_COLOURS[i % len(OURS_COLOURS)]
        marker = OURS_MARKERS[i % len(OURS_MARKERS)]
        styles[name] = {"color": colour, "marker": marker, "ms": 7, "lw": 2.2, "zorder": 5, "mec": "white", "mew": 0.8}
    for i, name in enumerate(peers):
        turn = i // len(PEER_MARKERS)
        marker, colour = PEER_MARKERS[i % len(PEER_MARKERS)], PEER_COLOURS[(i + turn) % len(PEER_COLOURS)]
        styles[name] = {"color": colour, "marker": marker, "ms": 5, "lw": 1.2, "alpha": 0.85, "zorder": 3}
    return styles


def _panel(axis: Any, rows: list[Row], report: Report, styles: dict[str, dict[str, Any]]) -> None:
    roof = report.roofs[rows[0].dtype]
    measured = [row for row in rows if row.gigaflops is not None]
    xs = [row.flop_per_byte for row in measured]
    ys = [row.gigaflops for row in measured if row.gigaflops is not None]
    left, right = min(*xs, roof.balance) / 2, max(*xs, roof.balance) * 3
    _draw_roof(axis, roof, left, right)
    peaks = {row.peak: report.peaks[row.peak] / 1e9 for row in measured if row.peak in report.peaks}
    for name, rate in peaks.items():
        axis.axhline(rate, color=INK, lw=0.9, ls=":", zorder=2)
        axis.annotate(f"{name} {rate:,.0f}", (left, rate), (4, 3), textcoords="offset points", color=INK, fontsize=7)
    for name, style in styles.items():
        line = sorted((row.flop_per_byte, row.gigaflops) for row in measured if row.variant == name)
        axis.plot([x for x, _ in line], [y for _, y in line], **style)
    _mark_tokens(axis, [row for row in measured if row.variant == measured[0].variant])
    axis.set_xlim(left, right)
    lowest, highest = roof.bytes_per_second / 1e9 * left, roof.flops_per_second / 1e9
    axis.set_ylim(min(*ys, lowest) / 2.5, max(*ys, *peaks.values(), highest) * 2)
    axis.set_ylabel("GFLOP/s", fontsize=9, color=INK)
    finish(axis, title(rows[0]), "FLOP per byte of active weights")


def finish(axis: Any, title: str, label: str) -> None:
    """Title, label of x, grid and ticks of one panel, as in every picture."""
    axis.set_title(title, fontsize=10, color=INK, loc="left")
    axis.set_xlabel(label, fontsize=9, color=INK)
    axis.grid(True, which="major", color=INK, alpha=0.08)
    axis.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _draw_roof(axis: Any, roof: Roof, left: float, right: float) -> None:
    bandwidth, peak = roof.bytes_per_second / 1e9, roof.flops_per_second / 1e9
    bend = [left, roof.balance, right]
    heights = [bandwidth * left, peak, peak]
    axis.loglog(bend, heights, color=INK, lw=1.6, zorder=4)
    axis.fill_between(bend, heights, [peak * 30] * 3, color=INK, alpha=0.06, lw=0, zorder=0)
    middle = (left * roof.balance) ** 0.5
    for text, place, shift in (
        (f"{peak:,.0f} GFLOP/s", (right, peak), (-4, 4)),
        (f"{bandwidth:.1f} GB/s", (middle, bandwidth * middle), (-6, 4)),
    ):
        axis.annotate(text, place, shift, textcoords="offset points", ha="right", color=INK, fontsize=8)


def _mark_tokens(axis: Any, rows: list[Row]) -> None:
    """A line at each number of tokens of one variant."""
    tokens: dict[float, list[str]] = {}
    for row in rows:
        tokens.setdefault(row.flop_per_byte, []).append(str(row.num_tokens))
    for x, counts in tokens.items():
        axis.axvline(x, color=INK, lw=0.5, alpha=0.12, zorder=1)
        axis.annotate(
            f"T={', '.join(dict.fromkeys(counts))}",
            (x, 0.015),
            xycoords=("data", "axes fraction"),
            fontsize=7,
            color=INK,
            alpha=0.7,
            rotation=90,
            ha="right",
            va="bottom",
        )
