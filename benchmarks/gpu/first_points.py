"""What the first run measures of a layer: calls and graphs of them beside a peer, plain reads of as many bytes, plans.

Nothing here knows a GPU but `cuda`: clocks, captures and probes are those of a `Device`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isfinite
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from gpu import tune
from gpu.items import Row
from moestro import machine
from moestro.bench.failures import failures, sentence
from moestro.bench.layers import Layer, LayerSpec, active_experts, expected_output, experts_that_fit, flops, inputs
from moestro.bench.layers import make_layer as make
from moestro.bench.measure import release
from moestro.bench.peers import PEERS, ours
from moestro.bench.peers.variant import Bind, Call
from moestro.bench.timing import Timer, alternate, cold_bytes, event_clock, queued_clock, ratio
from moestro.ops import gpu
from moestro.ops.expert_mlp import triton, triton_tuning
from moestro.ops.expert_mlp.triton_tuning import Plan, Problem, Tile
from moestro.tolerances import disagreement
from moestro.types import Routing
from moestro.weights import ExpertWeights
from peers.graphs import captured

DTYPE = torch.bfloat16
OURS, PEER = "moestro", "torch-grouped_mm"
CALL, GRAPH, IDLE = "call", "graph", "idle"
"""How a variant is timed: called, or replayed as a graph, behind work that is queued; or called on an idle device."""
SECONDS = 0.25
"""For each variant and way at a point."""
_READS = 7


@dataclass(frozen=True)
class Device:
    """Where layers lie, and what times, captures and probes there.

    Attributes:
        kind: as torch names it.
        queued, idle: timers for bytes that are written before each call.
        capture: a call as a graph of it.
        cache_bytes: of the last cache.
        rates: what is measured of the machine: bytes and FLOP a second, by probe.
        free_bytes: of memory.
    """

    kind: str
    queued: Callable[[int], Timer]
    idle: Callable[[int], Timer]
    capture: Callable[[Call], Call]
    cache_bytes: int
    rates: Callable[[], dict[str, dict[str, float]]]
    free_bytes: Callable[[], int]


def cuda() -> Device:
    """The current CUDA device."""
    kind = "cuda"
    return Device(
        kind,
        partial(queued_clock, kind),
        partial(event_clock, kind),
        captured,
        machine.describe_gpu(kind)["l2_bytes"],
        lambda: {"bytes_per_second": machine.bandwidths(kind), "flops_per_second": machine.matrix_rates(kind)},
        lambda: machine.available_bytes(kind),
    )


def make_layer(device: Device, spec: LayerSpec, most_tokens: int, most_experts: int | None = None) -> Layer:
    """The layer in memory, with as many experts as fit, or as are wanted at most."""
    release(device.kind)
    count = experts_that_fit(spec, DTYPE, device.free_bytes(), most_tokens)
    if most_experts is not None:
        count = min(count, max(most_experts, spec.top_k))
    return make(spec, DTYPE, count, device.kind)


def roof_rows(device: Device) -> list[Row]:
    """The rates of the machine, as measured now."""
    return [{"status": "ok", "roof": device.rates()}]


def read_seconds(device: Device, nbytes: int) -> float:
    """The least median time of plainly reading so many bytes: a sum, and a product of rows and a vector."""
    rows = max(nbytes // (4 * 1024), 1)
    buffer = torch.empty(rows, 1024, device=device.kind).fill_(1e-3)
    vector = torch.full((1024,), 0.5, device=device.kind)
    clock = device.queued(cold_bytes(device.cache_bytes, nbytes))
    probes: tuple[Call, ...] = (partial(torch.sum, buffer), partial(torch.mv, buffer, vector))
    for probe in probes:
        probe()
    return min(median(clock(probe) for _ in range(_READS)) for probe in probes)


def measure_point(
    device: Device, layer: Layer, num_tokens: int, rates: dict[str, float], how: Plan | None = None
) -> list[Row]:
    """Rows of moestro, by a plan of its own or the one that is given, and of the peer: called, as graphs, from idle.

    Each output is held against the reference first, a graph's too. Where one is wrong there are no ratios.
    """
    x, routings = inputs(layer, num_tokens, 16 if num_tokens <= 16 else 4)
    binds: dict[str, Bind] = {
        OURS: ours().prepare(layer) if how is None else by_plan(layer, how),
        PEER: PEERS[PEER].prepare(layer),
    }
    expected = expected_output(layer, x, routings[0])
    clocks = _clocks(device, layer)
    rows: list[Row] = []
    times: dict[tuple[str, str], list[float]] = {}
    for way, clock in clocks.items():
        calls, said = {}, {}
        for name, bind in binds.items():
            found = _checked_calls(device.capture if way == GRAPH else None, bind, x, routings, expected)
            if isinstance(found, tuple):
                said[name] = found
            else:
                calls[name] = found
        for name, samples in alternate(calls, SECONDS, clock).items():
            times[name, way] = samples
        rows += [_row(layer, num_tokens, name, way, *said.get(name, ("ok", None))) for name in binds]
        calls.clear()
        release(device.kind)
    nbytes = active_experts(routings[0].expert_ids) * layer.weights.bytes_per_expert
    work = {"bytes": nbytes, "flops": flops(layer.spec, routings[0]), "read_us": read_seconds(device, nbytes) * 1e6}
    return [_timed(row, times, work, rates, all(r["status"] != "wrong" for r in rows)) for row in rows]


def by_plan(layer: Layer, how: Plan) -> Bind:
    """Calls of the layer by a plan, which is prepared once."""
    made: list[Callable[[Tensor, Routing, ExpertWeights], Tensor]] = []

    def bind(x: Tensor, routing: Routing) -> Call:
        if not made:
            made.append(tune.prepared(x, layer.weights, how))
        return partial(made[0], x, routing, layer.weights)

    return bind


def _clocks(device: Device, layer: Layer) -> dict[str, Timer]:
    cold = cold_bytes(device.cache_bytes, layer.num_experts * layer.weights.bytes_per_expert)
    return {CALL: device.queued(cold), GRAPH: device.queued(cold), IDLE: device.idle(cold)}


def _checked_calls(
    capture: Callable[[Call], Call] | None, bind: Bind, x: Tensor, routings: list[Routing], expected: Tensor
) -> list[Call] | tuple[str, str]:
    """A call for each routing, the first of which is right; or its status and why there is none."""
    try:
        calls = [bind(x, routing) for routing in routings]
        calls = calls if capture is None else [capture(call) for call in calls]
        wrong = disagreement(calls[0](), expected, DTYPE)
    except failures() as error:
        return "skipped", sentence(error)
    return calls if wrong is None else ("wrong", wrong)


def _row(layer: Layer, num_tokens: int, variant: str, way: str, status: str, reason: str | None) -> Row:
    return {
        "layer": layer.spec.name,
        "experts": layer.num_experts,
        "tokens": num_tokens,
        "variant": variant,
        "way": way,
        "status": status,
        "reason": reason,
    }


def _timed(
    row: Row, times: dict[tuple[str, str], list[float]], work: dict[str, float], rates: dict[str, float], right: bool
) -> Row:
    """The row with its times, what share of the roof they are, and the peer's time over its own."""
    own = times.get((row["variant"], row["way"]))
    if own is None:
        return row
    low, middle, high = (1e6 * q for q in quantiles(own, n=4, method="inclusive"))
    rate = work["flops"] / middle * 1e6
    found: Row = {
        "us": middle,
        "us_quartiles": [low, high],
        "samples": len(own),
        **work,
        "of_read": work["read_us"] / middle,
        "of_matrix_rate": rate / rates["bf16-mm"] if "bf16-mm" in rates else None,
        "peer_over_ours": None,
    }
    other = times.get((PEER, row["way"]))
    if row["variant"] == OURS:
        if right and other is not None:
            found["peer_over_ours"] = list(ratio(other, own))
        else:
            found["no_ratio"] = "an output is wrong or missing at this point"
    return {**row, **found}


