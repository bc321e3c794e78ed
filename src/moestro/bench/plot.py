"""A roofline picture of a report: each variant's points under the roof measured in the same run."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from moestro.bench.records import Report, Row
from moestro.bench.report import by_layer, machine_line, title
from moestro.errors import invalid_input

OURS_COLOURS = ("#d1495b", "#e08e45", "#8f2d56", "#f2b134", "#b56576")
PEER_COLOURS = ("#30638e", "#5b8e7d", "#7d7aa8", "#8a8d91", "#3f88c5")
# As many markers as colours and one: thirty lines have a pair of their own.
OURS_MARKERS = "o*phH8"
PEER_MARKERS = "sD^vPX"
INK = "#2b2d33"
COLUMNS = 2
ENDINGS = (".png", ".svg", ".pdf")
STYLE = {
    **dict.fromkeys(("text.color", "axes.titlecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "font.size"), 8),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.08,
    "figure.constrained_layout.use": True,
    "figure.titlesize": 9,
    "savefig.dpi": 160,
}
"""Of every picture, as matplotlib's settings."""


def roofline(report: Report, path: str | Path) -> None:
    """Write a picture (png, svg or pdf by the name's ending): a panel per layer, dtype and bits of a weight.

    x is FLOP per byte of active weights as a variant stores them, y is GFLOP/s, both logarithmic; every dot is a number
    of tokens, every format has a marker of its own. The solid roof is the matmuls'; the peaks are those of registers.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    check_ending(path)
    panels = [rows for _, rows in by_layer(report.rows) if any(row.gigaflops for row in rows)]
    if not panels:
        raise invalid_input(
            "plot", got="a report without times", needs="a measured row", fix="See the table's reasons."
        )
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    styles = _styles(report.rows)
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4 * columns, 4.6 * lines + 1.0))
        for place, rows in enumerate(panels, 1):
            _panel(figure.add_subplot(lines, columns, place), rows, report, styles)
        handles = [figure.axes[0].plot([], [], label=name, **style)[0] for name, style in styles.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(styles), 5))
        figure.suptitle(f"{machine_line(report.machine)}\n{report.date[:10]}")
        figure.savefig(path)


def check_ending(path: str | Path) -> None:
    """Refuse a name whose ending is not one of `ENDINGS`."""
    if Path(path).suffix not in ENDINGS:
        needs = f"a name ending in {', '.join(ENDINGS)}"
        raise invalid_input("plot", got=f"{str(path)!r}", needs=needs, fix="Try .png.")


def _styles(rows: list[Row]) -> dict[str, dict[str, Any]]:
    kinds = {row.variant: row.kind for row in rows if row.gigaflops}
    ours = {"ms": 7, "lw": 2.2, "zorder": 5, "mec": "white", "mew": 0.8}
    peers = {"ms": 5, "lw": 1.2, "zorder": 3, "alpha": 0.85}
    looks = (("moestro", ours, OURS_MARKERS, OURS_COLOURS), ("peer", peers, PEER_MARKERS, PEER_COLOURS))
    styles: dict[str, dict[str, Any]] = {}
    for group, style, markers, colours in looks:
        names = [name for name, kind in kinds.items() if kind == group]
        for name, marker, colour in zip(names, cycle(markers), cycle(colours), strict=False):
            styles[name] = {**style, "marker": marker, "color": colour}
    return styles


def _panel(axis: Any, rows: list[Row], report: Report, styles: dict[str, dict[str, Any]]) -> None:
    roof = report.roofs[rows[0].dtype]
    bandwidth, peak = roof.bytes_per_second / 1e9, roof.flops_per_second / 1e9
    measured = [row for row in rows if row.gigaflops is not None]
    xs = [row.flop_per_byte for row in measured]
    left, right = min(*xs, roof.balance) / 2, max(*xs, roof.balance) * 3
    axis.loglog([left, roof.balance, right], [bandwidth * left, peak, peak], color=INK, lw=1.6, zorder=4)
    notes = [(f"{peak:,.0f} GFLOP/s", right, peak), (f"{bandwidth:.1f} GB/s", left, bandwidth * left)]
    for name in report.peaks.keys() & {row.peak for row in measured}:
        rate = report.peaks[name] / 1e9
        axis.axhline(rate, color=INK, lw=0.9, ls=":", zorder=2)
        notes.append((f"{name} {rate:,.0f}", left, rate))
    for name, style in styles.items():
        line = sorted((row.flop_per_byte, row.gigaflops) for row in measured if row.variant == name)
        axis.plot([x for x, _ in line], [y for _, y in line], **style)
    tokens = {row.flop_per_byte: row.num_tokens for row in measured if row.variant == measured[0].variant}
    for x, num_tokens in tokens.items():
        axis.text(x, 0.99, f"T={num_tokens}", transform=axis.get_xaxis_transform(), rotation=90, ha="center", va="top")
    for text, x, y in notes:
        axis.annotate(text, (x, y), (0, 5), textcoords="offset points", ha="right" if x == right else "left")
    axis.set(title=title(rows[0]), xlabel="FLOP per byte of active weights", ylabel="GFLOP/s")
