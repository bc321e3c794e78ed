"""A layer over the ranks of a job: bytes on the wire beside the fewest, imbalance, and the time of each stage.

Every rank measures, rank 0 reports. The ranks are those of torchrun, or processes that are started here.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moestro import machine
from moestro.bench.layers import DENSE, LayerSpec, dtype_name, experts_that_fit, make_layer
from moestro.bench.measure import about
from moestro.bench.ranks_records import RankRow, RanksReport
from moestro.errors import invalid_input
from moestro.experts import Experts
from moestro.moe import MoE
from moestro.parallel import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    CheapestDispatcher,
    Placement,
    make_mesh,
    parallelize,
)
from moestro.parallel.guard import Peers
from moestro.parallel.parallelize import MakeDispatcher
from moestro.parallel.processes import MOST_PROCESSES, gathered, run_ranks
from moestro.parallel.simulate_traces import zipf_ids
from moestro.parallel.wire import WireFormat, decode, encode
from moestro.routing import TopKRouter
from moestro.tolerances import disagreement, relative_error
from moestro.types import Routing

OPERATION = "bench parallel"
STAGES = ("route", "dispatch", "experts", "combine")
FEWEST_ROUNDS, MOST_ROUNDS = 5, 100
ASLEEP = 0.03
"""Seconds after which threads of a team that computed wait without spinning."""

DISPATCHERS: dict[str, MakeDispatcher] = {
    "all-to-all": AllToAllDispatcher,
    "exact": partial(AllToAllDispatcher, exact=True),
    "all-gather": AllGatherDispatcher,
    "cheapest": CheapestDispatcher,
    "int8": partial(AllToAllDispatcher, wire_format="int8"),
    "fp8-e4m3": partial(AllToAllDispatcher, wire_format="fp8-e4m3"),
}
IN_8_BITS: dict[str, WireFormat] = {"int8": "int8", "fp8-e4m3": "fp8-e4m3"}
"""Dispatchers whose rows lose bits: their outputs are checked against one process on the rows as they arrive."""


@dataclass(frozen=True)
class RankPlan:
    """What to measure on every rank.

    Attributes:
        spec: the layer.
        tokens: of all ranks together; each is one point with each dispatcher.
        dispatchers: names of `DISPATCHERS`.
        dtype, format: of x and of dense weights; how weights are stored.
        exponent: of the experts' popularity, i^-exponent; 0 is uniform.
        seconds: for each point.
        threads: of each rank.

    Raises:
        InvalidInputError: nothing to measure, an unknown dispatcher, or a number that is not positive.
    """

    spec: LayerSpec
    tokens: tuple[int, ...] = (512,)
    dispatchers: tuple[str, ...] = ("all-to-all", "all-gather")
    dtype: torch.dtype = torch.bfloat16
    format: str = DENSE
    exponent: float = 0.0
    seconds: float = 2.0
    threads: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            needs = "float32, bfloat16 or float16"
            raise invalid_input(OPERATION, got=f"dtype {self.dtype!r}", needs=needs, fix="Pick one of the three.")
        unknown = [name for name in self.dispatchers if name not in DISPATCHERS]
        small = min((*self.tokens, self.threads), default=0) < 1 or not self.seconds > 0 or not self.exponent >= 0
        if unknown or small or not self.dispatchers or not self.tokens:
            raise invalid_input(
                OPERATION,
                got=f"dispatchers {', '.join(self.dispatchers) or 'none'}, tokens {list(self.tokens)}, "
                f"{self.threads} threads, {self.seconds:g} s, zipf:{self.exponent:g}",
                needs=f"some of {', '.join(DISPATCHERS)}, and numbers above 0",
                fix="Leave an option out for its default.",
            )


def launch(plan: RankPlan, processes: int) -> RanksReport:
    """`measure` in so many processes of this machine, over gloo.

    Raises:
        InvalidInputError: fewer than 2 processes, or more than `MOST_PROCESSES`.
        CollectiveError: one of them ended without a result.
        MoestroError: what a rank raises, the first that does.
    """
    if not 2 <= processes <= MOST_PROCESSES:
        raise invalid_input(
            OPERATION,
            got=f"{processes} processes",
            needs=f"2 to {MOST_PROCESSES}",
            fix="More hosts are for torchrun: torchrun ... -m moestro bench parallel.",
        )
    report: RanksReport = run_ranks(OPERATION, processes, partial(measure, plan))[0]
    return report


def in_job() -> bool:
    """Whether this process is a rank: of a job that has begun, or of torchrun."""
    return dist.is_initialized() or dist.is_torchelastic_launched()


@torch.no_grad()
def measure(plan: RankPlan) -> RanksReport:
    """Measure on every rank of a job of torch.distributed; collective. The report is the same on all of them.

    Raises:
        InvalidInputError: fewer experts than ranks.
        UnsupportedError: memory does not hold the experts of one token.
        CollectiveError: a rank does not come.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    before = torch.get_num_threads()
    torch.set_num_threads(plan.threads)
    try:
        return _measure(plan)
    finally:
        torch.set_num_threads(before)


