"""The dispatcher that costs least for each batch, by what would be sent and how fast the ranks' links are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.moe import Dispatcher
from moestro.parallel.dispatchers import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Place,
    check_heads,
    kind_of,
    wide,
)
from moestro.parallel.guard import Peers
from moestro.types import Routing

OPERATION = "CheapestDispatcher"
ALL_TO_ALL, ALL_GATHER = "all-to-all", "all-gather"
MEASURED_BYTES = 1 << 20
"""That a rank sends to each other one to measure the rate."""
MEASURED_TIMES = 5


@dataclass(frozen=True)
class LinkRates:
    """How long collectives take: seconds for one, whatever it carries, and bytes a second that a rank sends.

    Attributes:
        all_to_all, all_gather: seconds and bytes per second. A reduce-scatter has those of what computes it: over gloo
            all_to_all, over NCCL all_gather.

    Raises:
        InvalidInputError: seconds below 0, or bytes per second that are not positive.
    """

    all_to_all: tuple[float, float]
    all_gather: tuple[float, float]

    def __post_init__(self) -> None:
        for seconds, rate in (self.all_to_all, self.all_gather):
            if not 0 <= seconds < float("inf") or not 0 < rate < float("inf"):
                raise invalid_input(
                    "LinkRates",
                    got=f"{seconds:g} s and {rate:g} bytes per second",
                    needs="seconds of at least 0 and a rate above 0",
                    fix="LinkRates.measured(peers) measures both.",
                )

    @classmethod
    def measured(cls, peers: Peers) -> LinkRates:
        """What this group's collectives take now, the same on every rank; once for a group, and collective.

        Of several runs the fastest counts, and of the ranks the slowest.
        """
        kept = _MEASURED.get(peers)
        if kept is None:
            kept = _MEASURED[peers] = cls(_rate(peers, _swap), _rate(peers, _gather))
        return kept

    def seconds(self, kind: str, messages: int, num_bytes: int) -> float:
        """Of so many collectives in which a rank sends so many bytes."""
        each, rate = self.all_to_all if kind == ALL_TO_ALL else self.all_gather
        return messages * each + num_bytes / rate


_MEASURED: WeakKeyDictionary[Peers, LinkRates] = WeakKeyDictionary()


def _swap(peers: Peers, each: int, device: torch.device) -> None:
    rows = torch.zeros(each * peers.size, dtype=torch.uint8, device=device)
    peers.all_to_all(rows, [each] * peers.size, [each] * peers.size, "rates", "")


def _gather(peers: Peers, each: int, device: torch.device) -> None:
    peers.all_gather(torch.zeros(each, dtype=torch.uint8, device=device), "rates", "")


def _rate(peers: Peers, send: Callable[[Peers, int, torch.device], None]) -> tuple[float, float]:
    device = torch.device("cpu") if peers.waits else torch.device("cuda", torch.cuda.current_device())
    found = []
    for each in (8, MEASURED_BYTES):
        times = []
        for _ in range(MEASURED_TIMES):
            begin = time.perf_counter()
            send(peers, each, device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
        found.append(min(times))
    told = peers.all_gather(torch.tensor([found], dtype=torch.float64, device=device), "rates", "").amax(0).tolist()
    return told[0], MEASURED_BYTES * max(peers.size - 1, 1) / max(told[1] - told[0], 1e-9)


@dataclass(frozen=True)
class Prediction:
    """What one way of sending a batch would cost.

    Attributes:
        name: "all-to-all" or "all-gather".
        messages: collectives, but for the one that all ways begin with.
        num_bytes: that the busiest rank sends, or gets if that is more.
        seconds: by the rates.
    """

    name: str
    messages: int
    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        size = f"{self.num_bytes:,} bytes of the busiest rank in {self.messages} collectives"
        return f"{self.name} {self.seconds * 1e6:,.0f} us ({size})"


@dataclass(frozen=True)
class _Chosen:
    inner: Any
    handle: Any
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class CheapestDispatcher(Dispatcher):
    """`AllToAllDispatcher` or `AllGatherDispatcher`, whichever is predicted to cost less for each batch.

    The ranks tell each other how many rows each has for each: the exchange that both ways begin with anyway. From that
    table and the rates every rank comes to the same predictions, and so to the same choice. `moestro.explain(layer, x)`
    prints them.

    Attributes:
        place: where the experts are.
        rates: of the group; None to measure them, once for a group, when the first dispatcher is made on it.
    """

    place: Place
    rates: LinkRates | None = None
    _ways: tuple[AllToAllDispatcher, AllGatherDispatcher] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.rates is None:
            object.__setattr__(self, "rates", LinkRates.measured(self.place.peers))
        object.__setattr__(self, "_ways", (AllToAllDispatcher(self.place), AllGatherDispatcher(self.place)))

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing, _Chosen]:
        """x [T, H] of this rank -> what the chosen dispatcher makes of it."""
        place, (swaps, gathers) = self.place, self._ways
        place.check(x, routing, OPERATION, str(self.rates))
        plan, kind = swaps.plan(routing), kind_of(x, routing)
        head = torch.cat([torch.tensor([len(x), *kind], device=x.device), plan.counts.flatten()])[None]
        heads = place.peers.all_gather(head, "counts", place.name).tolist()
        start = 1 + len(kind)
        check_heads([each[1:start] for each in heads], place, OPERATION)
        size, me = place.peers.size, place.peers.rank
        tables = [[each[start + i * size : start + (i + 1) * size] for each in heads] for i in (0, 1)]
        predictions = self.predict(tables[0], [each[0] for each in heads], x, routing)
        if predictions[0].name == ALL_GATHER:
            rows, local, handle = gathers.gather(x, routing, max(each[0] for each in heads))
            return rows, local, _Chosen(gathers, handle, predictions)
        counts = tuple((table[me], [each[me] for each in table]) for table in tables)
        rows, local, sent = swaps.send(x, routing, plan, (counts[0], counts[1]))
        return rows, local, _Chosen(swaps, sent, predictions)

    def combine(self, y: Tensor, handle: _Chosen) -> Tensor:
        """Outputs of the rows computed here -> [T, H] for the tokens of this rank."""
        combined: Tensor = handle.inner.combine(y, handle.handle)
        return combined

    def predict(
        self, rows: list[list[int]], num_tokens: list[int], x: Tensor, routing: Routing
    ) -> tuple[Prediction, ...]:
        """What both ways cost, the cheaper first; at the same cost all-to-all.

        Args:
            rows: that each rank has for each, [from][to].
            num_tokens: of each rank.
            x, routing: any of the batch, for sizes and dtypes.
        """
        assert self.rates is not None
        ranks, hidden = range(len(rows)), x.shape[1]
        row, beside, total = hidden * x.element_size(), 8 * routing.top_k, hidden * wide(x.dtype).itemsize
        out = [sum(rows[r][s] for s in ranks if s != r) for r in ranks]
        into = [sum(rows[s][r] for s in ranks if s != r) for r in ranks]
        busiest = max(max(out), max(into))
        swapped = busiest * (2 * row + beside)
        others, most = len(rows) - 1, max(num_tokens)
        gathered, scattered = others * most * (row + beside), others * most * total
        kind = ALL_TO_ALL if self.place.peers.waits else ALL_GATHER
        seconds = self.rates.seconds(ALL_GATHER, 2, gathered) + self.rates.seconds(kind, 1, scattered)
        found = (
            Prediction(ALL_TO_ALL, 3, swapped, self.rates.seconds(ALL_TO_ALL, 3, swapped)),
            Prediction(ALL_GATHER, 3, gathered + scattered, seconds),
        )
        return tuple(sorted(found, key=lambda each: each.seconds))

    def describe(self, handle: _Chosen) -> str:
        """What was predicted for a batch: the sentence of `moestro.explain`."""
        chosen, other = handle.predictions
        return f"{chosen}; {other}"
