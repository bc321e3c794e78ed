"""What a benchmark of ranks found: rows of dispatchers, and the report of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from moestro.bench.schema import OK, document

_SETTINGS = ("layer", "dtype", "format", "ranks", "threads", "hosts", "exponent", "rank")
"""Attributes of a report that say what was measured, and who says so."""
_SIZES = {"H": "hidden_size", "I": "intermediate_size", "E": "num_experts", "K": "top_k"}


@dataclass(frozen=True)
class RankRow:
    """One dispatcher with one number of tokens. Lists over ranks are in their order; of pairs [from][to].

    Attributes:
        pairs: (token, expert) pairs that each rank computes.
        stages: microseconds of each stage on each rank, medians over rounds. What a rank waits for another is in the
            stage in which it waits: dispatch or combine.
        row_bytes: of tokens and results, from each rank to each.
        least_row_bytes: the fewest that compute the same: each token of a rank once to each other that it needs, and
            one row back.
        other_bytes: routing, counts and all else, from each rank to each.
        error: relative L2 error of the output against one process, of the rank where it is largest; 0.0 of dispatchers
            that send rows as they are, whose difference is rounding.
        microseconds: of the whole layer, from when all ranks begin until the last is done; median over rounds.
        alone_microseconds: of one process with as many threads as all ranks together, on all tokens.
        ratio, ratio_low, ratio_high: microseconds over alone_microseconds, median and quartiles over rounds. None with
            alone_microseconds where the ranks are on several hosts.
    """

    dispatcher: str
    num_tokens: int
    rounds: int
    pairs: list[int]
    stages: dict[str, list[float]]
    row_bytes: list[list[int]]
    least_row_bytes: list[list[int]]
    other_bytes: list[list[int]]
    error: float
    microseconds: float
    alone_microseconds: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None

    @property
    def imbalance(self) -> float:
        """The most pairs of a rank over the mean."""
        mean = sum(self.pairs) / len(self.pairs)
        return max(self.pairs) / mean if mean else 1.0

    @property
    def slowest(self) -> int:
        """The rank whose experts take longest."""
        times = self.stages["experts"]
        return times.index(max(times))


@dataclass
class RanksReport:
    """Everything one run found; `rank` is who says so."""

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    layer: str
    dtype: str
    format: str
    sizes: dict[str, int]
    ranks: int
    threads: int
    hosts: list[str]
    exponent: float
    rank: int = 0
    rows: list[RankRow] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps, in the form of every benchmark; each row with its imbalance."""
        sizes = {_SIZES[name]: size for name, size in self.sizes.items()}
        settings = {name: getattr(self, name) for name in _SETTINGS} | sizes
        points = [{"status": self._status(row), **asdict(row), "imbalance": row.imbalance} for row in self.rows]
        return document(self, settings, points, notes=self.wrong)

    def _status(self, row: RankRow) -> str:
        found = any(text.startswith(f"{row.dispatcher} T={row.num_tokens}, ") for text in self.wrong)
        return "wrong output" if found else OK
