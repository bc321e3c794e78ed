"""A picture of what formats cost: how far predictions move, and which layers' experts err how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moestro.bench.plot import OURS_COLOURS, PEER_COLOURS, STYLE, check_ending
from moestro.errors import invalid_input
from moestro.quality.report import QualityReport, Row, headline

MARKERS = {None: "D", "nearest": "o", "mse": "^"}
COLOURS = {None: PEER_COLOURS[3], "nearest": OURS_COLOURS[0], "mse": PEER_COLOURS[0]}
ROUNDING = 1e-9
"""Nats; a divergence below it is that of rounding, and has no dot."""


def quality_plot(report: QualityReport, path: str | Path) -> None:
    """Write a picture (png, svg or pdf by the name's ending): a line for each variant.

    On the left a dot at its mean KL divergence from the baseline, logarithmic; on the right each layer's expert error.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    check_ending(path)
    rows = report.measured
    if not rows:
        raise invalid_input(
            "plot", got="a report without numbers", needs="a variant that was measured", fix="See the skipped ones."
        )
    with rc_context(STYLE):
        figure = Figure(figsize=(11.0, 2.0 + 0.25 * len(rows)))
        left, right = figure.subplots(1, 2, sharey=True)
        _divergence(left, rows)
        _layers(figure, right, rows)
        figure.suptitle("\n".join(headline(report)))
        figure.savefig(path)


def _divergence(axis: Any, rows: list[Row]) -> None:
    found = [row.kl_mean or 0.0 for row in rows]
    for search, marker in MARKERS.items():
        lines = [i for i, row in enumerate(rows) if row.search == search and found[i] > ROUNDING]
        axis.scatter([found[i] for i in lines], lines, s=36, marker=marker, color=COLOURS[search], zorder=3)
    if max(found) > ROUNDING:
        axis.set_xscale("log")
    labels = [f"{' '.join(filter(None, (row.format, row.search)))}, {row.bits_per_weight:.2f} bits" for row in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=7)
    axis.set(title="divergence of next-token distributions", xlabel="mean KL(baseline || variant), nats")


def _layers(figure: Any, axis: Any, rows: list[Row]) -> None:
    errors = [[100 * layer.error for layer in row.layers or ()] for row in rows]
    image = axis.imshow(errors, aspect="auto", cmap="OrRd", vmin=0.0, interpolation="nearest")
    axis.set(title="expert error by layer", xlabel="expert layer, first to last")
    axis.grid(False)
    axis.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axis, label="% of the baseline's output")
