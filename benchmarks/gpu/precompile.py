"""Kernels of a benchmark compiled before it begins, by processes of their own; they find each other in Triton's cache.

cd benchmarks; python -m gpu.precompile cuda 'olmoe dense 1,16' 'olmoe triton_kernels-bf16 1,16'
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moestro import machine
from moestro.bench.failures import failures, sentence
from moestro.bench.layers import DENSE, Layer, LayerSpec, experts_that_fit, inputs, make_layer, named
from moestro.bench.measure import release
from moestro.bench.peers import known_peers, ours
from moestro.bench.peers.variant import Variant
from moestro.bench.records import Plan
from peers.graphs import GRAPH

MOST_PROCESSES = 16
"""At once: each holds a layer on the device."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Job:
    """One layer, the variants whose calls compile kernels for it, and the numbers of tokens they are called with.

    `variants` are formats of moestro's, or names of peers.
    """

    layer: str
    variants: tuple[str, ...]
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.layer} {','.join(self.variants)} {','.join(map(str, self.tokens))}"

    @classmethod
    def parse(cls, text: str) -> Job:
        """What `str` made."""
        layer, variants, tokens = text.split(" ")
        return cls(layer, tuple(variants.split(",")), tuple(map(int, tokens.split(","))))


def jobs(plan: Plan) -> list[Job]:
    """What is worth compiling ahead, in the order of the plan: of layers that many processes can hold, each variant.

    A larger layer is one job, and comes last.
    """
    small = machine.available_bytes(plan.device) / MOST_PROCESSES
    variants = [v.name.removeprefix("moestro").removeprefix("-") or DENSE for v in plan.ours if _is_called(v)]
    variants += [v.name for v in plan.peers if v.compiles and _is_called(v) and v.absent() is None]
    found = []
    for spec in plan.layers:
        dense = spec.num_experts * spec.expert_bytes(plan.dtypes[0]) * (2 if spec.transposed else 1)
        parts = [(v,) for v in variants] if dense <= small else [tuple(variants)]
        found += [(dense > small, Job(spec.name, part, plan.tokens)) for part in parts]
    return [job for _, job in sorted(found, key=lambda item: item[0])]


def _is_called(variant: Variant) -> bool:
    """Whether it is no graph, whose kernels those of the calls are."""
    return not variant.name.endswith(GRAPH)


def compile_ahead(
    plan: Plan,
    seconds: float,
    say: Callable[[str], None],
    command: Sequence[str] = (sys.executable, "-m", __name__),
) -> None:
    """Compile the plan's kernels by as many processes as there are cores, and end those still at it after `seconds`.

    A job that fails or is ended changes nothing but when its kernels are compiled.
    """
    work = jobs(plan)
    count = min(len(work), os.cpu_count() or 1, MOST_PROCESSES)
    start = time.monotonic()
    shares = [[*command, plan.device, *map(str, work[i::count])] for i in range(count)]
    quiet = subprocess.DEVNULL
    running = [subprocess.Popen(share, stdout=quiet, stderr=quiet, env=_environment()) for share in shares]
    try:
        while any(process.poll() is None for process in running) and time.monotonic() - start < seconds:
            time.sleep(_POLL_SECONDS)
    finally:
        late = [process for process in running if process.poll() is None]
        for process in late:
            process.kill()
            process.wait()
    ended = f", {len(late)} processes ended before they were done" if late else ""
    say(f"{len(work)} jobs of compiling, {count} processes, {time.monotonic() - start:.0f} s{ended}")


def _environment() -> dict[str, str]:
    """That of a process which finds this package, whatever folder it starts in."""
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def compile_job(job: Job, device: str) -> list[str]:
    """Call each variant once with each number of tokens; returns why calls failed."""
    reasons: list[str] = []
    try:
        layer = _made(named(job.layer), device, max(job.tokens))
    except failures() as error:
        return [sentence(error)]
    for name in job.variants:
        try:
            _call(layer, name, job.tokens)
        except failures() as error:
            reasons.append(sentence(error))
        layer.quantized.clear()
        release(device)
    return reasons


def _call(layer: Layer, name: str, tokens: tuple[int, ...]) -> None:
    variant = known_peers().get(name) or ours("auto", name)
    if variant.refuses(layer.spec, layer.dtype) is not None:
        return
    bind = variant.prepare(layer)
    for num_tokens in tokens:
        x, [routing] = inputs(layer, num_tokens, 1)
        bind(x, routing)()


def _made(spec: LayerSpec, device: str, most_tokens: int) -> Layer:
    dtype = torch.bfloat16
    return make_layer(spec, dtype, experts_that_fit(spec, dtype, machine.available_bytes(device), most_tokens), device)


def main(arguments: list[str]) -> None:
    """Do the jobs that stand behind the device's name."""
    device, *texts = arguments
    with torch.inference_mode():
        for text in texts:
            for reason in compile_job(Job.parse(text), device):
                print(f"{text}: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
