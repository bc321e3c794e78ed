"""The native engine's instruction sets in turns on one layer, beside a plain read of its weights.

    python benchmarks/sets.py
    python benchmarks/sets.py --sets avx512-vnni,avx512-bf16 --formats dense,mxfp4 --tokens 1,16,128

Each set that the processor has is forced by its name, as `moestro.use` does, and called on the same inputs in turns.
The last line of a point reads the bytes of the experts that it touches and computes nothing: the roof of memory, in the
same rounds. Outputs are compared with the float32 reference first; where one disagrees there is no time and no ratio.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor

import moestro
from moestro import ExpertWeights, Routing, machine
from moestro.bench.layers import (
    DENSE,
    Layer,
    LayerSpec,
    active_experts,
    expected_output,
    experts_that_fit,
    inputs,
    make_layer,
    named,
)
from moestro.bench.measure import about
from moestro.bench.peers import PlainRead, tensors_of
from moestro.bench.report import machine_line
from moestro.bench.timing import alternate, ratio, ratio_text, wall_clock
from moestro.cli.progress import wide_console
from moestro.cli.refusal import refusals
from moestro.errors import MoestroError, invalid_input, not_one_of
from moestro.ops import dispatch, native
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.tolerances import LOW_PRECISION_INPUT, disagreement, too_far

RESULTS = Path(__file__).parent / "results"
TOKENS = "1,4,16,64,128,512"
DTYPES = ("float32", "bfloat16", "float16")
INPUTS = 4
READ = "plain read"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Row:
    """One set at one point, or the plain read of its weights; what was not measured is None.

    Attributes:
        format: of the weights; "mxfp4/int8" is mxfp4 with the input format int8.
        status, reason: "ok", "wrong output" or "skipped", and why.
        microseconds, low, high: median and quartiles of `samples` calls.
        gigabytes_per_second: bytes of the experts that a call touches, read once, over the median.
        read_share: how much of the median a plain read of the same bytes takes, in the same rounds.
        ratio, ratio_low, ratio_high: time over the first set's, median and quartiles over the rounds.
    """

    format: str
    num_tokens: int
    name: str
    status: str = "ok"
    reason: str | None = None
    samples: int = 0
    microseconds: float | None = None
    low: float | None = None
    high: float | None = None
    gigabytes_per_second: float | None = None
    read_share: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


@app.command()
def main(
    layer: Annotated[str, typer.Option(help="A named layer of the benchmark.")] = "olmoe",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens.")] = TOKENS,
    formats: Annotated[str, typer.Option(help="Of the weights: dense, mxfp4, int8, mxfp4/int8, ...")] = DENSE,
    dtype: Annotated[str, typer.Option(help="Of tokens and dense weights.")] = "bfloat16",
    sets: Annotated[str, typer.Option(help="avx512-vnni,avx512-bf16, ...; or all that the processor has.")] = "all",
    seconds: Annotated[float, typer.Option(help="For each set at each point.")] = 1.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Else benchmarks/results/<date>-sets-LAYER.")] = None,
) -> None:
    """Time the engine's instruction sets against each other; exit code 1 where an output was wrong."""
    with refusals():
        spec, names = named(layer), chosen(sets)
        if dtype not in DTYPES:
            raise not_one_of("sets", "dtype", dtype, DTYPES)
        kind, counts = getattr(torch, dtype), numbers(tokens)
        num_experts = experts_that_fit(spec, kind, machine.available_bytes(), max(counts))
        rows = measure(make_layer(spec, kind, num_experts), formats.split(","), counts, names, seconds)
    found = {**about("cpu"), "command": " ".join(["python benchmarks/sets.py", *sys.argv[1:]]), "layer": layer}
    target = json_path or RESULTS / f"{datetime.date.today()}-sets-{layer}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({**found, "dtype": dtype, "rows": [*map(asdict, rows)]}, indent=1) + "\n")
    console = wide_console()
    console.print(machine_line(found["machine"]))
    for made in tables(spec, dtype, rows):
        console.print(made)
    console.print(f"kept in {target}")
    if any(row.status == "wrong output" for row in rows):
        raise typer.Exit(1)


def numbers(text: str) -> tuple[int, ...]:
    """Numbers of tokens, or an InvalidInputError that names the part that is none."""
    parts = text.split(",")
    if wrong := [part for part in parts if not part.strip().isdecimal() or not int(part)]:
        got = f"tokens {', '.join(map(repr, wrong))}"
        raise invalid_input("sets", got=got, needs="whole numbers of at least 1", fix=f"Default: {TOKENS}.")
    return tuple(map(int, parts))


def chosen(text: str) -> list[str]:
    """The sets of these names, or all, that this processor has, best first.

    Raises:
        InvalidInputError: a name that the engine does not know, or none that runs here.
    """
    known = {isa.name: isa for isa in native.ISAS}
    names = list(known) if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            raise not_one_of("sets", "set", name, known, "Or 'all'.")
    here = [name for name in names if known[name].runs_here]
    if not here:
        needs = f"one that this processor has: {', '.join(n for n, isa in known.items() if isa.runs_here)}"
        raise invalid_input("sets", got=f"sets {', '.join(names) or 'of no engine'}", needs=needs, fix="Leave it out.")
    return here


