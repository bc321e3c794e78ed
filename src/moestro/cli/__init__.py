"""The command line: argument parsing and printing only. What a command needs is imported when it runs."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer

import moestro
from moestro.cli import bench, cache, chat, generate, info, plan, profile, quality, quantize, serve, simulate, streams

app = typer.Typer(
    help="Run Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    generate.generate,
    chat.chat,
    serve.serve,
    info.info,
    quantize.quantize,
    quality.quality,
    profile.profile,
    plan.plan,
    simulate.simulate,
    cache.cache,
):
    app.command()(_command)
app.add_typer(bench.app, name="bench")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"moestro {moestro.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run Mixture-of-Experts models."""


def main() -> None:
    """What the `moestro` script and ``python -m moestro`` run."""
    sys.exit(streams.run(partial(app, prog_name="moestro")))
