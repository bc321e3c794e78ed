"""`moestro bench model`: arguments in, a table out; the work is in `moestro.bench.model_report`."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moestro.cli.progress import points, wide_console
from moestro.cli.refusal import check_targets, refusals
from moestro.cli.sizes import parse_bytes
from moestro.errors import invalid_input

if TYPE_CHECKING:
    from moestro.bench.model import ModelCase

OPERATION = "bench model"


def model(
    folder: Annotated[
        str | None, typer.Argument(metavar="FOLDER", help="A local folder or a hub id; else the bundled model.")
    ] = None,
    format: Annotated[str, typer.Option(help="Of the experts: stored (as they are), mxfp4, int8, ...")] = "stored",
    memory: Annotated[str, typer.Option(help="Bytes for all experts, as 8GB, or none.")] = "none",
    projections: Annotated[str, typer.Option(help="Linear modules: auto, torch, or stored as int8, ...")] = "auto",
    batch: Annotated[str, typer.Option(help="Sequences that share a step.")] = "1",
    prompt_tokens: Annotated[str, typer.Option(help="Of each sequence.")] = "128",
    new_tokens: Annotated[int, typer.Option(help="Of each sequence, at least 3.")] = 32,
    processes: Annotated[str, typer.Option(help="That the experts are spread over; they share the threads.")] = "1",
    json_path: Annotated[str | None, typer.Option("--json", help="Write the report as JSON; - is stdout.")] = None,
) -> None:
    """Prompt and decode tokens a second of a whole model, time per stage, and the peak of memory, under the roof.

    Lists are separated by commas; every combination is a case, in processes of its own.
    For instance: moestro bench model --format stored,int8 --batch 1,8.
    The roof is what the machine's measured bandwidth allows for the weights that a step reads. What cannot be done
    ends with one line and exit code 2.
    """
    with refusals():
        from moestro.bench.model_report import headline, lines, run, table

        check_targets(OPERATION, None, Path(json_path) if json_path not in (None, "-") else None)
        lists = (format, memory, projections, batch, prompt_tokens, processes)
        cases = _cases(folder, [_split(text) for text in lists], new_tokens)
        with points(len(cases)) as on_case:
            report = run(cases, on_case)
    if json_path is not None:
        text = json.dumps(report.as_json(), indent=1) + "\n"
        typer.echo(text, nl=False) if json_path == "-" else Path(json_path).write_text(text)
    console = wide_console(stderr=json_path == "-")
    console.print(*headline(report), sep="\n", soft_wrap=True, markup=False)
    console.print(table(report))
    console.print(*lines(report), sep="\n", soft_wrap=True, markup=False)


def _cases(folder: str | None, lists: list[list[str]], new_tokens: int) -> list[ModelCase]:
    from moestro.bench.model import ModelCase
    from moestro.hf.models import find_model
    from moestro.hf.text_model import bundled_folder

    if not all(lists):
        got, needs = "an option without a value", "at least one of each"
        raise invalid_input(OPERATION, got=got, needs=needs, fix="Leave an option out for its default.")
    source = str(bundled_folder()) if folder is None else find_model(folder, OPERATION)
    return [
        ModelCase(
            source,
            None if format == "stored" else format,
            None if memory == "none" else parse_bytes(OPERATION, "--memory", memory, least=1),
            _number("--batch", batch),
            _number("--prompt-tokens", prompt_tokens),
            new_tokens,
            projections,
            _number("--processes", processes),
        )
        for format, memory, projections, batch, prompt_tokens, processes in product(*lists)
    ]


def _number(option: str, text: str) -> int:
    if not text.isdecimal():
        needs = "a whole number of at least 1"
        raise invalid_input(OPERATION, got=f"{option} {text!r}", needs=needs, fix="For instance 1,8.")
    return int(text)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
