"""`moestro generate`: arguments in, text out; the work is in `moestro.hf.generate`."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import moestro
from moestro.cli import options
from moestro.cli.prompts import NamedText, read_prompts
from moestro.cli.refusal import check_targets, refusals
from moestro.cli.sizes import memory_budget
from moestro.errors import invalid_input

if TYPE_CHECKING:
    from moestro.hf import MoestroConfig
    from moestro.hf.generate import Generation, Prompt, Sampling
    from moestro.hf.text_model import TextModel
    from moestro.memory import Trace


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="A text to continue, or - to read it; with --chat to answer."),
    ] = None,
    file: Annotated[list[Path] | None, typer.Option(help="A file with a prompt; may be given several times.")] = None,
    model: Annotated[str | None, typer.Option(help="A local folder or a hub id; else the bundled model.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the tokenizer's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system prompt.")] = None,
    max_new_tokens: options.MaxNewTokens = None,
    do_sample: options.DoSample = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    no_repeat_ngram_size: options.NoRepeatNgramSize = None,
    seed: Annotated[
        int | None, typer.Option(help="With --do-sample: of the first prompt; the next has one more.")
    ] = None,
    stop: options.Stop = None,
    batch: Annotated[int, typer.Option(min=1, help="So many of several prompts share a step.")] = 1,
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
    trace: Annotated[Path | None, typer.Option(help="Record the routing of all layers in this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt, and no text.")] = False,
) -> None:
    """Continue prompts with a Mixture-of-Experts language model, and say how fast it went.

    The text goes to stdout as it is generated, everything else to stderr. With --ep or --tp every rank that torchrun
    starts has its own part of the experts, and rank 0 prints. What cannot be done ends with one line and exit code 2.
    For instance: moestro generate "def fibonacci(n):" --max-new-tokens 64
    """
    with refusals():
        from moestro.hf import generate as library
        from moestro.hf.text_model import load_text_model, quiet_transformers

        picked = temperature, top_k, top_p, min_p, repetition_penalty, seed
        sampling = library.Sampling(max_new_tokens, do_sample, *picked, tuple(stop or ()), no_repeat_ngram_size)
        _check_trace(trace, ep * tp)
        texts = read_prompts(prompts or [], file or [], ep * tp)
        requests = make_requests([text.text for text in texts], sampling, system, chat)
        place, prints = place_of(device, ep, tp, batch)
        with quiet_transformers(progress=model is not None and prints and sys.stderr.isatty()):
            budget = memory_budget("generate", memory, prefetch, device_memory)
            how = make_config(format, input_format=input_format, projections=projections, memory=budget)
            text_model = load_text_model(model, dtype, place, strategy, partial(check_requests, requests), how)
            for request in requests:
                library.check(text_model, *request)
            out = Output(text_model, texts, requests, chat, as_json)
            _run(out, batch, trace, prints)


def make_config(format: str | None, **options: Any) -> MoestroConfig:
    """How a model is loaded, of options as they were given."""
    from moestro.hf import MoestroConfig

    return MoestroConfig(format, **options)


def _run(out: Output, batch: int, trace: Path | None, prints: bool) -> None:
    """Generate, and print what comes if this process is the one that does."""
    from moestro.serve.several import generate_several

    if prints:
        out.begin(0)
    told = (out.text, out.end) if prints else (_nothing, _nothing)
    with _recorded(out.text_model, trace):
        generate_several(out.text_model, out.requests, batch, *told)


def _check_trace(path: Path | None, ranks: int) -> None:
    """Refuse a trace of a part of the experts, or to a file that cannot be written."""
    if path is not None and ranks > 1:
        raise invalid_input(
            "generate", got="--trace with --ep or --tp", needs="all experts on one rank", fix="Record on one device."
        )
    check_targets("generate", None, path)


@contextmanager
def _recorded(text_model: TextModel, path: Path | None) -> Iterator[None]:
    """Write the routing of what runs inside to a file, if one is named; also of a run that is broken off."""
    if path is None:
        yield
        return
    from moestro.hf.recording import recorded

    with recorded(text_model.model, text_model.name) as recorder:
        try:
            yield
        finally:
            if recorder:
                _write_trace(recorder.trace(), path)


def _write_trace(trace: Trace, path: Path) -> None:
    try:
        trace.write(path)
    except OSError as error:
        raise invalid_input(
            "generate",
            got=f"--trace {path} ({error.strerror or error})",
            needs="a file that can be written, and room for it",
            fix="Name another file, and generate again.",
        ) from error


def make_requests(
    texts: list[str], sampling: Sampling, system: str | None, chat: bool
) -> list[tuple[Prompt, Sampling]]:
    """What the library is asked, prompt by prompt; each has a seed of its own, the first that which was given."""
    from moestro.hf.generate import check_prompt

    if system is not None and not chat:
        raise invalid_input(
            "generate", got="--system without --chat", needs="--chat, whose template has a place for it", fix="Add it."
        )
    found: list[tuple[Prompt, Sampling]] = []
    for index, text in enumerate(texts):
        before = [] if system is None else [{"role": "system", "content": system}]
        prompt: Prompt = [*before, {"role": "user", "content": text}] if chat else text
        check_prompt(prompt)
        found.append((prompt, sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index)))
    return found


def check_requests(requests: list[tuple[Prompt, Sampling]], name: str, tokenizer: Any, context: int | None) -> None:
    """Refuse what tokenizer or context cannot take of any request, before weights are read."""
    from moestro.hf.generate import check_length

    for request in requests:
        check_length(name, tokenizer, context, request)


def _nothing(index: int, what: object) -> None:
    """What a rank prints that is not the first."""


def place_of(device: str, ep: int, tp: int, batch: int) -> tuple[Any, bool]:
    """Where the model goes, a device or a mesh, and whether this process prints."""
    if (ep, tp) == (1, 1):
        return device, True
    from moestro.parallel import make_mesh

    if batch > 1:
        raise invalid_input(
            "generate",
            got=f"--batch {batch} with --ep or --tp",
            needs="one prompt a step on ranks",
            fix="Drop --batch.",
        )
    mesh = make_mesh(1, ep, tp, device)
    return mesh, mesh.get_rank() == 0


@dataclass
class Output:
    """Prints what comes of prompts: text as it comes, or an object when it is there; speeds go to stderr."""

    text_model: TextModel
    texts: list[NamedText]
    requests: list[tuple[Prompt, Sampling]]
    chat: bool
    as_json: bool

    def begin(self, index: int) -> None:
        """The heading, where there are several prompts, and the prompt itself."""
        if self.as_json or index == len(self.texts):
            return
        if len(self.texts) > 1:
            above = "\n" if index else ""
            _write(f"{above}==> {index + 1} of {len(self.texts)}: {self.texts[index].name} <==\n")
        if not self.chat:
            _write(self.texts[index].text)

    def text(self, index: int, piece: str) -> None:
        """A piece of the text of a prompt."""
        if not self.as_json:
            _write(piece)

    def end(self, index: int, found: Generation) -> None:
        """All that came of a prompt; the next begins."""
        said = report(self.text_model, self.texts[index].text, found)
        if self.as_json:
            typer.echo(json.dumps({**said, "seed": self.requests[index][1].seed}))
            return
        _write("\n")
        typer.secho(summary(said), err=True, dim=True)
        self.begin(index + 1)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def summary(said: dict[str, Any]) -> str:
    """The lines that follow the text, of what `report` says: two, and two more of a model within a memory budget."""
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
        *(f"projections stored as {name}" for name in said["stored_projections"]),
    ]
    speed = "" if speeds["generated"] is None else f", {speeds['generated']:.1f} tokens/s"
    memory = "" if said["memory"] is None else f"\n{said['memory']['hits']}\n{said['memory']['line']}"
    return (
        f"prompt {tokens['prompt']} tokens, {speeds['prompt']:.1f} tokens/s; generated {tokens['generated']} tokens"
        f"{speed}\n{'; '.join(parts)}{memory}"
    )


def report(text_model: TextModel, prompt: str, found: Generation) -> dict[str, Any]:
    """What --json prints. Projections are counted by what serves them where one token comes, as in generation."""
    import torch
    import transformers

    from moestro.hf import served_projections

    served = served_projections(text_model.model).values()
    device = text_model.model.device
    with torch.no_grad():
        rows = [(p, torch.empty(1, p.in_features, dtype=p.dtype, device=device)) for p in served]
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
        "stored_projections": sorted({p.stored.format.name for p in served if p.stored is not None}),
        "memory": _memory(text_model.model),
        "device": str(text_model.model.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "moestro": moestro.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _memory(model: Any) -> dict[str, Any] | None:
    """What the experts' memory has done so far, prompts before this one included; None without a budget."""
    from moestro.hf.memory import expert_memory, hits_line, memory_line

    memory = expert_memory(model)
    if memory is None:
        return None
    return {"line": memory_line(model), "hits": hits_line(model), **memory.statistics()}
