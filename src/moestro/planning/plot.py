"""A picture of a plan: tokens per second of every way, and where the time of the first goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestro.bench.plot import OURS_COLOURS, PEER_COLOURS, STYLE, check_ending
from moestro.planning.predict import Times
from moestro.planning.report import headline
from moestro.planning.search import Candidate

if TYPE_CHECKING:
    from moestro.planning import Plan

COLOURS = dict(
    zip((each.name for each in fields(Times)), (*OURS_COLOURS[:3], PEER_COLOURS[1], *PEER_COLOURS[2:4]), strict=True)
)


MEMORY = "memory of a device, GB"
AXES: dict[str, Callable[[Candidate], float]] = {
    "sequences at once": lambda each: each.load.batch,
    "devices": lambda each: each.choice.ranks,
    MEMORY: lambda each: each.need.device / 1e9,
}
"""What tokens per second are drawn over, and how a candidate has it."""


def plan_plot(plan: Plan, path: str | Path) -> None:
    """Write a picture (png, svg or pdf by the name's ending).

    New tokens per second over the batch, over devices and over the memory of one, as far as candidates differ in these;
    and the seconds of a step of the first ones by what they are spent in.

    Raises:
        InvalidInputError: the ending names no picture format.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    check_ending(path)
    axes = [name for name, of in AXES.items() if len({of(each) for each in plan.candidates}) > 1] or [*AXES][:1]
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(axes) + 5.6, 4.8))
        *left, right = figure.subplots(1, len(axes) + 1, width_ratios=[*(3.0 for _ in axes), 4.0])
        for name, axis in zip(axes, left, strict=True):
            _rates(axis, name, plan.candidates)
        left[0].set(ylabel="new tokens a second, of all sequences")
        _steps(right, plan.candidates[:8])
        figure.suptitle("\n".join(headline(plan)), parse_math=False)
        figure.savefig(path)


def _rates(axis: Any, name: str, candidates: tuple[Candidate, ...]) -> None:
    """For each format the fastest way at each value; over memory, the fastest that takes so much at most."""
    best: dict[str, dict[float, float]] = {}
    for each in candidates:
        line, value = best.setdefault(each.choice.format or "as stored", {}), AXES[name](each)
        line[value] = max(line.get(value, 0.0), each.decode_rate)
    for (form, line), colour in zip(best.items(), (*OURS_COLOURS, *PEER_COLOURS), strict=False):
        rates = [line[value] for value in sorted(line)]
        steps = {"drawstyle": "steps-post"} if name == MEMORY else {}
        rates = list(accumulate(rates, max)) if steps else rates
        axis.plot(sorted(line), rates, marker="o", color=colour, label=form, **steps)
    axis.set(xlabel=name, ylim=(0, None), title=f"over {name}")
    axis.legend()


def _steps(axis: Any, candidates: tuple[Candidate, ...]) -> None:
    """A bar for each way."""
    labels = [
        f"{each.choice.format or 'as stored'}, {each.load.batch}"
        + (f", {each.choice.ep}x{each.choice.tp}" if each.choice.ranks > 1 else "")
        for each in candidates
    ]
    begin = [0.0] * len(candidates)
    for stage, colour in COLOURS.items():
        widths = [1e3 * getattr(each.decode, stage) for each in candidates]
        if any(widths):
            axis.barh(range(len(candidates)), widths, left=begin, color=colour, label=stage, height=0.6)
        begin = [a + b for a, b in zip(begin, widths, strict=True)]
    axis.set_yticks(range(len(candidates)), labels)
    axis.invert_yaxis()
    axis.set(xlabel="ms", title="a step of decoding (experts, batch)")
    axis.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15))