def _measure(plan: RankPlan) -> RanksReport:
    spec = plan.spec
    mesh = make_mesh(ep=dist.get_world_size())
    peers = Peers.of(range(mesh.size()))
    free = _told(peers, machine.available_bytes("cpu")) // (peers.size + 1)
    num_experts = experts_that_fit(spec, plan.dtype, free, max(plan.tokens))
    if num_experts < peers.size:
        raise invalid_input(
            OPERATION,
            got=f"{num_experts} experts of {spec.name} and {peers.size} ranks",
            needs="at least one expert a rank",
            fix="Start fewer ranks, or name a layer with more experts.",
        )
    whole = _layer(plan, num_experts)
    hosts = gathered(peers, OPERATION, platform.node())
    report = RanksReport(
        **about("cpu"),
        layer=spec.name,
        dtype=dtype_name(plan.dtype),
        format=plan.format,
        sizes={"H": spec.hidden_size, "I": spec.intermediate_size, "E": num_experts, "K": spec.top_k},
        ranks=peers.size,
        threads=plan.threads,
        hosts=list(dict.fromkeys(hosts)),
        exponent=plan.exponent,
        rank=peers.rank,
    )
    batches = {num_tokens: _batch(plan, num_experts, num_tokens, peers) for num_tokens in plan.tokens}
    expected = {(name, n): _expected(whole, name, batch) for n, batch in batches.items() for name in plan.dispatchers}
    cut = parallelize(MoE(whole.router, whole.experts), mesh)
    alone = whole if peers.rank == 0 and len(report.hosts) == 1 else None
    del whole
    gc.collect()
    points = [(name, num_tokens) for num_tokens in plan.tokens for name in plan.dispatchers]
    for name, num_tokens in points:
        assert isinstance(cut.dispatcher, AllToAllDispatcher)
        layer = MoE(cut.router, cut.experts, dispatcher=DISPATCHERS[name](cut.dispatcher.place))
        point = Point(plan, peers, batches[num_tokens], layer, alone)
        said = gathered(peers, OPERATION, point.differs(*expected[name, num_tokens]))
        report.wrong += [f"{name} T={num_tokens}, rank {r}: {text}" for r, (text, _) in enumerate(said) if text]
        report.rows.append(point.row((name, max(error for _, error in said)), len(report.hosts) == 1))
    return report


