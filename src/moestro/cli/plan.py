"""`moestro plan`: arguments in, a table out; the work is in `moestro.planning`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestro.cli import options
from moestro.cli.progress import steps
from moestro.cli.refusal import check_targets, refusals
from moestro.cli.sizes import parse_bytes
from moestro.errors import invalid_input

if TYPE_CHECKING:
    from moestro.planning import Plan
    from moestro.planning.predict import Spread

LIST = "list"


def plan(
    model: Annotated[str | None, typer.Argument(help="A folder, a config.json or a hub id; else the bundled.")] = None,
    machine: Annotated[
        str | None, typer.Option(help="A .toml file, or one that comes along; list names them; else this one.")
    ] = None,
    formats: Annotated[str | None, typer.Option("--format", help="Of experts: stored, int8, mxfp4, ...")] = None,
    batch: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1",
    prompt_tokens: Annotated[int, typer.Option(help="Of each sequence.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Of each sequence.")] = 128,
    devices: Annotated[int, typer.Option(help="That may be used together; here they are processes.")] = 1,
    memory: Annotated[str | None, typer.Option(help="Of a device, e.g. 8GB; else what is free.")] = None,
    disk: Annotated[str | None, typer.Option(help="The rate that experts are read at, e.g. 2GB/s.")] = None,
    load: Annotated[str | None, typer.Option(help="Of experts: uniform, or zipf:EXPONENT; else uniform.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Recorded by generate --trace, in place of a load.")] = None,
    projections: options.Projections = "auto",
    check: Annotated[bool, typer.Option("--check", help="Run the first and two others, and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and no table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (.png, .svg, .pdf).")] = None,
) -> None:
    """Recommend how to run a model on a machine, with predicted tokens per second and memory; no weight is loaded.

    Ways are ordered by new tokens per second with the prompt counted in. Lists are separated by commas. For instance:
    moestro plan FOLDER --format stored,int8 --batch 1,8 --check, or moestro plan config.json --machine h200.
    What cannot be planned, or does not fit, ends with one line and exit code 2.
    """
    with refusals():
        check_targets("plan", plot, None)
        from moestro.hf.text_model import quiet_transformers
        from moestro.planning import machine_names
        from moestro.planning import plan as planned

        if machine == LIST:
            typer.echo("\n".join(machine_names()))
            return
        given: dict[str, Any] = {"devices": devices, "projections": projections, "spread": _spread(load, trace)}
        if formats is not None:
            given["formats"] = [None if name == "stored" else name for name in _split(formats)]
        if memory is not None:
            given["memory"] = parse_bytes("plan", "--memory", memory, least=1)
        if disk is not None:
            given["disk"] = float(parse_bytes("plan", "--disk", disk.strip().removesuffix("/s"), least=1))
        with quiet_transformers(), steps("reading headers") as say:
            found = planned(model, machine, _counts(batch), prompt_tokens, new_tokens, say=say, **given)
        compared = _checked(found) if check else None
        if plot is not None:
            found.plot(plot)
    _print(found, compared, as_json)


def _print(found: Plan, compared: list[Any] | None, as_json: bool) -> None:
    if as_json:
        more = {} if compared is None else {"checked": [each.as_json() for each in compared]}
        typer.echo(json.dumps(found.as_json() | more))
        return
    typer.echo(str(found))
    if compared is not None:
        from moestro.planning.check import text

        typer.echo(f"\n{text(compared)}")


def _checked(found: Plan) -> list[Any]:
    from moestro.planning.check import check

    with steps("running what was planned") as say:
        return check(found, say=say)


def _spread(load: str | None, trace: Path | None) -> Spread:
    from moestro.cli.simulate import exponent_of
    from moestro.planning.predict import Spread

    if trace is None:
        return Spread(0.0 if load is None else exponent_of(load, "plan"))
    if load is not None:
        raise invalid_input("plan", got="--load and --trace", needs="one of them", fix="Leave --load out.")
    import torch

    from moestro.memory import read_trace

    recorded = read_trace(trace)
    ids = tuple(torch.from_numpy(recorded.layer_ids(index)) for index in range(len(recorded.layers)))
    return Spread(recorded=ids)


def _counts(text: str) -> list[int]:
    parts = _split(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise invalid_input("plan", got=f"--batch {text!r}", needs="numbers of at least 1", fix="For instance 1,8.")
    return [int(part) for part in parts]


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
