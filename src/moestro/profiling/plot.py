"""A picture of a profile: where the time goes, which experts are used, how even they are, which go together."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from moestro.bench.plot import INK, OURS_COLOURS, PEER_COLOURS, STYLE, check_ending
from moestro.profiling.loads import LayerLoad
from moestro.profiling.marks import STAGES
from moestro.profiling.report import ProfileReport, headline

COLOURS = {
    "router": OURS_COLOURS[3],
    "grouping": OURS_COLOURS[1],
    "experts": OURS_COLOURS[0],
    "combine": OURS_COLOURS[2],
    "dense": PEER_COLOURS[0],
    "attention": PEER_COLOURS[1],
    "other": PEER_COLOURS[2],
    "outside": PEER_COLOURS[3],
}
_MAP = "magma_r"
_TITLE = 150
"""Letters of a title in a line, which fill nine tenths of the width."""


def profile_plot(report: ProfileReport, path: str | Path) -> None:
    """Write a picture (png, svg or pdf by the name's ending) of four panels.

    Shares of time by stage; loads of all experts over their layer's mean; imbalance and router's entropy by layer; and
    how often two experts of the most uneven layer are used together.

    Raises:
        InvalidInputError: the ending names no picture format.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    check_ending(path)
    with rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(13.0, 8.2 if report.layers else 3.6))
        lines = 2 if report.layers else 1
        grid = figure.add_gridspec(lines, 2, width_ratios=(1.35, 1.0), height_ratios=(1.0, 1.15)[:lines])
        _stages(figure.add_subplot(grid[0, :] if not report.layers else grid[0, 0]), report)
        if report.layers:
            _evenness(figure.add_subplot(grid[0, 1]), report.layers)
            _loads(figure, figure.add_subplot(grid[1, 0]), report.layers)
            _together(figure, figure.add_subplot(grid[1, 1]), report.layers)
        figure.suptitle("\n".join(line for each in headline(report) for line in wrap(each, _TITLE)), parse_math=False)
        figure.savefig(path)


def _stages(axis: Any, report: ProfileReport) -> None:
    """A bar for each phase, in shares; the milliseconds of a pass stand in what is wide enough."""
    names = list(report.phases)
    begin = np.zeros(len(names))
    for stage in STAGES:
        milliseconds = [phase.seconds[stage] / phase.passes * 1e3 for phase in report.phases.values()]
        width = np.array([100 * phase.seconds[stage] / max(phase.total, 1e-12) for phase in report.phases.values()])
        if not width.any():
            continue
        axis.barh(range(len(names)), width, left=begin, color=COLOURS[stage], label=stage, height=0.6)
        for row, (share, spent) in enumerate(zip(width, milliseconds, strict=True)):
            if share >= 7:
                axis.text(
                    begin[row] + share / 2,
                    row,
                    f"{spent:,.0f} ms" if spent >= 100 else f"{spent:.3g} ms",
                    ha="center",
                    va="center",
                    color="white",
                )
        begin += width
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set(title="time of a pass by stage", xlabel="% of the time", xlim=(0, 100))
    if names:
        axis.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.22))


def _evenness(axis: Any, layers: tuple[LayerLoad, ...]) -> None:
    places = range(len(layers))
    axis.plot(places, [layer.imbalance for layer in layers], color=OURS_COLOURS[0], marker=".")
    axis.set(title="imbalance: largest load over the mean", xlabel="expert layer", ylim=(0, None))
    axis.axhline(1, color=INK, lw=0.8, ls=":")
    if all(layer.router_entropy is not None for layer in layers):
        other = axis.twinx()
        other.spines.right.set_visible(True)
        other.plot(places, [layer.router_entropy for layer in layers], color=PEER_COLOURS[0], marker=".", ls="--")
        other.set_ylim(0, np.log2(max(2, *(layer.num_experts for layer in layers))))
        other.set_ylabel("entropy of the router, bits (dashed)", color=PEER_COLOURS[0])
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _loads(figure: Any, axis: Any, layers: tuple[LayerLoad, ...]) -> None:
    shares = np.full((len(layers), max(layer.num_experts for layer in layers)), np.nan)
    for row, layer in enumerate(layers):
        shares[row, : layer.num_experts] = np.array(layer.loads) * layer.num_experts / max(layer.rows, 1)
    _heat(figure, axis, shares)
    axis.set(title="load over the layer's mean", xlabel="expert", ylabel="expert layer")


def _together(figure: Any, axis: Any, layers: tuple[LayerLoad, ...]) -> None:
    index = max(range(len(layers)), key=lambda i: layers[i].imbalance)
    layer = layers[index]
    counts = np.array(layer.together, dtype=float)
    np.fill_diagonal(counts, np.nan)
    _heat(figure, axis, 100 * counts / max(layer.tokens, 1))
    axis.set(title=f"used together, % of tokens: layer {index}, the most uneven", xlabel="expert", ylabel="expert")


def _heat(figure: Any, axis: Any, values: Any) -> None:
    image = axis.imshow(values, aspect="auto", cmap=_MAP, vmin=0, interpolation="nearest")
    figure.colorbar(image, ax=axis, pad=0.02)
    for each in (axis.xaxis, axis.yaxis):
        each.get_major_locator().set_params(integer=True, min_n_ticks=1)
