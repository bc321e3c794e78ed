"""How long a pass of a model takes, split by what it is spent in, for one choice of how to run it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields, replace

import torch
from torch import Tensor

from moestro.errors import unsupported
from moestro.formats import find_format
from moestro.memory import Residents, policy_named, visit_of
from moestro.ops import native
from moestro.ops.expert_mlp import costs, cpu, crossover
from moestro.parallel import Placement
from moestro.parallel.processes import threads_each
from moestro.parallel.simulate import simulate
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
"""Tokens of which a batch's spread over experts and ranks is drawn."""
MOST_BATCHES = 64
"""Of few tokens, that are drawn to find what the busiest rank has in the mean."""
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
        shares = _shares(self, *self.alike(index, layer))
        return float((1 - (1 - shares) ** num_tokens).sum())

    def pairs(self, index: int, layer: ExpertLayer, num_tokens: int) -> float:
        """Slots in use of so many tokens of a layer."""
        if not self.recorded:
            return float(num_tokens * layer.size.top_k)
        return num_tokens * float((self.recorded[index] >= 0).sum()) / len(self.recorded[index])

    def alike(self, index: int, layer: ExpertLayer) -> tuple[int, ExpertLayer]:
        """A layer and its index; the same for all whose ids are drawn alike."""
        return (index, layer) if self.recorded else (0, replace(layer, name=""))


@functools.lru_cache(maxsize=512)
def _shares(spread: Spread, index: int, layer: ExpertLayer) -> Tensor:
    """Of the tokens, that reach each expert."""
    ids = spread.recorded[index] if spread.recorded else spread.ids(0, layer, MOST_DRAWN)
    counts = torch.bincount(ids[ids >= 0].flatten(), minlength=layer.size.experts).double()
    return (counts / len(ids)).clamp(max=1.0)


