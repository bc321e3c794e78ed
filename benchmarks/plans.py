"""How wrong plans are: predicted and measured seconds and memory of whole models, point by point.

    python benchmarks/plans.py FOLDER[:FORMATS[:BATCHES[:MEMORY[:PROCESSES]]]]...
    python benchmarks/plans.py bundled:stored,int8:1,8 ~/models/olmoe:stored:1::2 ~/models/gpt-oss-20b:stored:1:9GB

Each folder is planned for this machine with those formats, batches and, if given, memory and processes; every way that
fits, with so many processes, is then loaded and run by itself, as `moestro plan --check` does. Results go to
benchmarks/results.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

import moestro
from moestro.bench.measure import about
from moestro.bench.report import machine_line
from moestro.cli.refusal import refusals
from moestro.hf.text_model import BUNDLED, quiet_transformers
from moestro.memory.amounts import shown_bytes
from moestro.planning.check import Checked, check, errors

RESULTS = Path(__file__).parent / "results"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Asked:
    """One folder, and what of it is planned."""

    folder: str
    formats: tuple[str | None, ...]
    batches: tuple[int, ...]
    memory: str | None
    processes: int

    @classmethod
    def of(cls, text: str) -> Asked:
        """Of "FOLDER:FORMATS:BATCHES:MEMORY:PROCESSES", of which all but the first may be left out."""
        folder, formats, batches, memory, processes = [*text.split(":"), "", "", "", ""][:5]
        named = tuple(None if name == "stored" else name for name in (formats or "stored").split(","))
        counts = tuple(int(each) for each in (batches or "1").split(","))
        return cls(folder, named, counts, memory or None, int(processes or 1))

    @property
    def name(self) -> str:
        return Path(self.folder).name


def measured(asked: Asked, prompt_tokens: int, new_tokens: int) -> list[Checked]:
    """Every way that fits, planned and run."""
    given: dict[str, Any] = {"formats": asked.formats, "devices": asked.processes}
    if asked.memory is not None:
        given["memory"] = asked.memory
    folder = None if asked.folder == BUNDLED else asked.folder
    plan = moestro.plan(folder, None, asked.batches, prompt_tokens, new_tokens, **given)
    return check(plan, [each for each in plan.candidates if each.choice.ranks == asked.processes])


def row(name: str, one: Checked) -> str:
    """A line of the table, in Markdown."""
    choice, found = one.candidate.choice, one.measured
    budget = "" if choice.memory is None else shown_bytes(choice.memory)
    prompt = "-" if one.prompt_error is None else f"{one.prompt_error:+.0%}"
    cells = (
        *(name, choice.format or "as stored", str(one.candidate.load.batch), budget, str(choice.ranks)),
        *(f"{1e3 * one.candidate.prompt.total:,.0f}", f"{1e3 * found.prompt_seconds:,.0f}", prompt),
        *(f"{1e3 * one.candidate.decode.total:,.1f}", f"{1e3 * found.decode_seconds:,.1f}", f"{one.decode_error:+.0%}"),
        *(shown_bytes(one.candidate.need.device), shown_bytes(found.peak_bytes), f"{one.memory_error:+.1%}"),
    )
    return f"| {' | '.join(cells)} |"


HEAD = """\
| model | experts | batch | budget | ranks | prompt, ms | seen | off | a step, ms | seen | off | memory | seen | off |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"""


def write(found: Sequence[tuple[str, Checked]], name: str) -> Path:
    """JSON for machines, and the table beside it."""
    said, line = about("cpu"), errors([one for _, one in found])
    path = RESULTS / f"{datetime.date.today()}-plans-{name}.json"
    rows = [{"model": model, **one.as_json()} for model, one in found]
    for each in rows:
        each["measured"]["case"]["folder"] = each["model"]  # not a path of this machine
    path.write_text(json.dumps({**said, "command": "benchmarks/plans.py", "points": rows}, indent=1) + "\n")
    text = [machine_line(said["machine"]), "", HEAD, *(row(model, one) for model, one in found), ""]
    text.append(f"Seconds are off by {median(line):.0%} in the median, {max(line):.0%} at most.")
    path.with_suffix(".md").write_text("\n".join(text) + "\n")
    return path


@app.command()
def main(
    folders: Annotated[list[str], typer.Argument(metavar="FOLDER[:FORMATS[:BATCHES[:MEMORY[:PROCESSES]]]]...")],
    prompt_tokens: Annotated[int, typer.Option(help="Of each sequence.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Of each sequence.")] = 32,
    name: Annotated[str, typer.Option(help="Of the machine, in the name of the result.")] = "cpu",
) -> None:
    """Plan, run and compare."""
    found: list[tuple[str, Checked]] = []
    with refusals(), quiet_transformers():
        for asked in map(Asked.of, folders):
            for one in measured(asked, prompt_tokens, new_tokens):
                found.append((asked.name, one))
                print(row(asked.name, one), file=sys.stderr, flush=True)
    print(write(found, name).with_suffix(".md").read_text())


if __name__ == "__main__":
    app()
