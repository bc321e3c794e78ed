"""A picture of what formats cost: how far predictions move, and which layers' experts err how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moestro.bench.plot import INK, OURS_COLOURS, PEER_COLOURS, check_ending
from moestro.errors import invalid_input
from moestro.quality.report import QualityReport, Stored, headline
from moestro.quality.score import Change

MARKERS = {None: "D", "nearest": "o", "mse": "^"}
COLOURS = {None: PEER_COLOURS[3], "nearest": OURS_COLOURS[0], "mse": PEER_COLOURS[0]}
ROUNDING = 1e-9
"""Nats; a divergence below it is that of rounding, and has no dot."""

Point = tuple[Stored, Change]


def quality_plot(report: QualityReport, path: str | Path) -> None:
    """Write a picture (png, svg or pdf by the name's ending): a line for each variant.

    On the left a dot at its mean KL divergence from the baseline, logarithmic; on the right its expert error in each
    layer.

    Raises:
        InvalidInputError: no variant was measured, or the ending names no picture format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_ending(path)
    points = [(row.stored, row.change) for row in report.rows if row.stored is not None and row.change is not None]
    if not points:
        raise invalid_input(
            "plot", got="a report without numbers", needs="a variant that was measured", fix="See the skipped ones."
        )
    figure = Figure(figsize=(11.0, 2.0 + 0.25 * len(points)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _divergence(left, points)
    _layers(figure, right, points)
    figure.suptitle("\n".join(headline(report)), fontsize=8, color=INK)
    figure.savefig(path, dpi=160)


def label(stored: Stored) -> str:
    """A variant for people: its format, how scales were chosen, and the bits of a weight."""
    return f"{' '.join(filter(None, (stored.format, stored.search)))}, {stored.bits_per_weight:.2f} bits"


def _divergence(axis: Any, points: list[Point]) -> None:
    for search, marker in MARKERS.items():
        shown = [
            (change.divergence, line)
            for line, (stored, change) in enumerate(points)
            if stored.search == search and change.divergence > ROUNDING
        ]
        if shown:
            axis.scatter(*zip(*shown, strict=True), s=36, marker=marker, color=COLOURS[search], zorder=3)
    if any(change.divergence > ROUNDING for _, change in points):
        axis.set_xscale("log")
    axis.set_yticks(range(len(points)), [label(stored) for stored, _ in points], fontsize=7, color=INK)
    axis.set_title("divergence of next-token distributions", fontsize=10, color=INK, loc="left")
    axis.set_xlabel("mean KL(baseline || variant), nats", fontsize=9, color=INK)
    axis.grid(True, which="major", color=INK, alpha=0.08)
    axis.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _layers(figure: Any, axis: Any, points: list[Point]) -> None:
    errors = [[100 * layer.error for layer in change.layers] for _, change in points]
    image = axis.imshow(errors, aspect="auto", cmap="OrRd", vmin=0.0, interpolation="nearest")
    axis.set_title("expert error by layer", fontsize=10, color=INK, loc="left")
    axis.set_xlabel("expert layer, first to last", fontsize=9, color=INK)
    axis.tick_params(labelsize=8, colors=INK)
    axis.xaxis.get_major_locator().set_params(integer=True)
    bar = figure.colorbar(image, ax=axis)
    bar.set_label("% of the baseline's output", fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=8, colors=INK)
