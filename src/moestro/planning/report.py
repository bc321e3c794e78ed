"""A plan as text for a terminal and as plain values."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from moestro.hf.text_model import bundled_folder
from moestro.memory.amounts import shown_bytes
from moestro.planning.model import Model
from moestro.planning.predict import Times
from moestro.planning.search import Candidate

if TYPE_CHECKING:
    from moestro.planning import Plan

WIDTH = 80
MOST_ROWS = 12
MOST_NAME = 40
"""Characters of a model's name in the headline."""
COLUMNS = f"{'experts':<16}{'batch':>5}{'ep x tp':>8}{'memory':>10}{'on disk':>10}{'prompt/s':>9}{'new/s':>8} bound"


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
    lines = [*_wrapped(headline(plan)), "", COLUMNS]
    lines += [row(each) for each in plan.candidates[:MOST_ROWS]]
    if len(plan.candidates) > MOST_ROWS:
        lines.append(f"and {len(plan.candidates) - MOST_ROWS} more")
    lines += ["", *times_lines(best), ""]
    return "\n".join([*lines, *_wrapped((memory_line(best), *sentences(plan)))])


def _wrapped(lines: Iterable[str]) -> list[str]:
    """Lines of at most 80 columns, but for a path that is longer: names and commands can be copied."""
    return [
        part
        for each in lines
        for part in wrap(each, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    ]


def headline(plan: Plan) -> list[str]:
    """Model and machine, a line each."""
    model, machine, size = plan.model, plan.machine, plan.model.layers[0].size
    unit = "threads" if machine.is_here else "devices"
    devices = "" if machine.devices == 1 else f", {machine.devices} {unit}"
    load = plan.best.load
    name = model.name if len(model.name) <= MOST_NAME else f"...{model.name[3 - MOST_NAME :]}"
    forms = " and ".join(dict.fromkeys(layer.format for layer in model.layers))
    return [
        f"model: {name}; {len(model.layers)} expert layers ({size.experts} experts, top {size.top_k}), {forms}",
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
        f"{form:<16}{each.load.batch:>5}{ranks:>8}{shown_bytes(need.device):>10}{disk:>10}"
        f"{_rate(each.prompt_rate):>9}{_rate(each.decode_rate):>8} {each.decode.bound}"
    )


def _rate(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:,.2f}M"
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
    yield f"to run it: {_threads(plan)}{command(plan.model, best, plan.projections)}"
    if best.choice.ranks > 1 and best.load.batch > 1:
        yield "sequences at once over ranks are for Python, moestro.load(..., device=mesh): moestro generate takes one"
    if best.block_size is not None:
        yield f"strategy: {best.strategy} for new tokens, blocks of {best.block_size} rows for prompts"
    if best.choice.ranks > 1 and not plan.machine.is_here:
        others = "all-to-all, by ep_implementation of Transformers; moestro generate has all-reduce"
        yield f"dispatcher: {others if best.dispatcher == 'all-to-all' else best.dispatcher}"
    if plan.assumptions:
        (text, change), *_ = plan.assumptions
        yield f"what matters most: {text} changes the rate by {change:+.0%}"
    yield from plan.notes


def _threads(plan: Plan) -> str:
    """What gives each process of this machine its share of the threads; torchrun gives each one."""
    each = plan.machine.devices // plan.best.choice.ranks
    return f"OMP_NUM_THREADS={each} " if plan.machine.is_here and plan.best.choice.ranks > 1 and each > 1 else ""


def command(model: Model, best: Candidate, projections: str) -> str:
    """What runs a candidate where the model's files are; a prompt is to be put in place of PROMPT."""
    choice, form, parts = best.choice, best.choice.format, []
    folder = None if model.folder == str(bundled_folder()) else shlex.quote(model.folder)
    if best.why_not_run is not None:
        parts.append(f"moestro quantize {shlex.quote(model.folder)} OUT --format {form} &&")
        folder, form = "OUT", None
    run = "moestro generate" if choice.ranks == 1 else f"torchrun --nproc-per-node {choice.ranks} -m moestro generate"
    parts.append(f"{run} PROMPT" + ("" if folder is None else f" --model {folder}"))
    parts += [f"--format {form}"] if form else []
    parts += [f"--memory {choice.memory}"] if choice.memory is not None else []
    parts += [f"--ep {choice.ep} --tp {choice.tp}"] if choice.ranks > 1 else []
    parts += [f"--batch {best.load.batch}"] if best.load.batch > 1 and choice.ranks == 1 else []
    parts += [f"--projections {projections}"] if projections != "auto" else []
    return " ".join(parts)
