"""What a profile found: as plain values, as tables of 80 columns for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from textwrap import wrap
from typing import Any

from moestro.profiling.loads import LayerLoad
from moestro.profiling.marks import STAGES, Phase

WIDTH = 80
_BARS = " ▁▂▃▄▅▆▇█"
_MOST_BINS = 32
_MOST_NAMED = 5
_LOADS = "load of experts"
_INSIDE = {"torch": "the sum over slots is inside experts", "reference": "grouping and the sum are inside experts"}


@dataclass(frozen=True)
class ProfileReport:
    """Everything one profile found.

    Attributes:
        command, date, machine, versions: of the run.
        model: its class, or what a command calls it.
        ran: implementations of `expert_mlp` that were seen.
        phases: of passes: "prompt" and "decode" of language models, "training", "forward" of other modules.
        layers: the expert layers that were run, in the order of the model.
        memory: of a model within a memory budget: lookups and hits of each phase, bytes read, seconds waited for.
        wire_bytes: that this rank sent to others, by what they are; empty where there are none.
        dropped_spans: that a trace lacks, since it would have grown too long.
    """

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    model: str
    ran: tuple[str, ...]
    phases: dict[str, Phase]
    layers: tuple[LayerLoad, ...]
    memory: dict[str, Any] | None
    wire_bytes: dict[str, int]
    dropped_spans: int

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps: the attributes by name, and of layers what follows from their counts."""
        layers = [
            {
                **vars(layer),
                "rows": layer.rows,
                "imbalance": layer.imbalance,
                "unused": layer.unused,
                "least_used": list(layer.least_used(_MOST_NAMED)),
                "dropped_share": layer.dropped_share,
            }
            for layer in self.layers
        ]
        phases = {name: {**asdict(phase), "total_seconds": phase.total} for name, phase in self.phases.items()}
        return {**vars(self), "layers": layers, "phases": phases}  # asdict would copy every count of pairs, twice

    @property
    def notes(self) -> list[str]:
        """What the stages mean here, in sentences."""
        inside = [_INSIDE.get(name, "grouping and the sum are inside experts, one call") for name in self.ran]
        notes = [f"{name}: {text}" for name, text in zip(self.ran, inside, strict=True)]
        return notes + ([f"the trace lacks {self.dropped_spans:,} spans"] if self.dropped_spans else [])


def headline(report: ProfileReport) -> list[str]:
    """Model and run, a line each."""
    shapes = dict.fromkeys(f"{layer.num_experts} experts, top {layer.top_k}" for layer in report.layers)
    return [
        f"model: {report.model}; {_many(len(report.layers), 'expert layer')} ({'; '.join(shapes) or 'none was run'})",
        *(
            f"{name}: {_many(phase.passes, 'pass')}, {_many(phase.tokens, 'token')}, {phase.total:.3f} s"
            for name, phase in report.phases.items()
        ),
    ]


def _many(count: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{count:,} {noun if count == 1 else plural}"


def text(report: ProfileReport) -> str:
    """The whole report for a terminal, at most 80 columns wide but for the model's name."""
    lines = [*headline(report), "", *_stage_lines(report)]
    if report.layers:
        lines += ["", *_layer_lines(report), ""]
    sentences = [*_named_lines(report), *_memory_lines(report), *_wire_lines(report), *report.notes]
    return "\n".join([*lines, *(line for each in sentences for line in wrap(each, WIDTH, subsequent_indent="  "))])


def _stage_lines(report: ProfileReport) -> Iterator[str]:
    """Milliseconds of a pass and shares, by stage; stages that nothing was spent in are left out."""
    phases = report.phases
    yield f"{'time of a pass':<16}" + "".join(f"{name:>14}{'':7}" for name in phases)
    for stage in (*STAGES, "total"):
        cells = [(phase.total if stage == "total" else phase.seconds[stage], phase) for phase in phases.values()]
        if any(seconds for seconds, _ in cells):
            yield f"{stage:<16}" + "".join(
                f"{seconds / phase.passes * 1e3:>11,.3f} ms{seconds / phase.total:>7.1%}" for seconds, phase in cells
            )


def _layer_lines(report: ProfileReport) -> Iterator[str]:
    """A line for each layer: the load of its experts as bars, the fullest of all layers full."""
    bins = min(_MOST_BINS, max(layer.num_experts for layer in report.layers))
    width = max(bins, len(_LOADS))
    most = max(max(_binned(layer, bins)) for layer in report.layers) or 1.0
    yield f"layer {_LOADS:<{width}}  max/mean unused least  entropy  dropped"
    for index, layer in enumerate(report.layers):
        bars = "".join(_BARS[math.ceil(load / most * 8)] for load in _binned(layer, bins))
        entropy = "-" if layer.router_entropy is None else f"{layer.router_entropy:.2f}"
        least = layer.least_used()[0]
        yield (
            f"{index:>5} {bars:<{width}}  {layer.imbalance:>8.2f} {layer.unused:>6}"
            f" {f'e{least}':>5}  {entropy:>7} {layer.dropped_share:>8.1%}"
        )


def _binned(layer: LayerLoad, bins: int) -> list[float]:
    """Loads over their mean, the fullest of each bin of neighbours."""
    mean = max(layer.rows / layer.num_experts, 1e-9)
    edges = [round(i * layer.num_experts / bins) for i in range(bins + 1)]
    return [max(layer.loads[a:b], default=0) / mean for a, b in pairwise(edges)]


def _named_lines(report: ProfileReport) -> Iterator[str]:
    """The least used experts of all layers, and the pairs that go together most often."""
    if not report.layers:
        return
    unused = sum(layer.unused for layer in report.layers)
    experts = sum(layer.num_experts for layer in report.layers)
    yield f"experts without a row: {unused} of {experts}"
    shares = [
        (layer.loads[e] / max(layer.tokens, 1), index, e)
        for index, layer in enumerate(report.layers)
        for e in layer.least_used(_MOST_NAMED)
    ]
    rare = ", ".join(f"{index}:e{e} {share:.1%}" for share, index, e in sorted(shares)[:_MOST_NAMED])
    yield f"least used (of tokens): {rare}"
    pairs = [
        (tokens / max(layer.tokens, 1), index, a, b)
        for index, layer in enumerate(report.layers)
        for a, b, tokens in layer.pairs()
    ]
    often = ", ".join(f"{i}:e{a}+e{b} {share:.1%}" for share, i, a, b in sorted(pairs, reverse=True)[:_MOST_NAMED])
    if often:
        yield f"together (of tokens): {often}"


def _memory_lines(report: ProfileReport) -> Iterator[str]:
    if report.memory is None:
        return
    for name in ("prompt", "decode"):
        part = report.memory[name]
        if part["lookups"]:
            yield f"memory, {name}: {part['hits'] / part['lookups']:.1%} of {part['lookups']:,} lookups hit"
    read = report.memory["bytes_from_files"] / 1e6
    yield f"memory: {read:,.1f} MB read, {report.memory['seconds_waiting']:.2f} s waited for"


def _wire_lines(report: ProfileReport) -> Iterator[str]:
    if report.wire_bytes:
        parts = ", ".join(f"{kind} {count / 1e6:,.3f}" for kind, count in sorted(report.wire_bytes.items()))
        yield f"sent to other ranks, MB: {parts}"
