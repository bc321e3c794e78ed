"""A plan as text for a terminal and as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from moestro.memory.amounts import shown_bytes
from moestro.planning.predict import Times
from moestro.planning.search import Candidate

if TYPE_CHECKING:
    from moestro.planning import Plan

WIDTH = 80
MOST_ROWS = 12
COLUMNS = f"{'experts':<14}{'batch':>6}{'ep x tp':>8}{'memory':>10}{'on disk':>10}{'prompt/s':>11}{'new/s':>10} bound"


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything, by name."""
    from moestro.bench.measure import about

    return {
        **about("cpu"),
        "model": plan.model.name,
        "layers": [
            {"name": layer.name, "format": layer.format, "bits": layer.bits, **asdict(layer.size)}
            for layer in plan.model.layers
        ],
        "rest_bytes": plan.model.rest_bytes,
        "planned_machine": asdict(plan.machine),
        "candidates": [candidate_json(each) for each in plan.candidates],
        "assumptions": [{"text": text, "change": change} for text, change in plan.assumptions],
        "notes": list(plan.notes),
    }


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """One way, with what follows from it."""
    rates = {name: getattr(candidate, name) for name in ("prompt_rate", "decode_rate", "rate")}
    bounds = {"prompt_bound": candidate.prompt.bound, "decode_bound": candidate.decode.bound}
    return {**asdict(candidate), **rates, **bounds, "device_bytes": candidate.need.device}


def text(plan: Plan) -> str:
    """A table of at most 80 columns, and of the first candidate all that is known."""
    best = plan.best
    lines = [*headline(plan), "", COLUMNS.rstrip()]
    lines += [row(each) for each in plan.candidates[:MOST_ROWS]]
    if len(plan.candidates) > MOST_ROWS:
        lines.append(f"and {len(plan.candidates) - MOST_ROWS} more")
    lines += ["", *times_lines(best), ""]
    said = (memory_line(best), *sentences(plan))
    return "\n".join([*lines, *(part for each in said for part in wrap(each, WIDTH, subsequent_indent="  "))])


def headline(plan: Plan) -> list[str]:
    """Model and machine, a line each."""
    model, machine, size = plan.model, plan.machine, plan.model.layers[0].size
    devices = "" if machine.devices == 1 else f", {machine.devices} devices"
    load = plan.best.load
    return [
        f"model: {model.name}; {len(model.layers)} expert layers ({size.experts} experts, top {size.top_k}), "
        f"{model.layers[0].format}",
        f"machine: {machine.name}{devices}; {shown_bytes(machine.memory)}, {machine.bytes_per_second / 1e9:,.0f} GB/s",
        f"each sequence: {load.prompt_tokens:,} tokens of a prompt, {load.new_tokens:,} new ones",
    ]


def row(each: Candidate) -> str:
    """One candidate's line of the table."""
    choice, need = each.choice, each.need
    form = choice.format or "as stored"
    disk = "-" if choice.memory is None else shown_bytes(need.disk)
    ranks = "-" if choice.ranks == 1 else f"{choice.ep} x {choice.tp}"
    return (
        f"{form:<14}{each.load.batch:>6}{ranks:>8}{shown_bytes(need.device):>10}{disk:>10}"
        f"{_rate(each.prompt_rate):>11}{_rate(each.decode_rate):>10} {each.decode.bound[:10]}"
    )


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def times_lines(best: Candidate) -> Iterator[str]:
    """Milliseconds of a pass of the first candidate, and shares, by what they are spent in."""
    phases = {"prompt": best.prompt, "a step": best.decode}
    yield f"{'the first, ms':<16}" + "".join(f"{name:>14}{'':7}" for name in phases)
    for each in (*(found.name for found in fields(Times)), "total"):
        cells = [(getattr(times, each), times.total) for times in phases.values()]
        if any(seconds for seconds, _ in cells):
            yield f"{each:<16}" + "".join(f"{1e3 * seconds:>14,.2f}{seconds / total:>7.1%}" for seconds, total in cells)


def memory_line(best: Candidate) -> str:
    """What the first candidate keeps where."""
    need = best.need
    parts = {"experts": need.experts, "all else": need.rest, "keys and values": need.cache, "workspace": need.workspace}
    return "memory: " + ", ".join(f"{name} {shown_bytes(size)}" for name, size in parts.items())


def sentences(plan: Plan) -> Iterator[str]:
    """How to run the first, what its rate depends on, and what was left out."""
    best = plan.best
    yield f"to run it: {command(plan.model.name, best)}"
    if best.block_size is not None:
        yield f"strategy: {best.strategy} for new tokens, blocks of {best.block_size} rows for prompts"
    if best.choice.ranks > 1:
        yield f"dispatcher: {best.dispatcher}"
    if plan.assumptions:
        (text, change), *_ = plan.assumptions
        yield f"what matters most: {text} changes the rate by {change:+.0%}"
    yield from plan.notes


def command(name: str, best: Candidate) -> str:
    """What runs a candidate here."""
    choice = best.choice
    parts = ["moestro generate", *([] if name == "bundled" else [name])]
    parts += [f"--format {choice.format}"] if choice.format else []
    parts += [f"--memory {choice.memory}"] if choice.memory is not None else []
    parts += [f"--ep {choice.ep} --tp {choice.tp}"] if choice.ranks > 1 else []
    return " ".join(parts)


def rows_of(candidates: Sequence[Candidate]) -> list[str]:
    """The table's lines with their head."""
    return [COLUMNS.rstrip(), *(row(each) for each in candidates)]
