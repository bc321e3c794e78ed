"""What a benchmark is asked, and what it found: a plan, rows, a report."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from moestro.bench.layers import LayerSpec, dtype_name
from moestro.bench.peers.variant import Variant
from moestro.bench.schema import document, roof_of
from moestro.errors import InvalidInputError, invalid_input
from moestro.machine import Roof

BUDGET_SPENT = "the run's time budget was spent before this point"

Status = Literal["ok", "skipped", "wrong output"]
Kind = Literal["moestro", "read", "peer"]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        layers, tokens, dtypes: every combination is one point, with those of `ours` whose weights have as many bits.
        ours: moestro's variants; every ratio is to the first of the point.
        peers: what they are compared with where their weights have as many bits as moestro's.
        seconds: time each variant may spend on a point.
        device: where.
        budget: seconds for the whole run, or None. Points share what is left of it; those it does not reach are
            skipped, which their rows say.
        operation: what asks, for errors.
        reads: plain reads of the weights of `ours` (`peers.plain_reads`), whose bandwidth rows are a share of.

    Raises:
        InvalidInputError: nothing to measure, T < 1, seconds <= 0, a dtype that is no float of 16 or 32 bits, or a
            device that is not here.
    """

    layers: tuple[LayerSpec, ...]
    tokens: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    ours: tuple[Variant, ...]
    peers: tuple[Variant, ...]
    seconds: float = 1.0
    device: str = "cpu"
    budget: float | None = None
    operation: str = "bench layer"
    reads: tuple[Variant, ...] = ()

    def __post_init__(self) -> None:
        counts = {"layers": self.layers, "token counts": self.tokens, "dtypes": self.dtypes, "variants": self.ours}
        if not all(counts.values()):
            got = ", ".join(f"{len(found)} {name}" for name, found in counts.items())
            raise self._refused(got, "at least one of each", "Leave an option out for its default.")
        given = {"tokens": min(self.tokens), "seconds per point": self.seconds, "budget": self.budget}
        for name, value in given.items():
            if value is not None and not value > 0:
                raise self._refused(f"{name} {value}", "more than 0", "Try 1.")
        for dtype in self.dtypes:
            if dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise self._refused(f"dtype {dtype}", "float32, bfloat16 or float16", "Pick one of the three.")
        if not _is_here(self.device):
            raise self._refused(f"device {self.device!r}", "a torch device of this machine", "Try cpu.")

    def _refused(self, got: str, needs: str, fix: str) -> InvalidInputError:
        return invalid_input(self.operation, got=got, needs=needs, fix=fix)

    def by_bits(self, dtype: torch.dtype) -> dict[int, Plan]:
        """The plan cut into parts whose weights have equally many bits, in the order of moestro's variants."""

        def of(bits: int, variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
            return tuple(variant for variant in variants if variant.numbers.bits_in(dtype) == bits)

        found = dict.fromkeys(variant.numbers.bits_in(dtype) for variant in self.ours)
        return {
            bits: replace(self, ours=of(bits, self.ours), peers=of(bits, self.peers), reads=of(bits, self.reads))
            for bits in found
        }

    def settings(self) -> dict[str, Any]:
        """What was asked, by name, in plain values."""
        return {
            "layers": [spec.name for spec in self.layers],
            "tokens": list(self.tokens),
            "dtypes": [dtype_name(dtype) for dtype in self.dtypes],
            "variants": [variant.name for variant in self.ours],
            "reads": [variant.name for variant in self.reads],
            "peers": [variant.name for variant in self.peers],
            "seconds_per_point": self.seconds,
            "device": self.device,
            "budget": self.budget,
        }

    def points(self) -> list[PlanPoint]:
        """Every point, in the order in which they are measured."""
        return [
            PlanPoint(spec, dtype, num_tokens, part.ours, part.peers, part.reads)
            for spec in self.layers
            for dtype in self.dtypes
            for part in self.by_bits(dtype).values()
            for num_tokens in self.tokens
        ]


@dataclass(frozen=True)
class Row:
    """One variant at one point. Times, rates and ratio are None where nothing was measured.

    Attributes:
        dtype: of the tokens, and of the weights where they are no quantised ones.
        bits: of a weight, in whole numbers; rows of as many are compared.
        format: how the variant stores its weights.
        kind: "moestro", "peer", or "read" for a plain read of the weights that moestro reads.
        status, reason: "ok", or why there is no number.
        num_experts, published_num_experts: experts in memory here, and in the published model.
        active_experts: distinct experts that each routing touches; 0 where the point was not reached.
        microseconds: median of `samples` calls.
        gigabytes_per_second: weights of the active experts as the variant stores them, read once, over the time.
        gigaflops: 6 * H * I FLOP for every (token, expert) pair over the time, in 1e9 per second.
        roof_share: the least time at the machine's roof over the time.
        bandwidth_share: gigabytes_per_second over that of a plain read at the same point, of the variant's own bytes or
            else of those of moestro's first variant; over the roof's where there was none.
        bandwidth_of: which of these: the name of a plain read, or "roof".
        peak, peak_share: gigaflops over a peak of the machine's registers, and which ("vnni" where the variant
            multiplies int8 numbers, else "fma"; on a CUDA device "bf16-mm" for 16-bit x, "fp8-mm" where both are
            fp8); None where that was not measured.
        error: relative L2 error of a checked output against the layer's own weights, whatever the variant's are.
        ratio: how many times longer than moestro's first variant, median over rounds; None for that variant itself.
        ratio_low, ratio_high: lower and upper quartile over rounds.
        ratios: the same median against each of moestro's variants at the point, by name.
        round_trips: seconds of `machine.round_trip` before the point and after it, on a CPU with several threads.
    """

    layer: str
    dtype: str
    bits: int
    num_tokens: int
    variant: str
    format: str
    kind: Kind
    status: Status
    reason: str | None
    hidden_size: int
    intermediate_size: int
    num_experts: int
    published_num_experts: int
    top_k: int
    active_experts: int = 0
    flop_per_byte: float = 0.0
    samples: int = 0
    microseconds: float | None = None
    gigabytes_per_second: float | None = None
    gigaflops: float | None = None
    roof_share: float | None = None
    bandwidth_share: float | None = None
    bandwidth_of: str | None = None
    peak: str | None = None
    peak_share: float | None = None
    error: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    round_trips: tuple[float, ...] = ()

    @property
    def point(self) -> tuple[str, str, int, int]:
        """Layer, dtype, bits and number of tokens: rows that are alike in these are of one point."""
        return self.layer, self.dtype, self.bits, self.num_tokens

    @classmethod
    def skipped(cls, place: PlanPoint, variant: Variant, reason: str | None) -> Row:
        """Of a variant that was not run at a point."""
        spec, dtype = place.spec, place.dtype
        return cls(
            layer=spec.name,
            dtype=dtype_name(dtype),
            bits=variant.numbers.bits_in(dtype),
            num_tokens=place.num_tokens,
            variant=variant.name,
            format=variant.numbers.name_in(dtype),
            kind="moestro" if variant in place.ours else "read" if variant in place.reads else "peer",
            status="skipped",
            reason=reason,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_experts=spec.num_experts,
            published_num_experts=spec.num_experts,
            top_k=spec.top_k,
        )


@dataclass(frozen=True)
class PlanPoint:
    """Which point of a plan: layer, dtype and tokens, with the variants of moestro and of others that meet there.

    `reads` read the weights of moestro's and compute nothing.
    """

    spec: LayerSpec
    dtype: torch.dtype
    num_tokens: int
    ours: tuple[Variant, ...]
    peers: tuple[Variant, ...]
    reads: tuple[Variant, ...] = ()

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All of them, moestro's first."""
        return (*self.ours, *self.reads, *self.peers)

    def skipped(self, reason: str) -> list[Row]:
        """A row for each variant, of a point that was not measured."""
        return [Row.skipped(self, variant, reason) for variant in self.variants]


@dataclass
class Report:
    """Everything one run found.

    `notes` are keyed by "layer dtype" or "run", `roofs` by dtype; `peaks` are `machine.peaks()`, on a CUDA device
    `machine.matrix_rates()`. `settings` are those of the plan.
    """

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    roofs: dict[str, Roof]
    peaks: dict[str, float] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def wrong(self) -> list[Row]:
        """Rows whose output disagreed with the reference."""
        return [row for row in self.rows if row.status == "wrong output"]

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps, in the form of every benchmark."""
        notes = [text if of == "run" else f"{of}: {text}" for of, texts in self.notes.items() for text in texts]
        return document(self, self.settings, self.rows, roof_of(self.roofs, self.peaks), notes)


def _is_here(device: str) -> bool:
    try:
        found = torch.device(device)
    except RuntimeError:
        return False
    if found.type == "cpu":
        return True
    return torch.accelerator.is_available() and (found.index or 0) < torch.accelerator.device_count()
