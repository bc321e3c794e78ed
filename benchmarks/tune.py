"""Look for faster tiles for a layer on this GPU: arguments in, lines out; the work is in `gpu.tune`.

python benchmarks/tune.py --layer qwen3-30b-a3b --tokens 1,16,512
python benchmarks/tune.py --sizes 2048,768,128,8 --format mxfp4
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from gpu import tune as tuner
from moestro.bench import LayerSpec
from moestro.bench.layers import named
from moestro.cli.refusal import refusals
from moestro.errors import invalid_input

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

TOKENS = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192"


@app.command()
def tune(
    layer: Annotated[str, typer.Option(help="A named layer of the benchmark.")] = "olmoe",
    sizes: Annotated[str | None, typer.Option(help="H,I,E,K of your own layer, instead of a named one.")] = None,
    tokens: Annotated[str, typer.Option(help="Numbers of tokens.")] = TOKENS,
    format: Annotated[str, typer.Option(help="Of the weights: dense is bfloat16; or mxfp4, int8, ...")] = "dense",
) -> None:
    """Time tiles for a layer on this GPU and keep the best; about a minute for each number of tokens.

    What is found is kept in the user's cache directory, for this kind of device, and used from the next call on.
    Nothing is ever tuned unless this is run.
    """
    with refusals():
        found = tuner.tune(
            _spec(layer, sizes),
            format,
            _numbers(tokens, "tokens"),
            lambda best: typer.echo(str(best)),
        )
        typer.echo(f"{len(found)} plans are kept")


def _spec(layer: str, sizes: str | None) -> LayerSpec:
    if sizes is None:
        return named(layer)
    numbers = _numbers(sizes, "sizes")
    if len(numbers) != 4 or numbers[3] > numbers[2]:
        raise invalid_input(
            "tune", got=f"sizes {sizes!r}", needs="H,I,E,K with K at most E", fix="For one: 2048,768,128,8."
        )
    h, i, e, k = numbers
    return replace(named("olmoe"), name=sizes, hidden_size=h, intermediate_size=i, num_experts=e, top_k=k)


def _numbers(text: str, name: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise invalid_input(
            "tune",
            got=f"{name} {text!r}",
            needs="whole numbers of at least 1, separated by commas",
            fix="Try 1,16,512.",
        )
    return tuple(map(int, parts))


if __name__ == "__main__":
    app()
