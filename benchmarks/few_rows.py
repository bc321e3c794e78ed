"""What the engine's kernels take for a row of weights that meets few tokens, by columns: a share for each column, and
one for each row, whatever its columns.

    python benchmarks/few_rows.py
    python benchmarks/few_rows.py --formats mxfp4,int8 --tokens 1,2,4

One thread multiplies matrices of few rows, which the caches hold; the time of one with four rows is taken off, so that
what a call costs is not in it. The line through the columns is the least squares' one.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table

from moestro import formats
from moestro.bench.timing import alternate, wall_clock
from moestro.cli.progress import wide_console
from moestro.cli.refusal import refusals
from moestro.errors import not_one_of
from moestro.ops import native
from moestro.ops.expert_mlp.native_handles import stored_handle
from sets import numbers

COLUMNS = (512, 1024, 2048, 4096, 8192)
FEW, WEIGHTS = 4, 1 << 16
"""Rows of the smaller matrix, and weights of the other."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    formats_: Annotated[str, typer.Option("--formats", help="Of the weights.")] = "bfloat16,int8,mxfp4,int4-g32",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens.")] = "1,2,4,8",
    columns_: Annotated[str, typer.Option("--columns", help="Of the weights.")] = ",".join(map(str, COLUMNS)),
    isa: Annotated[str, typer.Option("--set", help="An instruction set; the best one if left out.")] = "",
    seconds: Annotated[float, typer.Option(help="For each matrix.")] = 0.05,
) -> None:
    """Print nanoseconds for a row of weights, and their parts."""
    with refusals():
        sets = {each.name: each for each in native.ISAS if each.runs_here and each.multiplies_floats}
        name = isa or next(iter(sets), "")
        if name not in sets:
            raise not_one_of("few_rows", "set", name, sets, "Or leave it out.")
        counts, widths = numbers(tokens), numbers(columns_)
    torch.set_num_threads(1)
    made = Table(title=f"{name}, one thread: nanoseconds for a row of weights", title_justify="left")
    for head in ("weights", "tokens", *map(str, widths), "for 512 columns", "for the row"):
        made.add_column(head, justify="left" if head == "weights" else "right", no_wrap=True)
    for form in formats_.split(","):
        for count in counts:
            found = [row_seconds(sets[name], form, columns, count, seconds) * 1e9 for columns in widths]
            slope, rest = np.polyfit(widths, found, 1)
            made.add_row(form, str(count), *(f"{t:.1f}" for t in found), f"{512 * slope:.1f}", f"{rest:.1f}")
    wide_console().print(made)


def row_seconds(isa: native.Isa, form: str, columns: int, tokens: int, seconds: float) -> float:
    """Of one more row of weights in this format, with so many tokens in bfloat16."""
    many = FEW + WEIGHTS // columns
    x = torch.randn(tokens, columns).bfloat16()
    stored = {n: formats.quantize(0.02 * torch.randn(n, columns), form) for n in (FEW, many)}
    outs = {n: torch.empty(tokens, n, dtype=torch.bfloat16) for n in stored}
    calls = {str(n): [partial(product, linear(isa, stored[n]), x, outs[n])] for n in stored}
    times = alternate(calls, seconds, wall_clock())
    return (min(times[str(many)]) - min(times[str(FEW)])) / (many - FEW)


def linear(isa: native.Isa, weights: formats.PackedTensor) -> Any:
    """The product as the engine takes it, without wide kernels."""
    code = native.FLOATS[torch.bfloat16]
    how = {"x_dtype": code, "out_dtype": code, "same_bits": False, "wide_rows": 1 << 40}
    return native.engine().Linear(isa=isa.index, weights=stored_handle(weights), bias=None, **how)


def product(made: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    made.run(1, x.shape[0], x.data_ptr(), x.stride(0), out.data_ptr())


if __name__ == "__main__":
    app()
