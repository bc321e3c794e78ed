"""How wrong the predictions are by which the CPU's implementations are chosen: predicted and measured, point by point.

    python benchmarks/predictions.py
    python benchmarks/predictions.py --layers olmoe --formats dense,mxfp4 --tokens 1,16,128

At each point the engine's best set and plain PyTorch are predicted as `moestro.explain` does, then forced and timed in
turns on the same inputs. MOESTRO_WITHOUT_FEATURES=avx512f asks the same of a processor without AVX-512.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.table import Table

import moestro
from moestro import machine, settings
from moestro.bench.layers import Layer, experts_that_fit, inputs, make_layer, named
from moestro.bench.measure import about
from moestro.bench.report import machine_line
from moestro.bench.timing import alternate, wall_clock
from moestro.cli.progress import wide_console
from moestro.cli.refusal import refusals
from moestro.errors import invalid_input, not_one_of
from moestro.ops import dispatch
from moestro.ops.expert_mlp import EXPERT_MLP, cpu
from sets import DTYPES, numbers

RESULTS = Path(__file__).parent / "results"
INPUTS = 4
SLOW = 4.0
"""An implementation that is predicted to take so many times the other's time is not run: its time decides nothing."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Point:
    """One implementation at one point; `seconds` is the median, None where it was not run."""

    layer: str
    format: str
    dtype: str
    num_tokens: int
    implementation: str
    predicted: float
    seconds: float | None
    chosen: bool

    @property
    def error(self) -> float | None:
        """What the prediction is off by, as a share of what was measured; below 0, it was too short."""
        return None if self.seconds is None else self.predicted / self.seconds - 1


@app.command()
def main(
    layers: Annotated[str, typer.Option(help="Named layers of the benchmark.")] = "olmoe,gpt-oss-20b,qwen3-30b-a3b",
    formats: Annotated[str, typer.Option(help="Of the weights.")] = "dense,int8,mxfp4,int4-g32,fp8-e4m3-b128",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens.")] = "1,4,16,128,512",
    dtype: Annotated[str, typer.Option(help="Of tokens and dense weights.")] = "bfloat16",
    seconds: Annotated[float, typer.Option(help="For each implementation at each point.")] = 0.5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Else in benchmarks/results.")] = None,
) -> None:
    """Predict, measure, and print by how much the predictions were off."""
    with refusals():
        if not settings.MEASURES:
            needs = "what is measured on this machine"
            raise invalid_input("predictions", got="MOESTRO_MEASURE=0", needs=needs, fix="Unset it.")
        if dtype not in DTYPES:
            raise not_one_of("predictions", "dtype", dtype, DTYPES)
        counts, specs = numbers(tokens), [named(name) for name in layers.split(",")]
        points: list[Point] = []
        for spec in specs:
            kind = getattr(torch, dtype)
            num_experts = experts_that_fit(spec, kind, machine.available_bytes(), max(counts))
            points += measure(make_layer(spec, kind, num_experts), formats.split(","), counts, seconds)
    found = {**about("cpu"), "command": " ".join(["python benchmarks/predictions.py", *sys.argv[1:]])}
    target = json_path or RESULTS / f"{datetime.date.today()}-predictions.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(point), "error": point.error} for point in points]
    target.write_text(json.dumps({**found, "points": rows}, indent=1) + "\n")
    console = wide_console()
    console.print(machine_line(found["machine"]))
    console.print(table(points))
    console.print(summary(points))
    console.print(f"kept in {target}")


@torch.inference_mode()
def measure(layer: Layer, formats: Iterable[str], tokens: Sequence[int], seconds: float) -> Iterator[Point]:
    """Two points for each format and number of tokens, of the engine and of plain torch."""
    for form in formats:
        weights = layer.in_format(form)
        for num_tokens in tokens:
            x, routings = inputs(layer, num_tokens, INPUTS)
            if cpu.too_busy(x, routings[0], weights):
                raise typer.BadParameter("threads wait for cores, so that nothing can be predicted")
            predicted = cpu.predictions(x, routings[0], weights)
            chosen = dispatch.prepare(EXPERT_MLP, x, routings[0], weights, "auto").implementation
            calls = {}
            for name, expected in predicted.items():
                if name != chosen and expected > SLOW * predicted[chosen]:
                    continue
                with moestro.use(implementation=name):
                    made = [dispatch.prepare(EXPERT_MLP, x, routing, weights, "auto") for routing in routings]
                calls[name] = [partial(p, x, r, weights, "auto") for p, r in zip(made, routings, strict=True)]
            times = alternate(calls, seconds, wall_clock())
            for name, expected in predicted.items():
                found = median(times[name]) if name in times else None
                kind = str(x.dtype).removeprefix("torch.")
                yield Point(layer.spec.name, form, kind, num_tokens, name, expected, found, name == chosen)
        layer.quantized.clear()


def table(points: Sequence[Point]) -> Table:
    """A row for each point."""
    made = Table(title="predicted and measured", title_justify="left", caption_justify="left")
    for name in ("layer", "weights", "T", "implementation", "predicted, ms", "measured, ms", "off by"):
        made.add_column(name, justify="right" if name in ("T", "off by") or "ms" in name else "left", no_wrap=True)
    for point in points:
        name = f"{point.implementation}{' *' if point.chosen else ''}"
        times = [f"{1e3 * point.predicted:.2f}", "-" if point.seconds is None else f"{1e3 * point.seconds:.2f}"]
        off = "-" if point.error is None else f"{point.error:+.0%}"
        made.add_row(point.layer, point.format, str(point.num_tokens), name, *times, off)
    made.caption = "* is chosen; a dash: not run, as it was predicted to take far longer"
    return made


def summary(points: Sequence[Point]) -> str:
    """How far predictions of what is chosen are off, and how often another would have been faster."""
    own = sorted(abs(point.error) for point in points if point.chosen and point.error is not None)
    missed = [point for point in points if not point.chosen and is_faster(point, points)]
    return (
        f"of what is chosen, {len(own)} points: off by {median(own):.0%} in the median, {own[-1]:.0%} at most; "
        f"the other one was faster at {len(missed)} of them"
    )


def is_faster(other: Point, points: Sequence[Point]) -> bool:
    """Whether what was not chosen took less than what was, by more than 3 %."""
    key = other.layer, other.format, other.dtype, other.num_tokens
    chosen = [p for p in points if p.chosen and (p.layer, p.format, p.dtype, p.num_tokens) == key]
    return any(p.seconds is not None and other.seconds is not None and other.seconds < 0.97 * p.seconds for p in chosen)


if __name__ == "__main__":
    app()
