"""`moestro cache`: arguments in, a table out; the work is in `moestro.memory`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from moestro.cli.progress import waiting, wide_console
from moestro.cli.refusal import check_targets, refusals
from moestro.cli.sizes import parse_bytes
from moestro.errors import invalid_input

_PER_SECOND = "/s"


def cache(
    traces: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Recorded by generate --trace, or .csv.")],
    budget: Annotated[str | None, typer.Option(help="Of slots, e.g. 4GB,8GB; else from the least to all.")] = None,
    policy: Annotated[str | None, typer.Option(help="expected, lru, lfu, layer_lfu, belady; else all.")] = None,
    disk: Annotated[str | None, typer.Option(help="The rate that experts are read at, e.g. 2GB/s.")] = None,
    expert_bytes: Annotated[str | None, typer.Option(help="Of a .csv file: the bytes of one expert.")] = None,
    experts: Annotated[int | None, typer.Option(help="Of a .csv file: experts of a layer; else by its ids.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and no table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (.png, .svg, .pdf).")] = None,
) -> None:
    """Replay recorded routing under budgets and policies: how many experts would have been there, what is read.

    Several files are one run after the other, of one model. Lists are separated by commas. Tokens per second are
    those at which reading alone would go on, at the rate of --disk; without it nothing is said of them. What cannot be
    replayed ends with one line and exit code 2.
    For instance: moestro cache run.npz --budget 4GB,8GB --disk 2GB/s
    """
    with refusals():
        check_targets("cache", plot, None)
        from moestro.bench.cache_report import CacheReport, headline, table
        from moestro.memory import compare, merged, read_trace

        size = None if expert_bytes is None else parse_bytes("cache", "--expert-bytes", expert_bytes, least=1)
        rate = None if disk is None else _rate(disk)
        budgets = None if budget is None else [parse_bytes("cache", "--budget", part) for part in _split(budget)]
        with waiting("replaying"):
            trace = merged([read_trace(path, size, experts) for path in traces])
            rows = compare(trace, budgets, None if policy is None else _split(policy), rate)
        found = CacheReport.of(trace, rows, rate)
        if as_json:
            typer.echo(json.dumps(found.as_json()))
        else:
            console = wide_console()
            console.print(*headline(found), sep="\n", soft_wrap=True, markup=False)
            console.print(table(found))
        if plot is not None:
            from moestro.bench.cache_plot import cache_plot

            cache_plot(found, plot)


def _rate(text: str) -> float:
    """Bytes a second of "2GB/s"."""
    if not text.strip().endswith(_PER_SECOND):
        raise invalid_input("cache", got=f"--disk {text!r}", needs="bytes a second", fix="For instance 2GB/s.")
    return float(parse_bytes("cache", "--disk", text.strip().removesuffix(_PER_SECOND), least=1))


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
