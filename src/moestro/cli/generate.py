"""`moestro generate`: arguments in, text out; the work is in `moestro.hf.generate`."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

import moestro
from moestro.cli.refusal import refusals
from moestro.errors import invalid_input

if TYPE_CHECKING:
    from moestro.hf.generate import Generation
    from moestro.hf.text_model import TextModel


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue, or - to read it; with --chat to answer.")],
    model: Annotated[str | None, typer.Option(help="A local folder or a hub id; else the bundled model.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the tokenizer's chat template.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="At most; else 256, or what the context leaves.")] = None,
    do_sample: Annotated[
        bool | None, typer.Option(help="Sample, or take the likeliest; else as the model says.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="With --do-sample; 0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="With --do-sample: the k likeliest tokens only.")] = None,
    top_p: Annotated[float | None, typer.Option(help="With --do-sample: the likeliest of this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="With --do-sample: those of this share of the best.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 to repeat less.")] = None,
    seed: Annotated[int | None, typer.Option(help="With --do-sample: of the random numbers.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's.")] = "auto",
    format: Annotated[str | None, typer.Option(help="Read the experts into this format: mxfp4, int8, ...")] = None,
    input_format: Annotated[str, typer.Option(help="Of what meets the experts: float, int8, fp8-e4m3.")] = "float",
    projections: Annotated[bool, typer.Option("--projections", help="Linear modules by the engine too.")] = False,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    ep: Annotated[int, typer.Option(help="Under torchrun: ranks that the experts are spread over.")] = 1,
    tp: Annotated[int, typer.Option(help="Under torchrun: ranks that each expert is cut over.")] = 1,
    strategy: Annotated[str, typer.Option(help="auto, grouped, blockwise, selective or all_experts.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, and no text.")] = False,
) -> None:
    """Continue a prompt with a Mixture-of-Experts language model, and say how fast it went.

    The text goes to stdout as it is generated, everything else to stderr. With --ep or --tp every rank that torchrun
    starts runs the model with its own part of the experts, and rank 0 prints. What cannot be done (a folder that holds
    no model, a dense model, no tokenizer, an option out of range) ends with one line and exit code 2.
    """
    with refusals():
        from moestro.hf import MoestroConfig
        from moestro.hf import generate as library
        from moestro.hf.text_model import load_text_model, quiet_transformers

        sampling = library.Sampling(
            max_new_tokens, do_sample, temperature, top_k, top_p, min_p, repetition_penalty, seed
        )
        prompt = _read(ep * tp) if prompt == "-" else prompt
        library.check_prompt(prompt)
        place, prints = _place(device, ep, tp)
        streams = prints and not as_json
        with quiet_transformers(progress=model is not None and prints and sys.stderr.isatty()):
            check = partial(library.check_length, request=(prompt, sampling, chat))
            how = MoestroConfig(format, input_format=input_format, projections=projections)  # type: ignore[arg-type]
            text_model = load_text_model(model, dtype, place, strategy, check, how)
            library.check(text_model, prompt, sampling, chat)
            library.share_random_numbers(place)
            if not chat and streams:
                _write(prompt)
            found = library.generate(text_model, prompt, sampling, _write if streams else None, chat)
            said = report(text_model, prompt, found)
    if not prints:
        return
    if as_json:
        typer.echo(json.dumps(said))
    else:
        _write("\n")
        typer.secho(summary(said), err=True, dim=True)


def _place(device: str, ep: int, tp: int) -> tuple[Any, bool]:
    """Where the model goes, a device or a mesh, and whether this process prints."""
    if (ep, tp) == (1, 1):
        return device, True
    from moestro.parallel import make_mesh

    mesh = make_mesh(1, ep, tp, device)
    return mesh, mesh.get_rank() == 0


def _read(num_ranks: int) -> str:
    """Standard input, whatever the locale: bytes that are no UTF-8 are refused like those of an argument."""
    if num_ranks > 1:
        raise invalid_input(
            "generate",
            got="- with --ep or --tp",
            needs="a prompt that every rank gets: processes of torchrun share one standard input",
            fix='Pass it as the argument: "$(cat file)".',
        )
    return sys.stdin.buffer.read().decode(errors="surrogateescape") if sys.stdin is not None else ""


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def summary(said: dict[str, Any]) -> str:
    """The two lines that follow the text, of what `report` says."""
    tokens, speeds = said["tokens"], said["tokens_per_second"]
    prompt, new = (
        ", ".join(f"{ran['implementation']} ({ran['strategy']})" for ran in part) for part in said["ran"].values()
    )
    parts = [
        f"{said['model']}: {said['expert_layers']} expert layers served",
        f"prompt by {prompt}" + (f", generation by {new}" if new else ""),
        said["dtype"],
        *(f"experts {layout}" for layout in said["stored_experts"]),
        *(f"{count} projections by {name}" for name, count in said["projections"].items()),
    ]
    speed = "" if speeds["generated"] is None else f", {speeds['generated']:.1f} tokens/s"
    return (
        f"prompt {tokens['prompt']} tokens, {speeds['prompt']:.1f} tokens/s; generated {tokens['generated']} tokens"
        f"{speed}\n{'; '.join(parts)}"
    )


def report(text_model: TextModel, prompt: str, found: Generation) -> dict[str, Any]:
    """What --json prints. Projections are counted by what serves them where one token comes, as in generation."""
    import torch
    import transformers

    from moestro.hf import served_projections

    with torch.no_grad():
        rows = [(p, p.weight.new_empty(1, p.in_features)) for p in served_projections(text_model.model).values()]
        projections = Counter(str(moestro.explain(projection, row).chosen) for projection, row in rows)
    return {
        "prompt": prompt,
        "text": found.text,
        "stopped": found.stopped,
        "tokens": {"prompt": found.prompt_tokens, "generated": found.new_tokens},
        "seconds": {"prompt": found.prompt_seconds, "generated": found.new_seconds},
        "tokens_per_second": {"prompt": found.prompt_tokens_per_second, "generated": found.new_tokens_per_second},
        "ran": {"prompt": [*map(asdict, found.prompt_ran)], "generated": [*map(asdict, found.new_ran)]},
        "model": text_model.name,
        "architecture": type(text_model.model).__name__,
        "expert_layers": len(text_model.served),
        "dtype": str(text_model.model.dtype).removeprefix("torch."),
        "stored_experts": sorted({layer.layout for layer in text_model.served if layer.stored}),
        "projections": dict(projections),
        "device": str(text_model.model.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "moestro": moestro.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
