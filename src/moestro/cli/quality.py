"""`moestro quality`: arguments in, a table out; the work is in `moestro.hf.quality`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moestro.cli.progress import bar, wide_console
from moestro.cli.refusal import check_targets, refusals
from moestro.errors import invalid_input

if TYPE_CHECKING:
    from moestro.quality.report import QualityReport


def quality(
    model: Annotated[str | None, typer.Argument(help="A local folder or a hub id; else the bundled model.")] = None,
    formats: Annotated[list[str] | None, typer.Option("--format", help="mxfp4, int8, ...; may be repeated.")] = None,
    all_formats: Annotated[bool, typer.Option("--all-formats", help="Every one that can store the experts.")] = False,
    search: Annotated[list[str] | None, typer.Option(help="Of scales: nearest (default), mse; or repeat it.")] = None,
    against: Annotated[str | None, typer.Option(help="The baseline's format; else as stored.")] = None,
    text: Annotated[Path | None, typer.Option(help="A UTF-8 file; else Python files that training held out.")] = None,
    tokens: Annotated[int | None, typer.Option(help="How many to predict, 0 for all; else 32768.")] = None,
    dtype: Annotated[str, typer.Option(help="Of variants: float32, bfloat16, float16, or auto.")] = "float32",
    input_format: Annotated[str, typer.Option(help="Of what meets the experts: float, int8, fp8-e4m3.")] = "float",
    projections: Annotated[str, typer.Option(help="Of variants: torch, or stored as int8, ...")] = "torch",
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and no table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (.png, .svg, .pdf).")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the table as a Markdown page.")] = None,
) -> None:
    """Measure what storing a model's experts in fewer bits costs its predictions.

    Every variant reads the text beside a baseline with the experts as they are, in float32. The table: bits per byte
    and perplexity, KL divergence of the next-token distributions, how often both hold the same token for the likeliest,
    the error of the experts' outputs, and the share of routing decisions that changed.
    For instance: moestro quality --format mxfp4 --format int8
    """
    with refusals():
        check_targets("quality", plot, report)
        from moestro.hf.quality import Options, measure, variants
        from moestro.hf.text_model import quiet_transformers

        wanted = variants(formats or (), search or ("nearest",), all_formats)
        options = Options(against, dtype, device, text, tokens, input_format, projections)  # type: ignore[arg-type]
        with quiet_transformers(), bar("loading", not as_json and sys.stderr.isatty()) as on_window:
            found = measure(model, wanted, options, on_window)
        if as_json:
            typer.echo(json.dumps(found.as_json()))
        else:
            _print(found)
        _write(found, plot, report)


def _write(found: QualityReport, plot: Path | None, report: Path | None) -> None:
    from moestro.quality.plot import quality_plot
    from moestro.quality.report import markdown

    try:
        if report is not None:
            report.write_text(markdown(found), encoding="utf-8")
        if plot is not None and found.measured:
            quality_plot(found, plot)
    except OSError as error:
        got = f"{error.filename or plot or report} ({error.strerror})"
        raise invalid_input("quality", got=got, needs="a file that can be written", fix="Name another.") from error


def _print(found: QualityReport) -> None:
    from moestro.quality.report import headline, reasons, table

    console = wide_console()
    console.print(*headline(found), sep="\n", soft_wrap=True)
    console.print(table(found))
    console.print(*reasons(found), sep="\n", end="\n" if reasons(found) else "", soft_wrap=True)
