"""One case of `moestro.bench.model`, in the process that it is measured in: load, run against the clock, profile.

python -m moestro.hf.timed '{"folder": "FOLDER", "batch": 1, "prompt_tokens": 16, ..., "threads": 2}'
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

from moestro.bench.memory import Resident, file_share, resident, restart
from moestro.bench.model import OPERATION
from moestro.checkpoint import open_checkpoint
from moestro.errors import MoestroError, invalid_input
from moestro.hf import load, served
from moestro.hf.cache import appending_cache
from moestro.hf.generate import same_tokens
from moestro.hf.models import find_model, read_config
from moestro.hf.sources import model_class
from moestro.hf.text_model import quiet_transformers
from moestro.ops.dispatch import observed
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.parallel import Peers, make_mesh
from moestro.parallel.processes import everyone, gathered, refusal
from moestro.profiling import Profile
from moestro.profiling.profiler import DECODE, PROMPT

FIRST_STEP = "first step"
FEWEST_RUNS, MOST_RUNS = 3, 30
FEWEST_SECONDS, MOST_SECONDS = 1.0, 10.0
"""Of timed runs together: shorter ones are repeated, since the machine's speed is not the same all the time; no run
begins after the second."""
_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
"""In names of modules whose weights are those of routed experts."""


class _Clock(BaseStreamer):
    """Transformers' streamer, for the times at which tokens come; the prompt comes first, and has none."""

    def __init__(self, tell: Callable[[int, float], object]) -> None:
        self.times = [time.perf_counter()]
        self._tell, self._has_prompt = tell, False
        tell(0, self.times[0])

    def put(self, value: Tensor) -> None:
        """Ids of the next tokens."""
        if self._has_prompt:
            self.times.append(time.perf_counter())
            self._tell(len(self.times) - 1, self.times[-1])
        self._has_prompt = True

    def end(self) -> None:
        """No more tokens."""


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """What `moestro.bench.model.ModelPoint` has beside the case; of several processes on every one of them."""
    torch.set_num_threads(asked["threads"])
    job = _Job(everyone() if asked["processes"] > 1 else None)
    config = _config(asked["folder"])
    ids, new_tokens = _prompt(config, asked), asked["new_tokens"]
    before, start = job.restart(), time.perf_counter()
    model = _loaded(asked)
    load_seconds = time.perf_counter() - start
    generate(model, ids, 2)
    runs = [generate(model, ids, new_tokens)]
    while _goes_on(len(runs), job.first(sum(times[-1] - times[0] for times in runs))):
        runs.append(generate(model, ids, new_tokens))
    peak_bytes, anonymous_bytes = job.held(before)
    seconds = [[b - a for a, b in pairwise(times)] for times in runs]
    steps = [step for of_run in seconds for step in of_run[2:]]
    stages, expert_bytes = profiled(model, ids, new_tokens)
    expert_bytes = job.total(expert_bytes)
    return {
        "prompt_seconds": median(of_run[0] for of_run in seconds),
        "first_step_seconds": median(of_run[1] for of_run in seconds),
        "decode_seconds": median(steps),
        "peak_bytes": peak_bytes,
        "anonymous_bytes": anonymous_bytes,
        "stages": stages,
        "load_seconds": load_seconds,
        "step_bytes": expert_bytes + job.total(other_bytes(model)),
        "expert_bytes": expert_bytes,
        "threads": torch.get_num_threads(),
        "runs": len(runs),
        "steps": len(steps),
        "dtype": str(model.dtype).removeprefix("torch."),
        "experts": "; ".join(dict.fromkeys(layer.layout for layer in served(model))),
    }


@dataclass(frozen=True)
class _Job:
    """What is found on several processes together, on each of them; or on this one alone, without peers."""

    peers: Peers | None

    def first(self, value: float) -> float:
        """That of the first."""
        return value if self.peers is None else float(gathered(self.peers, OPERATION, value)[0])

    def total(self, value: int) -> int:
        """The sum."""
        return value if self.peers is None else sum(gathered(self.peers, OPERATION, value))

    def restart(self) -> tuple[Resident, int | None]:
        """Count the most from now on, on all at once; what this one holds."""
        self._wait()
        return restart(), file_share()

    def held(self, before: tuple[Resident, int | None]) -> tuple[int, int]:
        """The most bytes that were held since, and those of no file that are held now."""
        self._wait()
        (then, shared), after, share = before, resident(), file_share()
        anonymous = max(after.anonymous - then.anonymous, 0)
        most = after.most - then.now
        if self.peers is not None and shared is not None and share is not None:
            most = after.most - after.now + anonymous + share - shared
        self._wait()  # what another gave back now would count as held by fewer
        return self.total(max(most, 0)), self.total(anonymous)

    def _wait(self) -> None:
        if self.peers is not None:
            self.peers.barrier(OPERATION)


