"""`moestro bench`: arguments in, tables out; the work is in `moestro.bench`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moestro.cli import bench_model
from moestro.cli.progress import points, waiting, wide_console
from moestro.cli.refusal import check_targets, refusals
from moestro.cli.simulate import exponent_of
from moestro.errors import invalid_input

if TYPE_CHECKING:
    from rich.console import Console

    from moestro.bench import Report
    from moestro.bench.ranks_records import RanksReport
    from moestro.bench.scale import ScalePlan

app = typer.Typer(help="Time moestro against its peers, under this machine's measured roof.", no_args_is_help=True)

TOKENS = "1,4,16,128,512,2048"
QUICK_TOKENS = "1,16,128"
RANK_DISPATCHERS = "all-to-all, exact, all-gather, cheapest; int8, fp8-e4m3: rows in 8 bits."
SECONDS = 1.0
QUICK_SECONDS = 0.1
QUICK_BUDGET = 40.0
"""Seconds for all points of a quick run. Starting and measuring the roof come before."""


@app.callback()
def bench() -> None:
    """Time moestro against its peers, under this machine's measured roof."""


@app.command()
def layer(
    layers: Annotated[list[str] | None, typer.Option("--layer", help="Named layers, or all; else olmoe.")] = None,
    tokens: Annotated[str | None, typer.Option(help=f"Numbers of tokens; else {TOKENS}.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Of x and dense weights: float32, bfloat16, float16.")
    ] = "float32,bfloat16",
    formats: Annotated[str, typer.Option(help="Of moestro's weights: dense, mxfp4, int8, ...")] = "dense",
    variant: Annotated[
        str, typer.Option(help="auto, grouped, blockwise, blockwise-64, selective, all_experts.")
    ] = "auto",
    peers: Annotated[str, typer.Option(help="Names of peers, or all, or none.")] = "all",
    seconds_per_point: Annotated[float | None, typer.Option(help=f"For each variant; else {SECONDS}.")] = None,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help=f"T = {QUICK_TOKENS}; under a minute.")] = False,
    json_path: Annotated[str | None, typer.Option("--json", help="Write the report as JSON; - is stdout.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a roofline picture (.png, .svg, .pdf).")] = None,
) -> None:
    """Microseconds, GB/s, GFLOP/s, shares of bandwidth and peak, and the ratio to each peer of as many bits.

    Lists are separated by commas. Every output is checked against the float32 reference first; where one is wrong its
    ratio is refused and the exit code is 1. Bad arguments end with exit code 2.
    For instance: moestro bench layer --layer gpt-oss-20b --tokens 1,16
    """
    import torch

    from moestro.bench import LAYERS, Plan, ours, run
    from moestro.bench.layers import named
    from moestro.bench.peers import named_peers, outside, plain_reads

    names = _split(*(layers or ["olmoe"]))
    with refusals():
        check_targets("bench layer", plot, Path(json_path) if json_path not in (None, "-") else None)
        plan = Plan(
            layers=tuple(map(named, LAYERS if names == ["all"] else names)),
            tokens=_counts(tokens or (QUICK_TOKENS if quick else TOKENS), "bench layer", TOKENS),
            dtypes=tuple(vars(torch).get(name, name) for name in _split(dtype)),
            ours=tuple(ours(strategy, format) for format in _split(formats) for strategy in _split(variant)),
            peers=tuple(named_peers(_split(peers))),
            seconds=seconds_per_point if seconds_per_point is not None else QUICK_SECONDS if quick else SECONDS,
            device=device,
            budget=QUICK_BUDGET if quick else None,
        )
        plan = replace(plan, reads=plain_reads(plan.ours, plan.device))
        with points(len(plan.points())) as on_point:
            report = run(plan, on_point)
    if peers == "all" and (why := outside.missing()) is not None:
        report.notes.setdefault("run", []).append(why)
    if json_path is not None:
        text = json.dumps(report.as_json(), indent=1) + "\n"
        typer.echo(text, nl=False) if json_path == "-" else Path(json_path).write_text(text)
    _print(report, wide_console(stderr=json_path == "-"), plot)
    if report.wrong:
        raise typer.Exit(1)


