"""Steps of a model whose attention, norms and routers are single calls of the engine, against the same model module by
module.

    python benchmarks/whole_steps.py FOLDER
    python benchmarks/whole_steps.py FOLDER --format mxfp4 --batch 8 --projections int8

The two take turns, step by step, in one process, on caches of the same tokens; experts are those that the model picks.
Milliseconds of a step, the median and its quartiles, after as many steps that are not counted. Nothing is printed
unless logits are as close as bfloat16 explains in a quarter of these; in others two experts' scores may round to one
number, and the two pick another one each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from moestro import machine
from moestro.bench.report import machine_line
from moestro.cli.progress import wide_console
from moestro.cli.refusal import refusals
from moestro.errors import invalid_input
from moestro.hf import load, served_steps
from moestro.hf.cache import appending_cache
from moestro.hf.text_model import quiet_transformers
from moestro.tolerances import relative_error

MOST_APART = 0.02
PROMPT = 64

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    folder: Annotated[str, typer.Argument(help="A checkpoint.")],
    format_: Annotated[str | None, typer.Option("--format", help="Of the experts, as for moestro.load.")] = None,
    projections: Annotated[str, typer.Option(help="As for moestro.load; not torch.")] = "auto",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    steps: Annotated[int, typer.Option(help="Of each that are counted.")] = 50,
) -> None:
    """Print a table."""
    with refusals(), quiet_transformers(), torch.inference_mode():
        model = load(folder, format_, projections=projections).eval()
        whole, single = measured(model, batch, steps)
        not_served = {reason for reason in served_steps(model).values() if reason is not None}
    processor = machine_line({**machine.describe(), "device": "cpu"})
    table = Table("", "a step, ms", "quartiles", title=processor, title_justify="left")
    for name, times in (("module by module", single), ("as whole calls", whole)):
        low, _, high = quantiles(times, n=4)
        table.add_row(name, f"{1e3 * median(times):.2f}", f"{1e3 * low:.2f} to {1e3 * high:.2f}")
    ratios = [a / b for a, b in zip(whole, single, strict=True)]
    table.add_row("ratio", f"{median(ratios):.3f}", "{:.3f} to {:.3f}".format(*quantiles(ratios, n=4)[::2]))
    wide_console().print(table)
    for reason in sorted(not_served):
        wide_console().print(f"Attention that stayed module by module: {reason}.")


def measured(model: Any, batch: int, count: int) -> tuple[list[float], list[float]]:
    """Seconds of steps as whole calls and of steps module by module, which take turns."""
    chance = torch.Generator().manual_seed(0)
    prompt = torch.randint(10, 1000, (batch, PROMPT), generator=chance)
    caches = []
    for _ in range(2):
        empty = appending_cache(model, model.generation_config).get("past_key_values")
        caches.append(model(prompt, past_key_values=empty, use_cache=True).past_key_values)
    found: tuple[list[float], list[float]] = ([], [])
    errors = []
    for turn in range(2 * count):
        ids, logits = torch.randint(10, 1000, (batch, 1), generator=chance), []
        for single, (cache, times) in enumerate(zip(caches, found, strict=True)):
            with module_by_module(model, bool(single)):
                start = time.perf_counter()
                out = model(ids, past_key_values=cache, use_cache=True)
                times.append(time.perf_counter() - start)
            logits.append(out.logits)
        if turn < count:
            errors.append(relative_error(*logits))
    if (error := sorted(errors)[count // 4]) > MOST_APART:
        raise invalid_input(
            "whole_steps",
            got=f"logits {error:.3f} apart in three quarters of {count} steps",
            needs=f"at most {MOST_APART} in a quarter of them",
            fix="Look for what is computed wrongly (moestro.hf.served_steps).",
        )
    return found[0][count:], found[1][count:]


@contextmanager
def module_by_module(model: Any, on: bool) -> Iterator[None]:
    """Inside, modules run the code of their own classes."""
    served = [(m, type(m)) for m in model.modules() if on and hasattr(type(m), "_moestro_own_class")]
    for module, kind in served:
        module.__class__ = kind._moestro_own_class
    try:
        yield
    finally:
        for module, kind in served:
            module.__class__ = kind


if __name__ == "__main__":
    app()
