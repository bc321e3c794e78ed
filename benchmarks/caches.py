"""Steps after so many tokens: keys and values appended in place, against Transformers' own cache, which copies them.

    python benchmarks/caches.py FOLDER
    python benchmarks/caches.py FOLDER --format mxfp4 --tokens 512,2048,8192

Both hold the same keys and values, which repeat those of one token; the two take turns in one process. Milliseconds of
a step, the median.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from transformers import DynamicCache

from moestro.cli.progress import wide_console
from moestro.cli.refusal import refusals
from moestro.hf import load
from moestro.hf.cache import appending_cache
from moestro.hf.text_model import quiet_transformers
from sets import numbers

ROUNDS, STEPS = 5, 16

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    folder: Annotated[str, typer.Argument(help="A checkpoint.")],
    format_: Annotated[str | None, typer.Option("--format", help="Of the experts, as for moestro.load.")] = None,
    tokens: Annotated[str, typer.Option(help="Numbers of tokens that the caches hold.")] = "512,2048,8192",
) -> None:
    """Print a table."""
    with refusals(), quiet_transformers():
        counts = numbers(tokens)
        model = load(folder, format_, projections="auto").eval()
        table = Table("tokens", "Transformers' own, ms", "in place, ms", "ratio", title="a step")
        for count in counts:
            copied, in_place = measured(model, count)
            table.add_row(f"{count:,}", f"{1e3 * copied:.2f}", f"{1e3 * in_place:.2f}", f"{in_place / copied:.2f}")
    wide_console().print(table)


@torch.no_grad()
def measured(model: Any, count: int) -> tuple[float, float]:
    """Seconds of a step after so many tokens, with Transformers' own cache and with the other one."""
    one = model(torch.ones((1, 1), dtype=torch.int64), use_cache=True).past_key_values
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        own = DynamicCache(config=model.config.get_text_config())
        other = appending_cache(model, model.generation_config).get("past_key_values", own)
        for cache, seconds in zip((own, other), found, strict=True):
            fill(cache, one, count)
            seconds += steps(model, cache)
    return median(found[0]), median(found[1])


def fill(cache: Any, one: Any, count: int) -> None:
    """Keys and values of one token, so many times."""
    for layer, known in zip(cache.layers, one.layers, strict=True):
        layer.update(*(t.expand(*t.shape[:-2], count, t.shape[-1]).clone() for t in (known.keys, known.values)))


def steps(model: Any, cache: Any) -> list[float]:
    """Seconds of each of some steps but the first two."""
    ids, found = torch.ones((1, 1), dtype=torch.int64), []
    for _ in range(STEPS):
        start = time.perf_counter()
        ids = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        found.append(time.perf_counter() - start)
    return found[2:]


if __name__ == "__main__":
    app()