@app.command()
def parallel(
    processes: Annotated[int | None, typer.Option(help="Started here; else 2. Not under torchrun.")] = None,
    layer: Annotated[str, typer.Option(help="A named layer.")] = "olmoe",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens of all processes together.")] = "512",
    dispatcher: Annotated[str, typer.Option(help=RANK_DISPATCHERS)] = "all-to-all,all-gather",
    dtype: Annotated[str, typer.Option(help="Of x and dense weights: float32, bfloat16, float16.")] = "bfloat16",
    format: Annotated[str, typer.Option(help="Of the weights: dense, mxfp4, int8, ...")] = "dense",
    load: Annotated[str, typer.Option(help="uniform, or zipf:EXPONENT.")] = "uniform",
    threads: Annotated[int, typer.Option(help="Of each process.")] = 1,
    seconds_per_point: Annotated[float, typer.Option(help="For each dispatcher and number of tokens.")] = 2.0,
    json_path: Annotated[str | None, typer.Option("--json", help="Write the report as JSON; - is stdout.")] = None,
) -> None:
    """Bytes on the wire beside the fewest, imbalance and time per stage of a layer over several processes.

    It starts processes of this machine, or is started by torchrun; rank 0 prints. Every output is checked first; where
    one is wrong the exit code is 1. Bad arguments end with exit code 2.
    For instance: moestro bench parallel --processes 2 --tokens 64,512
    """
    import torch

    from moestro.bench.layers import named
    from moestro.bench.ranks import RankPlan, in_job, launch, measure

    with refusals():
        check_targets("bench parallel", None, Path(json_path) if json_path not in (None, "-") else None)
        plan = RankPlan(
            spec=named(layer, "bench parallel"),
            tokens=_counts(tokens, "bench parallel", "512"),
            dispatchers=tuple(_split(dispatcher)),
            dtype=vars(torch).get(dtype, dtype),
            format=format,
            exponent=exponent_of(load, "bench parallel"),
            seconds=seconds_per_point,
            threads=threads,
        )
        joined = in_job()
        if joined and processes is not None:
            got, needs = f"--processes {processes} under torchrun", "those that torchrun started"
            raise invalid_input("bench parallel", got=got, needs=needs, fix="Leave it out.")
        with waiting("measuring on every process"):
            report = measure(plan) if joined else launch(plan, 2 if processes is None else processes)
    if joined and report.rank > 0:
        raise typer.Exit(1 if report.wrong else 0)
    _print_ranks(report, json_path)
    if report.wrong:
        raise typer.Exit(1)


@app.command()
def scale(
    layer: Annotated[str, typer.Option(help="A named layer.")] = "olmoe",
    experts: Annotated[str | None, typer.Option(help="Values of E; else a quarter to twice the layer's own.")] = None,
    top_k: Annotated[str | None, typer.Option(help="Values of K; else 1,2,4,8 and the layer's own.")] = None,
    tokens: Annotated[str | None, typer.Option(help=f"Values of T; else {TOKENS}.")] = None,
    at_tokens: Annotated[int, typer.Option(help="T while E or K is varied.")] = 16,
    dtype: Annotated[str, typer.Option(help="Of x and dense weights: float32, bfloat16, float16.")] = "bfloat16",
    formats: Annotated[str, typer.Option(help="Of the weights: dense, mxfp4, int8, ...")] = "dense",
    seconds_per_point: Annotated[float | None, typer.Option(help=f"For each format; else {SECONDS}.")] = None,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help=f"T = {QUICK_TOKENS}; under a minute.")] = False,
    json_path: Annotated[str | None, typer.Option("--json", help="Write the report as JSON; - is stdout.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (.png, .svg, .pdf).")] = None,
) -> None:
    """How time and memory of a layer grow with its experts E, with experts a token K, and with tokens T.

    One of the three is varied at a time; the others are the layer's own, and T is --at-tokens. Lists are separated by
    commas. Every output is checked first; where one is wrong the exit code is 1. Bad arguments end with exit code 2.
    For instance: moestro bench scale --formats dense,int8 --plot scale.png
    """
    import torch

    from moestro.bench import ours
    from moestro.bench import scale as library
    from moestro.bench.layers import named

    with refusals():
        check_targets("bench scale", plot, Path(json_path) if json_path not in (None, "-") else None)
        spec = named(layer, "bench scale")
        plan = library.ScalePlan(
            spec,
            _given(experts, library.default_experts(spec)),
            _given(top_k, library.default_top_k(spec)),
            _counts(tokens or (QUICK_TOKENS if quick else TOKENS), "bench scale", TOKENS),
            tuple(ours("auto", format) for format in _split(formats)),
            at_tokens,
            vars(torch).get(dtype, dtype),
            seconds_per_point if seconds_per_point is not None else QUICK_SECONDS if quick else SECONDS,
            device,
            QUICK_BUDGET if quick else None,
        )
        _run_scale(plan, json_path, plot)


