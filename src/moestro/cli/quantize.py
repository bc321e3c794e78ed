"""`moestro quantize`: arguments in, a table out; the work is in `moestro.checkpoint.quantize`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.filesize import decimal

from moestro.cli.progress import bar, named_values
from moestro.cli.refusal import refusals
from moestro.cli.sizes import parse_bytes
from moestro.errors import invalid_input

if TYPE_CHECKING:
    from moestro.checkpoint import Checkpoint, ExpertSource
    from moestro.checkpoint.quantize import Report
    from moestro.formats.encode import Search

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as shells know it."""


def quantize(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A model's folder: config.json and safetensors files.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make.")],
    format: Annotated[str, typer.Option(help="Of the experts: mxfp4, int4-g128, fp8-e4m3-b128, ...")],
    override: Annotated[list[str] | None, typer.Option(help='"*.layers.0.*=int8"; the last match decides.')] = None,
    search: Annotated[str, typer.Option(help="Of scales: nearest, or mse (slower, errs less).")] = "nearest",
    checksums: Annotated[bool, typer.Option("--checksums", help="Write SHA-256s, which loading checks.")] = False,
    shard_size: Annotated[str, typer.Option(help="The most tensor bytes a file: 5GB, 500MB, 2GiB.")] = "5GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and show no progress.")] = False,
) -> None:
    """Store the experts of a checkpoint in fewer bits, in a new folder that loads like any other.

    Routers, attention and everything else are copied as they are. A run that stops, for whatever reason, is continued
    by the same command; if the result is there already, nothing is written.
    For instance: moestro quantize SRC DST --format mxfp4
    """
    with refusals():
        overrides = _overrides(override or [])
        shard_bytes = parse_bytes("quantize", "--shard-size", shard_size, least=1)
        from moestro.checkpoint.quantize import Job, quantize_checkpoint
        from moestro.checkpoint.resume import partial_folder
        from moestro.checkpoint.scheme import Scheme

        scheme = Scheme(format, overrides, cast("Search", search))
        checkpoint, experts = _read(source)
        job = Job(source, checkpoint, experts, destination, scheme, shard_bytes, checksums)
        try:
            with bar("", not as_json and sys.stderr.isatty(), in_bytes=True) as update:
                report = quantize_checkpoint(
                    job, lambda at: update(f"file {at.shard} of {at.num_shards}", at.written, at.total)
                )
        except KeyboardInterrupt:
            where = partial_folder(destination)
            typer.echo(f"Stopped. What is finished is in {where}; the same command continues it.", err=True)
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(asdict(report), default=str))
    else:
        _print(report)


def _overrides(texts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        pattern, equals, name = text.rpartition("=")
        if not (pattern and equals and name):
            raise invalid_input(
                "quantize",
                got=f"override {text!r}",
                needs="a pattern, = and a format",
                fix='For instance "*.layers.0.*=int8", in quotes.',
            )
        found.pop(pattern, None)  # a pattern given again counts where it is given last
        found[pattern] = name
    return found


def _read(source: Path) -> tuple[Checkpoint, list[ExpertSource]]:
    """The tensors of a model's folder, and its experts among them."""
    if not (source / "config.json").is_file():
        raise invalid_input(
            "quantize",
            got=f"source {source}, {'which holds no config.json' if source.exists() else 'where there is nothing'}",
            needs="a model's folder",
            fix="A model on the hub is downloaded by `hf download NAME --local-dir FOLDER`.",
        )
    from moestro.hf.sources import read_sources
    from moestro.hf.text_model import quiet_transformers

    with quiet_transformers():
        _, checkpoint, experts = read_sources(source)
    return checkpoint, experts


def _print(report: Report) -> None:
    from rich.console import Console

    resumed = f", {report.num_resumed} of them by an earlier run" if report.num_resumed else ""
    rows = {
        "files": f"{report.num_shards}{resumed if not report.complete_before else ''}",
        "tensors": f"{report.num_tensors}",
        "projections": ", ".join(f"{count} in {name}" for name, count in report.formats.items()),
        "all tensors": _change(report.bytes_before, report.bytes_after),
        "experts": _change(report.expert_bytes_before, report.expert_bytes_after),
        "bits per weight": f"{report.bits_per_weight:.3f} (experts, scales included)",
        "time": f"{report.seconds:.1f} s",
    }
    console = Console(highlight=False)
    done = "is complete already; nothing was written" if report.complete_before else "is complete"
    console.print(f"{report.destination} {done}", soft_wrap=True)
    console.print(named_values(rows.items()))


def _change(before: int, after: int) -> str:
    sizes = (decimal(nbytes, precision=2) for nbytes in (before, after))
    return f"{' -> '.join(sizes)} ({100 * after / max(before, 1):.1f}%)"
