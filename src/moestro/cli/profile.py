"""`moestro profile`: arguments in, tables out; the work is in `moestro.profiling`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moestro.cli import options
from moestro.cli.generate import check_requests, make_config, make_requests, place_of
from moestro.cli.progress import EVERY, bar
from moestro.cli.prompts import read_prompts
from moestro.cli.refusal import check_targets, refusals
from moestro.cli.sizes import memory_budget

if TYPE_CHECKING:
    from moestro.hf.generate import Generation, Prompt, Sampling
    from moestro.hf.text_model import TextModel
    from moestro.profiling import Profile

NEW_TOKENS = 64


def profile(
    model: Annotated[str | None, typer.Argument(help="A local folder or a hub id; else the bundled model.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A text to continue; may be given several times.")] = None,
    file: Annotated[list[Path] | None, typer.Option(help="A file with a prompt; may be given several times.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the tokenizer's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Of each prompt, at most.")] = NEW_TOKENS,
    dtype: options.Dtype = "auto",
    format: options.Format = None,
    input_format: options.InputFormat = "float",
    projections: options.Projections = "auto",
    memory: options.Memory = None,
    prefetch: options.Prefetch = False,
    device_memory: options.DeviceMemory = None,
    device: options.Device = "cpu",
    ep: Annotated[int, typer.Option(help="Under torchrun: ranks that the experts are spread over.")] = 1,
    tp: Annotated[int, typer.Option(help="Under torchrun: ranks that each expert is cut over.")] = 1,
    strategy: options.Strategy = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and no table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (.png, .svg, .pdf).")] = None,
    chrome_trace: Annotated[Path | None, typer.Option(help="Write all spans for chrome://tracing, as JSON.")] = None,
) -> None:
    """Continue prompts, and say which experts were used and where the time went, in prompts and in generation.

    Tokens are the likeliest ones. Each prompt is read once before, unprofiled, but with --memory, whose first reads
    count. With --ep or --tp rank 0 prints its own part. What cannot be done ends with one line and exit code 2.
    For instance: moestro profile --prompt "def fibonacci(n):" --plot profile.png
    """
    with refusals():
        check_targets("profile", plot, chrome_trace)
        from moestro.hf import generate as library
        from moestro.hf.text_model import load_text_model, quiet_transformers

        texts = read_prompts(prompt or [], file or [], ep * tp, "profile", "by --prompt")
        sampling = library.Sampling(max_new_tokens, do_sample=False)
        requests = make_requests([text.text for text in texts], sampling, None, chat)
        place, prints = place_of(device, ep, tp, 1)
        with quiet_transformers(progress=model is not None and prints and sys.stderr.isatty()):
            budget = memory_budget("profile", memory, prefetch, device_memory)
            how = make_config(format, input_format=input_format, projections=projections, memory=budget)
            text_model = load_text_model(model, dtype, place, strategy, partial(check_requests, requests), how)
            for request in requests:
                library.check(text_model, *request)
            with _progress(max_new_tokens * len(requests), prints) as on_token:
                found = _profiled(text_model, requests, memory is None, on_token)
        if not prints:
            return
        typer.echo(json.dumps(found.as_json()) if as_json else str(found))
        if plot is not None:
            found.plot(plot)
        if chrome_trace is not None:
            found.chrome_trace(chrome_trace)


def _profiled(
    text_model: TextModel, requests: list[tuple[Prompt, Sampling]], warm: bool, on_token: Callable[[], None]
) -> Profile:
    """The profile of prompts that are continued one after the other."""
    from dataclasses import replace

    from moestro.hf.generate import generate
    from moestro.profiling import Profile

    for prompt, sampling in requests if warm else ():
        generate(text_model, prompt, replace(sampling, max_new_tokens=2))
    made = Profile(text_model.model, text_model.name)
    with made.profiler.taken():
        for prompt, sampling in requests:
            _generated(text_model, prompt, sampling, made, on_token)
    return made


def _generated(
    text_model: TextModel, prompt: Prompt, sampling: Sampling, made: Profile, on_token: Callable[[], None]
) -> Generation:
    """A prompt continued: its passes end with the tokens, as `generate` times them."""
    from moestro.hf.generate import generate
    from moestro.profiling.profiler import DECODE, PROMPT

    profiler, began = made.profiler, False

    def on_time(now: float) -> None:
        nonlocal began
        profiler.begin(DECODE if began else PROMPT, now)
        if began:
            on_token()
        began = True

    found = generate(text_model, prompt, sampling, on_time=on_time)
    profiler.drop()
    return found


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """Yields what is to be called with each new token: a bar on a terminal, else a line now and then."""
    done, said = 0, time.monotonic()
    with bar("reading the prompt", shown and sys.stderr.isatty()) as update:

        def on_token() -> None:
            nonlocal done, said
            done += 1
            update("generating", done, total)
            if shown and not sys.stderr.isatty() and time.monotonic() - said >= EVERY:
                said = time.monotonic()
                print(f"token {done} of at most {total}", file=sys.stderr, flush=True)

        yield on_token