@functools.lru_cache(maxsize=512)
def _busiest(spread: Spread, index: int, layer: ExpertLayer, num_tokens: int, ranks: int) -> tuple[float, float]:
    """The most experts that a batch reaches on one of the ranks, and the most pairs, in the mean over drawn batches."""
    tokens, experts = min(num_tokens, MOST_DRAWN), layer.size.experts
    batches = min(MOST_DRAWN // tokens, MOST_BATCHES)
    ids = spread.ids(index, layer, batches * tokens).reshape(batches, -1)
    counts = torch.zeros(batches, experts + 1, dtype=torch.int64)  # the last is of empty slots
    counts.scatter_add_(1, torch.where(ids >= 0, ids, experts), torch.ones_like(ids))
    own = [counts[:, list(held)] for held in Placement.contiguous(experts, ranks).experts]
    reached = torch.stack([(each > 0).sum(1) for each in own]).amax(0).double().mean()
    pairs = torch.stack([each.sum(1) for each in own]).amax(0).double().mean()
    return float(reached), float(pairs) * num_tokens / tokens


def expert_seconds(model: Model, machine: Machine, spread: Spread, num_tokens: int, choice: Choice) -> float:
    """Of all layers' experts, on the rank that has most to do; a choice of slices that `ExpertLayer.cut` can make."""
    cached = machine.is_here and _are_cached(model)
    total = 0.0
    for index, layer in enumerate(model.layers):
        if choice.ep == 1:
            load = spread.touched(index, layer, num_tokens), spread.pairs(index, layer, num_tokens)
        else:
            load = _busiest(spread, *spread.alike(index, layer), num_tokens, choice.ep)
        own = layer.cut(choice.tp)
        assert own is not None
        if load[0]:
            part = _Part(own, *load, cached)
            total += part.here(model.dtype, machine, choice.ranks) if machine.is_here else part.by_rates(machine)
    return total


@dataclass(frozen=True)
class _Part:
    """What one rank computes of a layer: so many of its experts, or of their slices, with rows of all of them."""

    layer: ExpertLayer
    experts: float
    pairs: float
    cached: bool

    def by_rates(self, machine: Machine) -> float:
        reading = self.experts * self.layer.size.expert_bytes / machine.read_rate
        return max(reading, 2 * self.pairs * self.layer.weights / machine.flops(self.layer.format))

    def here(self, dtype: torch.dtype, machine: Machine, processes: int) -> float:
        """In one of so many processes, which share threads and memory, and choose by nothing that is measured."""
        threads = threads_each(OPERATION, processes)
        rate = machine.read_rate / processes
        (n, h), (_, i) = self.layer.gate_up, self.layer.down
        work = costs.Work(
            experts=self.experts,
            rows=self.pairs / self.experts,
            first=n * max(h, costs.LEAST_COLUMNS),
            second=h * max(i, costs.LEAST_COLUMNS),
            nbytes=self.experts * self.layer.size.expert_bytes,
            cached=self.cached,
        )
        chosen = engine = _costs("", dtype, self.layer.format, (h, i), threads)
        if processes == 1 and crossover.decides(self.layer.size.expert_bytes):
            plain = _costs(costs.PLAIN, dtype, self.layer.format, (h, i), threads)
            seconds = [work.seconds(*each, rate) for each in (engine, plain)]
            chosen = plain if seconds[1] < crossover.MARGIN * seconds[0] else engine
        # Between layers the next weights are not yet on their way: reading and multiplying overlap in part only.
        return self.experts * chosen[0].call + math.hypot(work.products(*chosen), work.reading(rate))


def _are_cached(model: Model) -> bool:
    from moestro.machine import cache_bytes

    size = sum(each.experts * each.expert_bytes for each in model.sizes)
    return size <= max(cache_bytes().values(), default=0)


def _costs(
    way: str, dtype: torch.dtype, form: str, columns: tuple[int, int], threads: int
) -> tuple[costs.Costs, costs.Costs]:
    """At the columns of gate_up and of down, with so many threads; of the engine's best set, or of plain torch."""
    bind: costs.Bind = crossover.bind_plain
    if not way:
        isa = _set(dtype, form)
        way, bind = f"cpu-{isa.name}", cpu.binder(isa)
    cases = (costs.Sample(dtype, form, "float", costs.columns_of(n), threads) for n in columns)
    with _threads(threads):
        first, second = (costs.costs(way, bind, case) for case in cases)
    return first, second


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Inside, PyTorch has so many."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


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


@functools.lru_cache(maxsize=512)
def _sent_rows(spread: Spread, index: int, layer: ExpertLayer, num_tokens: int, ranks: int) -> float:
    """Rows that the busiest link carries to the experts of so many tokens, and back."""
    tokens = min(num_tokens, MOST_DRAWN)
    placement = Placement.contiguous(layer.size.experts, ranks)
    ids, mesh = spread.ids(index, layer, tokens), Mesh(ranks, links="switch")
    flow = simulate(ids, mesh, placement, row_bytes=1, dispatch="unicast")
    return (int(flow.dispatch_bytes.max()) + int(flow.combine_bytes.max())) * num_tokens / tokens


def communication(model: Model, machine: Machine, spread: Spread, num_tokens: int, choice: Choice) -> tuple[str, float]:
    """The dispatcher that takes less, by name, and its seconds in all layers.

    Ranks have the same tokens. "all-reduce" (`AllReduceDispatcher`) sums all outputs over the ranks, in float32.
    "all-to-all" (`SlicedDispatcher` of `AllToAllDispatcher`) sends each rank's slice of the tokens to the experts, and
    gathers the outputs; it needs whole experts. Counts, ids and weights that travel beside rows are left out.

    Processes of this machine sum, as `moestro generate` has them.
    """
    ranks, swaps = choice.ranks, choice.tp == 1 and not machine.is_here
    if ranks == 1:
        return "none", 0.0
    rate, each = machine.link_bytes_per_second, machine.link_seconds
    reduced = swapped = 0.0
    for index, layer in enumerate(model.layers):
        hidden = layer.gate_up[1]
        reduced += 2 * (ranks - 1) * (num_tokens * hidden * FLOAT32 / ranks / rate + each)
        if swaps:
            row = hidden * model.dtype.itemsize / rate
            swapped += _sent_rows(spread, *spread.alike(index, layer), num_tokens, ranks) * row + 2 * each
            swapped += (ranks - 1) * (-(-num_tokens // ranks) * row + each)
    found = {"all-reduce": reduced} | ({"all-to-all": swapped} if swaps else {})
    name = min(found, key=lambda key: found[key])
    return name, found[name]


def logits_seconds(model: Model, machine: Machine, num_sequences: int, ranks: int) -> float:
    """In which processes of this machine take the logits of the first, in float32, from which a pass's tokens come."""
    if ranks == 1 or not machine.is_here:
        return 0.0
    size = num_sequences * int(model.config.get_text_config().vocab_size) * FLOAT32
    return math.ceil(math.log2(ranks)) * (size / machine.link_bytes_per_second + machine.link_seconds)


def missed_bytes(model: Model, spread: Spread, load: Load, budget: int) -> tuple[float, float]:
    """Bytes of experts that are read for the prompt's pass, from nothing, and for a step of decoding, replayed."""
    residents = Residents(model.sizes, budget, policy_named(OPERATION, "expected"))
    read = []  # after the prompt, and after each step
    for step in range(-1, 2 * REPLAYED):
        tokens = load.batch if step >= 0 else load.batch * load.prompt_tokens
        seed = load.prompt_tokens + step if step >= 0 else 0  # of recorded ids, steps go on where the prompt ends
        for index, layer in enumerate(model.layers):
            visit = visit_of(index, spread.ids(index, layer, tokens, seed).tolist(), layer.size.experts)
            residents.visit(index, visit.experts, visit.last)
        read.append(residents.total.read_bytes)
    return float(read[0]), (read[-1] - read[REPLAYED]) / REPLAYED


def described_rest(model: Model, machine: Machine, counts: tuple[Counts, Counts, int]) -> tuple[Rest, Rest]:
    """On a described machine, of the prompt's pass and of a step: what is read or multiplied, a time for each layer.

    `counts` is what `count` returns. A step reads as many keys and values as steps do in the mean.
    """
    prompt, step, at_the_end = counts
    kept = 0.0, (prompt.cache_bytes + at_the_end) / 2
    first, second = (
        Rest(
            max(each.weight_bytes / machine.read_rate, each.flops / machine.flops("default")),
            cached / machine.read_rate,
            model.depth * machine.layer_seconds,
        )
        for each, cached in zip((prompt, step), kept, strict=True)
    )
    return first, second


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