def prepared_plans(problem: Problem, device: gpu.Device) -> list[Plan]:
    """The plan by default, and those one step away from it that fit."""
    default = triton_tuning.choose(problem, device, ("auto", None), False)
    return list(dict.fromkeys((default, *tune.neighbours(default, problem, device))))


def sweep_point(device: Device, layer: Layer, num_tokens: int, seconds: float, clock: Callable[[], float]) -> list[Row]:
    """A row for each prepared plan that the time does for, as graphs, and one of what was best, from its parts too."""
    x, routings = inputs(layer, num_tokens, tune.ROUNDS)
    problem, end = triton.problem(x, routings[0], layer.weights), clock() + seconds
    plans = prepared_plans(problem, gpu.device_of(x))
    expected = tune.launch(x, routings[0], layer.weights, plans[0]).float()
    timer = _clocks(device, layer)[GRAPH]
    trial = tune.Trial(x, routings, layer.weights, problem, expected, timer, device.capture)
    found: dict[Plan, float] = {}
    rows: list[Row] = []
    for how in _and_combined(plans, found):
        if clock() >= end and found:
            rows.append(_plan_row(layer, num_tokens, how, None, "skipped", "no time was left"))
            continue
        taken = trial.seconds(how)
        if taken is not None:
            found[how] = taken
        status = ("ok", None) if taken is not None else ("skipped", trial.failed[-1])
        rows.append(_plan_row(layer, num_tokens, how, taken, *status))
    default = found.get(plans[0], float("inf"))
    best = min(found, key=lambda how: found[how], default=plans[0])
    if found.get(best, default) > tune.WORTH * default:
        best = plans[0]
    rows.append({**_plan_row(layer, num_tokens, best, found.get(best), "ok", None), "winner": True})
    rows[-1]["gain"] = default / found[best] if best in found and isfinite(default) else None
    return rows


def _and_combined(plans: list[Plan], found: dict[Plan, float]) -> Iterator[Plan]:
    """The plans, then the best of each product's tiles in one: `found` has the seconds of those before."""
    yield from plans
    default = plans[0]
    if default not in found:
        return
    best = default
    for name in ("gate_up", "down"):
        alone = [how for how in found if how == replace(default, **{name: getattr(how, name)})]
        fastest = min(alone, key=lambda how: found[how])
        best = replace(best, **{name: getattr(fastest, name)})
    if best not in found:
        yield best


def _plan_row(layer: Layer, num_tokens: int, how: Plan, seconds: float | None, status: str, reason: str | None) -> Row:
    us = None if seconds is None else seconds * 1e6
    about = {"layer": layer.spec.name, "tokens": num_tokens, "status": status, "reason": reason}
    return {**about, "us": us, "plan": asdict(how)}


def winners(rows: list[Row]) -> dict[tuple[str, int], Plan]:
    """The best plans of a sweep's rows, by layer and number of tokens."""
    return {(row["layer"], row["tokens"]): plan_of(row["plan"]) for row in rows if row.get("winner")}


def plan_of(value: dict[str, Any]) -> Plan:
    """What `asdict` made JSON of."""
    return Plan(**{**value, "gate_up": Tile(**value["gate_up"]), "down": Tile(**value["down"])})