def _goes_on(runs: int, seconds: float) -> bool:
    """Whether another run is to be timed."""
    if runs < FEWEST_RUNS or seconds < FEWEST_SECONDS:
        return runs < MOST_RUNS and seconds < MOST_SECONDS
    return False


def _config(folder: str) -> Any:
    """A checkpoint's configuration; its class is imported, so that this is no part of loading."""
    source = find_model(folder, OPERATION)
    config = read_config(source, OPERATION, open_checkpoint(Path(source)) if Path(source).is_dir() else None)
    model_class(config)
    return config


def _loaded(asked: dict[str, Any]) -> Any:
    projections = {True: "auto", False: "torch"}.get(asked["projections"], asked["projections"])
    kept = {} if asked["memory"] is None else {"memory": asked["memory"]}
    mesh = None if asked["processes"] == 1 else make_mesh(ep=asked["processes"])
    return load(asked["folder"], asked["format"], device=mesh, projections=projections, **kept).eval()


def _prompt(config: Any, asked: dict[str, Any]) -> Tensor:
    """Random ids [batch, prompt_tokens], the same in every process; refused where the context does not hold the run."""
    text = config.get_text_config()
    tokens, context = asked["prompt_tokens"] + asked["new_tokens"], getattr(text, "max_position_embeddings", None)
    if isinstance(context, int) and tokens > context > 0:
        raise invalid_input(
            OPERATION,
            got=f"{asked['prompt_tokens']} prompt tokens and {asked['new_tokens']} new ones",
            needs=f"at most {context} together, the context of {asked['folder']}",
            fix="Lower one of them.",
        )
    size = (asked["batch"], asked["prompt_tokens"])
    return torch.randint(text.vocab_size, size, generator=torch.Generator().manual_seed(0))


def generate(
    model: Any, ids: Tensor, new_tokens: int, tell: Callable[[int, float], object] = lambda place, now: None
) -> list[float]:
    """Continue prompts by their likeliest tokens: when the call began, and when each of the new tokens came.

    `tell` is called with the place and the time of each of these as it comes.
    """
    clock = _Clock(tell)
    # Without an end: to ask for a least number has every step look for tokens to forbid, in all of the vocabulary.
    counts = {"max_new_tokens": new_tokens, "eos_token_id": None}
    told = {"streamer": clock, "logits_processor": same_tokens(model)}
    told |= appending_cache(model, model.generation_config)
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **told, **counts)
    return clock.times


def profiled(model: Any, ids: Tensor, new_tokens: int) -> tuple[dict[str, dict[str, float]], int]:
    """Seconds of each stage of a pass, by phase; and bytes of the distinct experts that a step reads, the mean."""
    made = Profile(model)
    profiler = made.profiler
    read: list[list[tuple[Tensor, Any]]] = []

    def on_time(place: int, now: float) -> None:
        profiler.begin((PROMPT, FIRST_STEP, DECODE)[min(place, 2)], now)
        read.append([])

    def on_experts(prepared: Any, arguments: tuple[Any, ...], result: Any) -> None:
        read[-1].append((arguments[1].expert_ids.clone(), arguments[2]))

    with profiler.taken(), observed(EXPERT_MLP, on_experts):
        generate(model, ids, new_tokens, on_time)
        profiler.drop()
    phases = made.report.phases
    stages = {
        name: {stage: seconds / phases[name].passes for stage, seconds in phases[name].seconds.items()}
        for name in (PROMPT, DECODE)
    }
    steps = read[2:-1]  # the last token is followed by no pass
    nbytes = sum(_distinct(expert_ids) * weights.bytes_per_expert for step in steps for expert_ids, weights in step)
    return stages, round(nbytes / len(steps))


def _distinct(expert_ids: Tensor) -> int:
    return int((torch.unique(expert_ids) >= 0).sum())


def other_bytes(model: nn.Module) -> int:
    """Of all weights beside the routed experts that a step reads whole: not of embeddings, unless the head is one."""
    tensors: dict[int, Tensor] = {}
    packed = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or _EXPERTS.search(name):
            continue
        tensors |= {id(tensor): tensor for tensor in module.parameters(recurse=False)}
        stored = getattr(module, "stored", None)
        packed += getattr(stored, "nbytes", 0)
    return packed + sum(tensor.nbytes for tensor in tensors.values())


def rank(asked: dict[str, Any]) -> dict[str, Any]:
    """What a case found in several processes, of which this is one."""
    with quiet_transformers():
        return run(asked)


def main(text: str) -> str:
    """What a case found, or how it was refused, as one line of JSON."""
    with quiet_transformers():
        try:
            return json.dumps(run(json.loads(text)))
        except MoestroError as error:
            return json.dumps(refusal(error))


if __name__ == "__main__":
    print(main(sys.argv[-1]))