@torch.inference_mode()
def measure(
    layer: Layer, formats: Iterable[str], tokens: Sequence[int], sets: Sequence[str], seconds: float
) -> list[Row]:
    """A row for each set and one for the read, at each number of tokens and in each format."""
    rows: list[Row] = []
    for form in formats:
        stored, _, input_format = form.partition("/")
        weights = replace(layer.in_format(stored), input_format=input_format or "float")
        for num_tokens in tokens:
            x, routings = inputs(layer, num_tokens, INPUTS)
            rows += _point(layer, Row(form, num_tokens, READ), weights, (x, routings), (sets, seconds))
        layer.quantized.clear()
    return rows


def _point(
    layer: Layer,
    read: Row,
    weights: ExpertWeights,
    given: tuple[Tensor, list[Routing]],
    how: tuple[Sequence[str], float],
) -> list[Row]:
    (x, routings), (sets, seconds) = given, how
    expected = expected_output(layer, x, routings[0], read.format.partition("/")[0])
    verdicts, calls = {}, {}
    for name in sets:
        verdicts[name], made = _checked(name, (x, routings), weights, expected)
        if made:
            calls[name] = made
    calls[READ] = [PlainRead(tensors_of(weights, routing)) for routing in routings]
    times = alternate(calls, seconds, wall_clock())
    nbytes = active_experts(routings[0].expert_ids) * weights.bytes_per_expert
    rows = [replace(read, name=name, status=status, reason=reason) for name, (status, reason) in verdicts.items()]
    first = next((name for name in sets if name in calls), None)
    return [timed(row, times, nbytes, first) if row.name in times else row for row in (*rows, read)]


def _checked(
    name: str, given: tuple[Tensor, list[Routing]], weights: ExpertWeights, expected: Tensor
) -> tuple[tuple[str, str | None], list[partial[Tensor]]]:
    """Status and reason of a set, and its calls, if its output is right."""
    x, routings = given
    try:
        with moestro.use(implementation=f"cpu-{name}"):
            prepared = [dispatch.prepare(EXPERT_MLP, x, routing, weights, "auto") for routing in routings]
    except MoestroError as error:
        return ("skipped", str(error)), []
    calls = [partial(p, x, routing, weights, "auto") for p, routing in zip(prepared, routings, strict=True)]
    if weights.input_format == "float":
        wrong = disagreement(calls[0](), expected, x.dtype)
    else:
        wrong = too_far(calls[0](), expected, LOW_PRECISION_INPUT)
    return (("ok", None), calls) if wrong is None else (("wrong output", wrong), [])


def timed(row: Row, times: dict[str, list[float]], nbytes: int, first: str | None) -> Row:
    """The row with its times, and their ratios to the first set's where it is another."""
    own = times[row.name]
    low, middle, high = (1e6 * t for t in quantiles(own, n=4, method="inclusive"))
    against = None if first in (None, row.name) else ratio(own, times[str(first)])
    return replace(
        row,
        samples=len(own),
        microseconds=middle,
        low=low,
        high=high,
        gigabytes_per_second=nbytes / middle / 1e3,
        read_share=median(times[READ]) / median(own),
        ratio=None if against is None else against.median,
        ratio_low=None if against is None else against.low,
        ratio_high=None if against is None else against.high,
    )


def tables(spec: LayerSpec, dtype: str, rows: Sequence[Row]) -> list[Table]:
    """A table for each format."""
    found = []
    for form in dict.fromkeys(row.format for row in rows):
        own = [row for row in rows if row.format == form]
        sizes = f"H {spec.hidden_size}, I {spec.intermediate_size}, E {spec.num_experts}, K {spec.top_k}"
        made = Table(title=f"{spec.name} {form}, x in {dtype} ({sizes})", title_justify="left", caption_justify="left")
        for name in ("T", "set", "us", "quartiles", "GB/s", "read / time", "time / first set's"):
            made.add_column(name, justify="left" if name == "set" else "right", no_wrap=True)
        for row in own:
            made.add_row(*cells(row), end_section=row.name == READ)
        reasons = dict.fromkeys(f"{row.name}: {row.reason}" for row in own if row.reason is not None)
        made.caption = "\n".join(reasons) or None
        found.append(made)
    return found


def cells(row: Row) -> list[str]:
    """The row of a table: what was not measured is a dash, or the status."""
    start = [str(row.num_tokens), row.name]
    if row.microseconds is None:
        return [*start, row.status, *"----"]
    ratios = (row.ratio, row.ratio_low, row.ratio_high)
    against = "-" if None in ratios else ratio_text(*ratios)
    spread = f"{row.low:,.0f}-{row.high:,.0f}"
    rates = [f"{row.gigabytes_per_second:.1f}", f"{row.read_share:.0%}"]
    return [*start, f"{row.microseconds:,.0f}", spread, *rates, against]


if __name__ == "__main__":
    app()
