"""How long a pass of a model takes, split by what it is spent in, for one choice of how to run it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields

import torch
from torch import Tensor

from moestro.errors import unsupported
from moestro.formats import find_format
from moestro.memory import Residents, policy_named, visit_of
from moestro.ops import native
from moestro.ops.expert_mlp import costs, cpu, crossover
from moestro.parallel import Placement
from moestro.parallel.simulate import Simulation, simulate
from moestro.parallel.simulate_links import Mesh
from moestro.parallel.simulate_traces import zipf_ids
from moestro.planning import rules
from moestro.planning.machines import Machine
from moestro.planning.model import OPERATION, Counts, ExpertLayer, Model
from moestro.planning.sample import Load, Rest
from moestro.types import Routing

REPLAYED = 48
"""Steps of decoding that are replayed, after as many that fill the slots."""
MOST_DRAWN = 4096
"""Tokens of which a batch's spread over ranks is drawn."""
FLOAT32 = 4


@dataclass(frozen=True)
class Times:
    """Seconds of one pass.

    Attributes:
        experts, dense, attention: in routed experts, in other linear modules, in attention with its own.
        communication: between devices.
        misses: waiting for experts that memory has no room for.
        overhead: everything else.
    """

    experts: float = 0.0
    dense: float = 0.0
    attention: float = 0.0
    communication: float = 0.0
    misses: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max((each.name for each in fields(self)), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class Choice:
    """One way to run a model.

    Attributes:
        format: of the experts; None as they are stored.
        memory: bytes that experts may take, the others being read as they are needed; None for all of them.
        ep, tp: ranks along the experts, and along each expert's intermediate size.
    """

    format: str | None = None
    memory: int | None = None
    ep: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.ep * self.tp


@dataclass(frozen=True, eq=False)
class Spread:
    """How tokens are spread over experts: drawn with an exponent (0: evenly), or recorded ids [T, K] of each layer."""

    exponent: float = 0.0
    recorded: tuple[Tensor, ...] = field(default=(), repr=False)

    def ids(self, index: int, layer: ExpertLayer, num_tokens: int, seed: int = 0) -> Tensor:
        """Of so many tokens of a layer, [T, K]."""
        if not self.recorded:
            return zipf_ids(num_tokens, layer.size.experts, layer.size.top_k, self.exponent, seed)
        found = self.recorded[index]
        start = seed * num_tokens
        return found[torch.arange(start, start + num_tokens) % len(found)]

    def touched(self, index: int, layer: ExpertLayer, num_tokens: int) -> float:
        """Experts of a layer that a batch of tokens reaches, expected."""
        size = layer.size
        if not self.recorded and not self.exponent:
            return size.experts * (1 - (1 - size.top_k / size.experts) ** num_tokens)
        shares = _shares(self, index, layer)
        return float((1 - (1 - shares) ** num_tokens).sum())


@functools.lru_cache(maxsize=512)
def _shares(spread: Spread, index: int, layer: ExpertLayer) -> Tensor:
    """Of the tokens, that reach each expert."""
    ids = spread.recorded[index] if spread.recorded else spread.ids(0, layer, MOST_DRAWN)
    return torch.bincount(ids[ids >= 0].flatten(), minlength=layer.size.experts).double() / len(ids)


def expert_seconds(model: Model, machine: Machine, spread: Spread, num_tokens: int, choice: Choice) -> float:
    """Of all layers' experts, on the rank that has most of the pairs."""
    cached = machine.is_here and _are_cached(model)
    total = 0.0
    for index, layer in enumerate(model.layers):
        pairs = num_tokens * layer.size.top_k * _imbalance(spread, index, layer, num_tokens, choice.ep)
        part = _Part(layer, spread.touched(index, layer, num_tokens) / choice.ep, pairs / choice.ep, choice.tp, cached)
        total += part.here(model.dtype, machine) if machine.is_here else part.by_rates(machine)
    return total


@dataclass(frozen=True)
class _Part:
    """What one rank computes of a layer: experts, rows of all of them, and of each expert one slice of so many."""

    layer: ExpertLayer
    experts: float
    pairs: float
    slices: int
    cached: bool

    def by_rates(self, machine: Machine) -> float:
        weights = (math.prod(self.layer.gate_up) + math.prod(self.layer.down)) / self.slices
        reading = self.experts * self.layer.size.expert_bytes / self.slices / machine.read_rate
        return max(reading, 2 * self.pairs * weights / machine.flops(self.layer.format))

    def here(self, dtype: torch.dtype, machine: Machine) -> float:
        (n, h), (_, i) = self.layer.gate_up, self.layer.down
        work = costs.Work(
            experts=self.experts,
            rows=self.pairs / self.experts,
            first=n * max(h, costs.LEAST_COLUMNS) // self.slices,
            second=h * max(i // self.slices, costs.LEAST_COLUMNS),
            nbytes=self.experts * self.layer.size.expert_bytes / self.slices,
            cached=self.cached,
        )
        engine, plain = (_costs(way, dtype, self.layer.format, (h, i // self.slices)) for way in ("", costs.PLAIN))
        seconds = [work.seconds(*each, machine.read_rate) for each in (engine, plain)]
        chosen = plain if seconds[1] < crossover.MARGIN * seconds[0] else engine
        # Between layers the next weights are not yet on their way: reading and multiplying overlap in part only.
        return self.experts * chosen[0].call + math.hypot(work.products(*chosen), work.reading(machine.read_rate))


def _are_cached(model: Model) -> bool:
    from moestro.machine import cache_bytes

    size = sum(each.experts * each.expert_bytes for each in model.sizes)
    return size <= max(cache_bytes().values(), default=0)


def _costs(way: str, dtype: torch.dtype, form: str, columns: tuple[int, int]) -> tuple[costs.Costs, costs.Costs]:
    """At the columns of gate_up and of down; of the engine's best set, or of plain torch."""
    bind: costs.Bind = crossover.bind_plain
    if not way:
        isa = _set(dtype, form)
        way, bind = f"cpu-{isa.name}", cpu.binder(isa)
    threads = torch.get_num_threads()
    cases = (costs.Sample(dtype, form, "float", costs.columns_of(n), threads) for n in columns)
    first, second = (costs.costs(way, bind, case) for case in cases)
    return first, second


@functools.cache
def _set(dtype: torch.dtype, form: str) -> native.Isa:
    """The best instruction set for experts of a format."""
    weights = costs.sample(find_format(form), 256, "float", 1)
    routing = Routing(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    found = cpu.best_set(torch.zeros(1, 256, dtype=dtype), routing, weights)
    if found is None:
        raise unsupported(
            OPERATION,
            got=f"experts in {form} and tokens of {dtype}, which the native engine does not multiply here",
            needs="an instruction set that does",
            fix="See why: moestro.explain(moestro.expert_mlp, ...); or describe a machine: --machine.",
        )
    return found


def _imbalance(spread: Spread, index: int, layer: ExpertLayer, num_tokens: int, ranks: int) -> float:
    """The most pairs of a rank over the mean."""
    if ranks == 1:
        return 1.0
    mesh = Mesh(ranks, links="switch")
    return _flow(spread, (index if spread.recorded else 0, layer), min(num_tokens, MOST_DRAWN), mesh, 1).imbalance


@functools.lru_cache(maxsize=512)
def _flow(spread: Spread, layer: tuple[int, ExpertLayer], num_tokens: int, mesh: Mesh, row_bytes: int) -> Simulation:
    placement = Placement.contiguous(layer[1].size.experts, mesh.num_ranks)
    return simulate(spread.ids(*layer, num_tokens), mesh, placement, row_bytes, "unicast")


def communication(model: Model, machine: Machine, spread: Spread, num_tokens: int, choice: Choice) -> tuple[str, float]:
    """The dispatcher that takes less, by name, and its seconds in all layers.

    Ranks have the same tokens. "all-reduce" sums all outputs over the ranks, in float32. "all-to-all" sends each rank's
    slice of the tokens to the experts, and gathers the outputs; it needs whole experts.
    """
    ranks = choice.ranks
    if ranks == 1:
        return "none", 0.0
    layer, depth = model.layers[0], len(model.layers)
    hidden, rate, each = layer.gate_up[1], machine.link_bytes_per_second, machine.link_seconds
    reduced = 2 * (ranks - 1) * (num_tokens * hidden * FLOAT32 / ranks / rate + each)
    found = {"all-reduce": depth * reduced}
    if choice.tp == 1:
        drawn = min(num_tokens, MOST_DRAWN)
        mesh = Mesh(ranks, links="switch", bytes_per_second=rate, hop_seconds=each)
        row = hidden * model.dtype.itemsize
        flow = _flow(spread, (0, layer), drawn, mesh, row)
        sent = (flow.dispatch_microseconds + flow.combine_microseconds) * 1e-6 * num_tokens / drawn
        gathered = (ranks - 1) * (num_tokens * row / ranks / rate + each)
        found["all-to-all"] = depth * (sent + gathered)
    name = min(found, key=lambda key: found[key])
    return name, found[name]


def missed_bytes(model: Model, spread: Spread, load: Load, budget: int) -> tuple[float, float]:
    """Bytes of experts that are read for the prompt's pass, from nothing, and for a step of decoding, replayed."""
    residents = Residents(model.sizes, budget, policy_named(OPERATION, "expected"))
    prompt, before = load.batch * load.prompt_tokens, 0
    for step in range(-1, 2 * REPLAYED):
        if step == REPLAYED:
            before = _read(residents)
        for index, layer in enumerate(model.layers):
            ids = spread.ids(index, layer, prompt if step < 0 else load.batch, seed=step + 1)
            visit = visit_of(index, ids.tolist(), layer.size.experts)
            residents.visit(index, visit.experts, visit.last)
    first = sum(counts.read_bytes for counts in residents.prompt)
    return float(first), (_read(residents) - before) / REPLAYED


def _read(residents: Residents) -> int:
    return sum(counts.read_bytes for counts in residents.decode)


def described_rest(model: Model, machine: Machine, counts: Sequence[Counts]) -> list[Rest]:
    """Of passes that were counted, on a described machine: what is read or multiplied, and a time for each layer."""
    found, cached = [], 0
    for each in counts:
        dense = max(each.weight_bytes / machine.read_rate, each.flops / machine.flops("default"))
        found.append(Rest(dense, cached / machine.read_rate, model.depth * machine.layer_seconds))
        cached = each.cache_bytes
    return found


def scaled(rest: Rest, share: float) -> Rest:
    """All of it by a factor."""
    return Rest(*(share * each for each in astuple(rest)))


def strategies(model: Model, machine: Machine, load: Load) -> tuple[str, int | None]:
    """How decoding is walked, and the block size of the prompt; by rules of thumb where nothing is measured."""
    if machine.is_here:
        return "auto", None
    size = model.layers[0].size
    tokens = load.batch * load.prompt_tokens
    block = rules.block_size(tokens, size.top_k, size.experts, machine.balance(model.layers[0].format))
    return rules.strategy(load.batch, size.top_k, size.experts), block


def times_of(rest: Rest, **others: float) -> Times:
    """One pass."""
    return Times(dense=rest.dense, attention=rest.attention, overhead=rest.overhead, **others)
