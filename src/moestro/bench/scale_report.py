"""How a layer grows, for people: a table for each axis, and a picture of all three."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestro.bench.plot import INK, OURS_COLOURS, OURS_MARKERS, STYLE, check_ending
from moestro.bench.report import machine_line, roof_lines
from moestro.bench.scale import AXES, Axis, ScalePoint, ScaleReport, by_axis
from moestro.errors import invalid_input

if TYPE_CHECKING:
    from rich.table import Table


def headline(report: ScaleReport) -> list[str]:
    """The machine, its roof, the layer and what the run noted, a line each."""
    plan, spec = report.plan, report.plan.spec
    sizes = f"H {spec.hidden_size}, I {spec.intermediate_size}, E {spec.num_experts}, K {spec.top_k}"
    notes = [text for texts in report.base.notes.values() for text in texts]
    own = f"{spec.name} ({sizes}), T {plan.at_tokens} where E or K is varied"
    return [machine_line(report.base.machine), *roof_lines(report.base), own, *notes]


def tables(report: ScaleReport) -> list[Table]:
    """A table of at most 80 columns for each axis and variant, for `rich.print`."""
    from rich import box
    from rich.table import Table

    found = []
    for axis, variant, points in by_axis(report):
        row = points[0].row
        table = Table(
            title=f"over {AXES[axis]}: {variant}, x in {row.dtype}", title_justify="left", box=box.SIMPLE_HEAD
        )
        table.caption, table.caption_justify = "\n".join(_reasons(axis, points)) or None, "left"
        for name in (AXES[axis], "active", "us", "roof us", "of roof", "read MB", "weights MB", "call MB"):
            table.add_column(name, justify="right", no_wrap=True)
        for point in points:
            table.add_row(*_cells(point))
        found.append(table)
    return found


def _cells(point: ScalePoint) -> list[str]:
    row = point.row
    numbers = [
        (row.microseconds, 1.0, ",.0f"),
        (point.roof_microseconds, 1.0, ",.0f"),
        (row.roof_share, 1.0, ".0%"),
        (point.read_bytes, 1e-6, ",.1f"),
        (point.weight_bytes, 1e-6, ",.1f"),
        (point.workspace_bytes, 1e-6, ",.1f"),
    ]
    cells = ["-" if value is None else format(value * unit, form) for value, unit, form in numbers]
    return [str(point.value), str(row.active_experts) if row.status == "ok" else "-", *cells]


def _reasons(axis: Axis, points: list[ScalePoint]) -> list[str]:
    """Why points have no numbers, one line for each reason."""
    found: dict[str, list[str]] = {}
    for point in points:
        if point.row.status != "ok":
            found.setdefault(f"{point.row.status}: {point.row.reason}", []).append(str(point.value))
    return [f"{AXES[axis]}={', '.join(values)} {reason}" for reason, values in found.items()]


def scale_plot(report: ScaleReport, path: str | Path) -> None:
    """Write a picture (png, svg or pdf by the name's ending): a panel for each axis, time over its values.

    Solid lines with marks are measured, dashed lines of the same colour the roof's least time. Both axes are
    logarithmic.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    check_ending(path)
    lines = {(axis, name): [p for p in points if p.row.microseconds] for axis, name, points in by_axis(report)}
    lines = {key: points for key, points in lines.items() if points}
    if not lines:
        raise invalid_input(
            "plot", got="a report without times", needs="a measured row", fix="See the table's reasons."
        )
    axes, names = list(dict.fromkeys(axis for axis, _ in lines)), list(dict.fromkeys(name for _, name in lines))
    looks = dict(zip(names, zip(cycle(OURS_COLOURS), cycle(OURS_MARKERS), strict=False), strict=False))
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(axes), 4.4))
        panels = figure.subplots(1, len(axes), squeeze=False, sharey=True)[0]
        for axis, panel in zip(axes, panels, strict=True):
            for name, (colour, marker) in looks.items():
                _draw(panel, lines.get((axis, name), []), colour, marker)
            _label(panel, report, axis, [p.value for (a, _), found in lines.items() if a == axis for p in found])
        handles = [
            panels[0].plot([], [], color=colour, marker=marker, lw=2, mec="white", label=f"{name}, measured")[0]
            for name, (colour, marker) in looks.items()
        ]
        handles.append(panels[0].plot([], [], color=INK, lw=1.2, ls="--", label="least time at the measured roof")[0])
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4))
        figure.suptitle("\n".join([*headline(report)[:2], report.base.date[:10]]))
        figure.savefig(path)


def _draw(panel: Any, points: list[ScalePoint], colour: str, marker: str) -> None:
    places = sorted((p.value, p.row.microseconds, p.roof_microseconds) for p in points)
    xs = [x for x, _, _ in places]
    panel.loglog(xs, [y for _, y, _ in places], color=colour, marker=marker, ms=7, lw=2, mec="white", mew=0.8, zorder=4)
    panel.loglog(xs, [y for _, _, y in places], color=colour, lw=1.2, ls="--", zorder=3)


def _label(panel: Any, report: ScaleReport, axis: Axis, values: list[int]) -> None:
    spec, at = report.plan.spec, report.plan.at_tokens
    own = {"num_experts": f"E {spec.num_experts}", "top_k": f"K {spec.top_k}", "num_tokens": f"T {at}"}
    kept = ", ".join(text for name, text in own.items() if name != axis)
    ticks = sorted(set(values))
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.set_xticks([], minor=True)
    what = {"num_experts": "experts", "top_k": "experts a token", "num_tokens": "tokens"}[axis]
    panel.set(title=f"{spec.name}, {kept}", xlabel=f"{AXES[axis]}, {what}")
    if axis == next(iter(AXES)) or panel.get_subplotspec().is_first_col():
        panel.set_ylabel("microseconds")