def _given(text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    return default if text is None else _counts(text, "bench scale", ",".join(map(str, default)))


def _run_scale(plan: ScalePlan, json_path: str | None, plot: Path | None) -> None:
    from moestro.bench.scale import scale as run
    from moestro.bench.scale_report import headline, scale_plot, tables

    with points(plan.num_different) as on_point:
        report = run(plan, on_point)
    if json_path is not None:
        text = json.dumps(report.as_json(), indent=1) + "\n"
        typer.echo(text, nl=False) if json_path == "-" else Path(json_path).write_text(text)
    console = wide_console(stderr=json_path == "-")
    console.print(*headline(report), sep="\n", soft_wrap=True)
    for table in tables(report):
        console.print(table)
    for row in report.wrong:
        console.print(f"wrong output: {row.variant}, E={row.num_experts} K={row.top_k} T={row.num_tokens}", style="red")
    if plot is not None and any(point.row.microseconds for point in report.points):
        scale_plot(report, plot)
        console.print(f"picture: {plot}")
    if report.wrong:
        raise typer.Exit(1)


app.command()(bench_model.model)


def _print_ranks(report: RanksReport, json_path: str | None) -> None:
    from moestro.bench.ranks_report import cost_lines, error_lines, headline, pairs_table, stages_table

    if json_path is not None:
        text = json.dumps(report.as_json(), indent=1) + "\n"
        typer.echo(text, nl=False) if json_path == "-" else Path(json_path).write_text(text)
    console = wide_console(stderr=json_path == "-")
    console.print(*headline(report), sep="\n")
    for table in (stages_table(report), pairs_table(report)):
        if table is not None:
            console.print(table)
    console.print(*cost_lines(report), *error_lines(report), sep="\n")
    for text in report.wrong:
        console.print(f"wrong output: {text}", style="red")


def _split(*values: str) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def _counts(text: str, operation: str, default: str) -> tuple[int, ...]:
    parts = _split(text)
    if wrong := [part for part in parts if not part.isdecimal() or not int(part)]:
        got, needs = f"tokens {', '.join(map(repr, wrong))}", "whole numbers of at least 1"
        raise invalid_input(operation, got=got, needs=needs, fix=f"Default: {default}.")
    return tuple(map(int, parts))


def _print(report: Report, console: Console, plot: Path | None) -> None:
    from moestro.bench.plot import roofline
    from moestro.bench.report import machine_line, roof_lines, tables

    console.print(machine_line(report.machine), *roof_lines(report), *report.notes.get("run", []), sep="\n")
    for table in tables(report):
        console.print()
        console.print(table)
    for row in report.wrong:
        console.print(f"wrong output: {row.variant}, {row.layer} {row.dtype} T={row.num_tokens}", style="red")
    if plot is not None and any(row.status == "ok" for row in report.rows):
        roofline(report, plot)
        console.print(f"roofline: {plot}")