def _expected(whole: MoE, name: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """One process on this rank's rows as they arrive, and on the rows themselves."""
    routing, rows = batch.routing(whole, True), batch.x[batch.own]
    plain = whole.experts(rows, routing)
    if name not in IN_8_BITS:
        return plain, plain
    wire = IN_8_BITS[name]
    return whole.experts(decode(encode(rows, wire), wire, rows.dtype), routing), plain


def _layer(plan: RankPlan, num_experts: int) -> MoE:
    spec = plan.spec
    weights = make_layer(spec, plan.dtype, num_experts).in_format(plan.format)
    torch.manual_seed(0)
    router = TopKRouter(spec.hidden_size, num_experts, spec.top_k, scoring="softmax-renormalized", dtype=plan.dtype)
    return MoE(router, Experts.from_weights(weights)).requires_grad_(False)


@dataclass(frozen=True)
class Batch:
    """The tokens of all ranks, and which experts each chooses: drawn, whatever the router says.

    Attributes:
        x: [T, H] of all ranks.
        ids: [T, K].
        own: those of this rank.
    """

    x: Tensor
    ids: Tensor
    own: slice

    def routing(self, layer: MoE, own: bool) -> Routing:
        """What the router makes of this rank's tokens or of all, with the drawn ids."""
        part = self.own if own else slice(None)
        routing: Routing = layer.router(self.x[part])
        return routing.with_ids(self.ids[part])


def _batch(plan: RankPlan, num_experts: int, num_tokens: int, peers: Peers) -> Batch:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, plan.spec.hidden_size, generator=generator).to(plan.dtype)
    ids = zipf_ids(num_tokens, num_experts, plan.spec.top_k, plan.exponent, seed=num_tokens)
    ends = [num_tokens * (rank + 1) // peers.size for rank in range(peers.size)]
    return Batch(x, ids, slice([0, *ends][peers.rank], ends[peers.rank]))


@dataclass(frozen=True)
class Point:
    """One dispatcher with one batch, on this rank; `alone` is the whole layer, on rank 0."""

    plan: RankPlan
    peers: Peers
    batch: Batch
    layer: MoE
    alone: MoE | None

    def differs(self, expected: Tensor, plain: Tensor) -> tuple[str | None, float]:
        """How this rank's output differs from what is expected: a sentence, or None; and its error beside `plain`."""
        layer, batch = self.layer, self.batch
        assert layer.dispatcher is not None
        rows, local, handle = layer.dispatcher.dispatch(batch.x[batch.own], batch.routing(layer, True))
        y = layer.dispatcher.combine(layer.experts(rows, local), handle)
        return disagreement(y, expected), 0.0 if expected is plain or not len(y) else relative_error(y, plain)

    def row(self, named: tuple[str, float], with_alone: bool) -> RankRow:
        """Everything about it, by its name and its error; collective."""
        before = {kind: dict(sent) for kind, sent in self.peers.sent.items()}
        pairs, first = self._stages()
        sent = {k: {r: n - before.get(k, {}).get(r, 0) for r, n in each.items()} for k, each in self.peers.sent.items()}
        seconds = _told(self.peers, sum(first))
        count = min(max(int(self.plan.seconds / max(seconds, 1e-6) / 3), FEWEST_ROUNDS), MOST_ROUNDS)
        stages = [self._stages()[1] for _ in range(count)]
        whole, alone = self._in_turns(count, with_alone)
        by_pair = partial(_by_pair, self.peers, sent)
        ratios = [t / b for t, b in zip(whole, alone, strict=True)] if with_alone else []
        low, middle, high = quantiles(ratios, n=4, method="inclusive") if ratios else (None, None, None)
        found = gathered(self.peers, OPERATION, [median(each) * 1e6 for each in zip(*stages, strict=True)])
        return RankRow(
            dispatcher=named[0],
            error=named[1],
            num_tokens=len(self.batch.x),
            rounds=count,
            pairs=gathered(self.peers, OPERATION, pairs),
            stages={stage: [each[i] for each in found] for i, stage in enumerate(STAGES)},
            row_bytes=by_pair(lambda kind: kind == "rows"),
            other_bytes=by_pair(lambda kind: kind != "rows"),
            least_row_bytes=self._least(),
            microseconds=median(whole) * 1e6,
            alone_microseconds=median(alone) * 1e6 if with_alone else None,
            ratio=middle,
            ratio_low=low,
            ratio_high=high,
        )

    def _stages(self) -> tuple[int, list[float]]:
        """The pairs that this rank computes, and seconds of each stage of one call."""
        layer, x, clock = self.layer, self.batch.x[self.batch.own], time.perf_counter
        assert layer.dispatcher is not None
        self.peers.barrier(OPERATION)
        times = [clock()]
        routing = self.batch.routing(layer, True)
        times.append(clock())
        rows, local, handle = layer.dispatcher.dispatch(x, routing)
        times.append(clock())
        y = layer.experts(rows, local)
        times.append(clock())
        layer.dispatcher.combine(y, handle)
        times.append(clock())
        return int((local.expert_ids >= 0).sum()), [b - a for a, b in pairwise(times)]

    def _in_turns(self, count: int, with_alone: bool) -> tuple[list[float], list[float]]:
        """Seconds of the layer until the slowest rank is done, and of one process, in turns; the same on all ranks."""
        own, others = [], []
        for _ in range(count):
            own.append(sum(self._stages()[1]))
            if with_alone:
                others.append(self._alone())
        all_ranks = gathered(self.peers, OPERATION, [own, others])
        return [max(each) for each in zip(*(o for o, _ in all_ranks), strict=True)], all_ranks[0][1]

    def _alone(self) -> float:
        """Seconds of the whole layer on rank 0 while the others wait; 0 on those."""
        self.peers.barrier(OPERATION)
        seconds = 0.0
        if self.alone is not None:
            torch.set_num_threads(self.plan.threads * self.peers.size)
            for _ in range(2):  # the first starts the threads
                start = time.perf_counter()
                self.alone.experts(self.batch.x, self.batch.routing(self.alone, False))
                seconds = time.perf_counter() - start
            torch.set_num_threads(self.plan.threads)
            time.sleep(ASLEEP)
        self.peers.barrier(OPERATION)
        return seconds

    def _least(self) -> list[list[int]]:
        """By the definition, from everybody's ids: [from][to] in bytes."""
        world = self.peers.size
        placement = Placement.contiguous(int(self.layer.router.num_experts), world)  # type: ignore[arg-type]
        rows = [[0] * world for _ in range(world)]
        total = len(self.batch.x)
        ends = [total * (rank + 1) // world for rank in range(world)]
        for source, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
            ranks, _ = placement.locate(self.batch.ids[start:stop])
            for target in range(world):
                rows[source][target] = int((ranks == target).any(1).sum())
        each = self.batch.x.shape[1] * self.batch.x.element_size()
        return [[(rows[a][b] + rows[b][a]) * each * (a != b) for b in range(world)] for a in range(world)]


def _by_pair(peers: Peers, sent: dict[str, dict[int, int]], wanted: Callable[[str], bool]) -> list[list[int]]:
    own = [sum(each.get(r, 0) for kind, each in sent.items() if wanted(kind)) for r in range(peers.size)]
    return [list(row) for row in gathered(peers, OPERATION, own)]


def _told(peers: Peers, value: Any) -> Any:
    """What rank 0 says."""
    return gathered(peers, OPERATION, value)[0]
