"""Looking for better tiles on the GPU at hand, by timing: for who wants the last few per cent. Never run unasked."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gpu import tuned
from moestro import machine
from moestro.bench.failures import failures, sentence
from moestro.bench.layers import Layer, LayerSpec, inputs, make_layer
from moestro.bench.peers.variant import Call
from moestro.bench.timing import Timer, cold_bytes, queued_clock
from moestro.errors import unsupported
from moestro.ops import gpu
from moestro.ops.expert_mlp import triton, triton_tuning
from moestro.ops.expert_mlp.triton_tuning import Plan, Problem, Tile, shared_bytes
from moestro.ops.gpu import Device
from moestro.tolerances import disagreement
from moestro.types import Routing
from moestro.weights import ExpertWeights
from peers.graphs import MOST_TOKENS, captured

ROUNDS = 7
"""Timed calls of a candidate, over as many routings."""

WORTH = 0.98
"""A candidate replaces the best one where it takes at most this share of its time."""

MOST_CANDIDATES = 48
"""Tried for one number of tokens."""


@dataclass(frozen=True)
class Found:
    """Of one number of tokens: the best plan, its seconds, those of the plan by default, and how many were tried."""

    num_tokens: int
    plan: Plan
    seconds: float
    default_seconds: float
    tried: int

    def __str__(self) -> str:
        gain = self.default_seconds / self.seconds
        return (
            f"T = {self.num_tokens}: {self.seconds * 1e6:.1f} us after {self.tried} candidates, "
            f"{self.default_seconds * 1e6:.1f} us by default ({gain:.2f}x); {self.plan}"
        )


def tune(
    spec: LayerSpec, format: str, tokens: tuple[int, ...], on_found: Callable[[Found], None] = lambda f: None
) -> list[Found]:
    """Time candidates for a layer in bfloat16 on the current CUDA device, and store the best plan for each T.

    Routings are random ones of the benchmark, in turn, so that no two calls in a row read the same experts. Outputs
    have to agree with those of the plan by default. Up to 64 tokens what is timed are CUDA graphs of the calls: without
    them the host's launches take longer than the kernels, and all plans alike.

    Args:
        spec: the layer, of the sizes that a model has on this device.
        format: of the weights; "dense" is bfloat16.
        tokens: numbers of tokens.
        on_found: called with what was found for each of them.

    Raises:
        UnsupportedError: there is no CUDA device on which the kernels run, or no plan runs.
    """
    if not torch.cuda.is_available():
        raise unsupported(
            "tune", got="no CUDA device", needs="one to time kernels on", fix="Run it where they will run."
        )
    layer = make_layer(spec, torch.bfloat16, spec.num_experts, "cuda")
    weights, found = layer.in_format(format), []
    cache = machine.describe_gpu(layer.device)["l2_bytes"]
    clock = queued_clock(layer.device, cold_bytes(cache, layer.num_experts * weights.bytes_per_expert))
    device = gpu.device_of(layer.stored.gate_up)
    with torch.inference_mode():
        for num_tokens in tokens:
            trial = Trial.of(layer, weights, num_tokens, clock)
            best = descend(trial.problem, device, trial.seconds)
            if not isfinite(best.seconds):
                raise unsupported(
                    "tune",
                    got=f"no plan that runs at T = {num_tokens}: {trial.failed[0]}",
                    needs="one at least",
                    fix="See whether moestro.expert_mlp runs on this device.",
                )
            tuned.store(tuned.device_name(layer.device), {trial.problem: best.plan})
            on_found(best)
            found.append(best)
    return found


def launch(x: Tensor, routing: Routing, weights: ExpertWeights, plan: Plan) -> Tensor:
    """`expert_mlp` by this plan, on the device of x."""
    return prepared(x, weights, plan)(x, routing, weights)


def prepared(x: Tensor, weights: ExpertWeights, plan: Plan) -> Callable[[Tensor, Routing, ExpertWeights], Tensor]:
    """The same for many calls on tensors that lie like those of the first."""
    kernels: Any = importlib.import_module("moestro.ops.expert_mlp.triton_launch")
    compute = kernels.prepared(plan, triton.compute_dtype(x, weights))

    def call(x: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
        with gpu.on(x):
            y: Tensor = compute(x, routing, weights)
        return y

    return call


@dataclass(frozen=True, eq=False)
class Trial:
    """Calls of one layer on one number of tokens, by whatever plan; `failed` is why some of them could not be timed."""

    x: Tensor
    routings: list[Routing]
    weights: ExpertWeights
    problem: Problem
    expected: Tensor
    clock: Timer
    capture: Callable[[Call], Call] = captured
    failed: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, layer: Layer, weights: ExpertWeights, num_tokens: int, clock: Timer) -> Trial:
        """With inputs of the benchmark; outputs of the plan by default are the expected ones."""
        x, routings = inputs(layer, num_tokens, ROUNDS)
        problem = triton.problem(x, routings[0], weights)
        how = triton_tuning.choose(problem, gpu.device_of(x), ("auto", None), False)
        expected = launch(x, routings[0], weights, how).float()
        return cls(x, routings, weights, problem, expected, clock)

    def calls(self, plan: Plan) -> list[Call]:
        """One for each routing: captured as a CUDA graph for few tokens, whose launches would take longer."""
        plain = [partial(launch, self.x, r, self.weights, plan) for r in self.routings]
        return [self.capture(call) for call in plain] if self.x.shape[0] <= MOST_TOKENS else list(plain)

    def seconds(self, plan: Plan) -> float | None:
        """The median time of a call; None where the plan does not compile, fit or agree."""
        try:
            output = launch(self.x, self.routings[0], self.weights, plan)
            wrong = disagreement(output, self.expected, self.x.dtype)
            if wrong is None:
                return median(map(self.clock, itertools.islice(itertools.cycle(self.calls(plan)), ROUNDS)))
            self.failed.append(wrong)
        except failures() as error:
            self.failed.append(sentence(error))
        return None


def descend(problem: Problem, device: Device, seconds: Callable[[Plan], float | None]) -> Found:
    """From the plan by default to its best neighbour, and on from there, until none is better or enough were tried."""
    start = triton_tuning.choose(problem, device, ("auto", None), False)
    first = seconds(start)
    default = best = float("inf") if first is None else first
    plan, seen, improved = start, {start}, True
    while improved and len(seen) < MOST_CANDIDATES:
        improved = False
        for candidate in neighbours(plan, problem, device):
            if candidate in seen or len(seen) >= MOST_CANDIDATES:
                continue
            seen.add(candidate)
            taken = seconds(candidate)
            if taken is not None and taken <= WORTH * best:
                plan, best, improved = candidate, taken, True
                break
    return Found(problem.num_tokens, plan, best, default, len(seen))


def neighbours(plan: Plan, problem: Problem, device: Device) -> Iterator[Plan]:
    """Plans one step away that fit into the device's shared memory: rows, then each product's tile, then the rest."""
    steps: list[Plan] = []
    if plan.ordered:
        rows = [r for r in (plan.rows // 2, plan.rows * 2) if triton_tuning.LEAST_ROWS <= r <= triton_tuning.MOST_ROWS]
        steps += [replace(plan, rows=r, block=r, tails=triton_tuning.tails(r, device)) for r in rows]
        halved = triton_tuning.tails(plan.rows, device) > 0
        steps += [replace(plan, tails=n) for n in range(3) if halved and n != plan.tails]
    for name in ("gate_up", "down"):
        steps += [replace(plan, **{name: tile}) for tile in _tiles(getattr(plan, name))]  # type: ignore[arg-type]
    if plan.wide:
        steps += [replace(plan, splits=n) for n in (plan.splits // 2, plan.splits * 2) if 1 <= n <= 8]
    return (step for step in steps if _fits(step, problem, device))


def _tiles(tile: Tile) -> Iterator[Tile]:
    changes: dict[str, tuple[Any, ...]] = {
        "columns": (tile.columns // 2, tile.columns * 2),
        "depth": (tile.depth // 2, tile.depth * 2),
        "warps": (tile.warps // 2, tile.warps * 2),
        "stages": (tile.stages - 1, tile.stages + 1),
        "swap": (not tile.swap,),
        "group": (tile.group // 2, tile.group * 2),
    }
    allowed = {"columns": (32, 256), "depth": (32, 256), "warps": (4, 8), "stages": (2, 10), "group": (1, 32)}
    for name, values in changes.items():
        least, most = allowed.get(name, (0, 1))
        # How many registers a thread has was said of the tile as it was.
        yield from (replace(tile, **{name: value, "registers": 0}) for value in values if least <= value <= most)


def _fits(plan: Plan, problem: Problem, device: Device) -> bool:
    pairs = zip((plan.gate_up, plan.down), problem.bits, strict=True)
    return all(shared_bytes(t, plan.rows, problem.itemsize, bits, device) <= device.shared_memory for t, bits in pairs)
