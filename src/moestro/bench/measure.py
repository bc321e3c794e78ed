"""The benchmark of one layer: check every variant's output, then time them against each other."""

from __future__ import annotations

import datetime
import gc
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from moestro import machine
from moestro.bench.guarded import failures, guarded, sentence
from moestro.bench.layers import (
    RESERVE_BYTES,
    Layer,
    LayerSpec,
    active_experts,
    expected_output,
    experts_that_fit,
    flops,
    inputs,
    make_layer,
)
from moestro.bench.peers import place
from moestro.bench.peers.variant import DENSE, Bind, Variant
from moestro.bench.timing import Budget, Timer, alternate, cold_bytes, event_clock, ratio, wall_clock
from moestro.errors import UnsupportedError, invalid_input
from moestro.machine import Roof
from moestro.tolerances import disagreement, relative_error, too_far
from moestro.types import Routing

CALL_LIMIT_SECONDS = 30.0
"""A variant whose single call would take longer at the machine's roof is skipped."""

FEW_TOKENS = 16

BUDGET_SPENT = "the run's time budget was spent before this point"

Status = Literal["ok", "skipped", "wrong output"]


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

    def __post_init__(self) -> None:
        if not (self.layers and self.tokens and self.dtypes and self.ours):
            raise invalid_input(
                "bench layer",
                got=f"{len(self.layers)} layers, {len(self.tokens)} token counts, {len(self.dtypes)} dtypes, "
                f"{len(self.ours)} variants",
                needs="at least one of each",
                fix="Leave an option out for its default.",
            )
        given = {"tokens": min(self.tokens), "seconds per point": self.seconds, "budget": self.budget}
        for name, value in given.items():
            if value is not None and not value > 0:
                raise invalid_input("bench layer", got=f"{name} {value}", needs="more than 0", fix="Try 1.")
        for dtype in self.dtypes:
            if dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise invalid_input(
                    "bench layer", got=f"{dtype}", needs="float32, bfloat16 or float16", fix="Pick one of the three."
                )
        if not _is_here(self.device):
            raise invalid_input(
                "bench layer", got=f"device {self.device!r}", needs="a torch device of this machine", fix="Try cpu."
            )


@dataclass(frozen=True)
class Row:
    """One variant at one point. Times, rates and ratio are None where nothing was measured.

    Attributes:
        dtype: of the tokens, and of the weights where they are no quantised ones.
        bits: of a weight, in whole numbers; rows of as many are compared.
        format: how the variant stores its weights.
        kind: "moestro" or "peer".
        status, reason: "ok", or why there is no number.
        num_experts, published_num_experts: experts in memory here, and in the published model.
        active_experts: distinct experts that each routing touches.
        microseconds: median of `samples` calls.
        gigabytes_per_second: weights of the active experts as the variant stores them, read once, over the time.
        gigaflops: 6 * H * I FLOP for every (token, expert) pair over the time, in 1e9 per second.
        roof_share: the least time at the machine's roof over the time.
        bandwidth_share: gigabytes_per_second over the roof's.
        peak, peak_share: gigaflops over a peak of the machine's registers, and which ("vnni" where the variant
            multiplies int8 numbers, else "fma"; on a CUDA device "bf16-mm" for 16-bit x, "fp8-mm" where both are
            fp8); None where that was not measured.
        error: relative L2 error of a checked output against the layer's own weights, whatever the variant's are.
        ratio: how many times longer than moestro's first variant, median over rounds; None for that variant itself.
        ratio_low, ratio_high: lower and upper quartile over rounds.
        ratios: the same median against each of moestro's variants at the point, by name.
    """

    layer: str
    dtype: str
    bits: int
    num_tokens: int
    variant: str
    format: str
    kind: Literal["moestro", "peer"]
    status: Status
    reason: str | None
    hidden_size: int
    intermediate_size: int
    num_experts: int
    published_num_experts: int
    top_k: int
    active_experts: int
    flop_per_byte: float
    samples: int = 0
    microseconds: float | None = None
    gigabytes_per_second: float | None = None
    gigaflops: float | None = None
    roof_share: float | None = None
    bandwidth_share: float | None = None
    peak: str | None = None
    peak_share: float | None = None
    error: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)


@dataclass
class Report:
    """Everything one run found.

    `notes` are keyed by "layer dtype" or "run", `roofs` by dtype; `peaks` are `machine.peaks()`, on a CUDA device
    `machine.matrix_rates()`.
    """

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    roofs: dict[str, Roof]
    peaks: dict[str, float] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def wrong(self) -> list[Row]:
        """Rows whose output disagreed with the reference."""
        return [row for row in self.rows if row.status == "wrong output"]

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps: the attributes by name, each roof with its balance."""
        roofs = {dtype: {**asdict(roof), "balance": roof.balance} for dtype, roof in self.roofs.items()}
        return {**asdict(self), "roofs": roofs}


def run(plan: Plan, on_point: Callable[[str], None] = lambda text: None) -> Report:
    """Measure the roof, then every point of the plan.

    Args:
        plan: what to measure.
        on_point: called with a short description before each point.

    Raises:
        UnsupportedError: memory does not hold the top_k experts of any layer; where it holds some layers', the
            others are named in the notes.
    """
    roofs = {dtype: machine.measure(dtype, plan.device) for dtype in plan.dtypes}
    on_cpu = torch.device(plan.device).type == "cpu"
    report = Report(
        command=" ".join(["moestro", *sys.argv[1:]]),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine={**machine.describe(), "device": plan.device, **_gpu(plan.device)},
        versions=versions(),
        roofs={dtype_name(dtype): roof for dtype, roof in roofs.items()},
        peaks=machine.peaks() if on_cpu else machine.matrix_rates(plan.device),
    )
    plan, notes = _only_those_here(plan)
    budget = Budget(plan.budget, num_points(plan))
    refusal: UnsupportedError | None = None
    with torch.inference_mode():
        for spec in plan.layers:
            for dtype in plan.dtypes:
                release(plan.device)
                free = machine.available_bytes(plan.device)
                try:
                    num_experts = experts_that_fit(spec, dtype, free, max(plan.tokens))
                except UnsupportedError as error:
                    refusal = error
                    notes.append(str(error))
                    continue
                layer = make_layer(spec, dtype, num_experts, plan.device)
                if layer.notes:
                    report.notes[f"{spec.name} {dtype_name(dtype)}"] = layer.notes
                for group in _groups(plan, dtype):
                    release(plan.device)
                    limits = _Limits(roofs[dtype], report.peaks, budget)
                    report.rows += _run_group(replace(layer, quantized={}), group, limits, on_point)
                del layer
    if refusal is not None and not report.rows:
        raise refusal
    if notes:
        report.notes["run"] = notes
    return report


def release(device: str) -> None:
    """Give back what nobody holds any more: what the last layer or group used must not count against the next."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def _gpu(device: str) -> dict[str, Any]:
    """What a report says of a CUDA device."""
    if torch.device(device).type != "cuda":
        return {}
    return {"gpu": machine.describe_gpu(device), "bandwidths": machine.bandwidths(device)}


@dataclass(frozen=True)
class _Limits:
    """What times are held against, and what is left of them for the run."""

    roof: Roof
    peaks: dict[str, float]
    budget: Budget


def timer(layer: Layer) -> Timer:
    """The clock of a layer's calls: the wall's, or on a CUDA device events, with a cold L2 where weights would fit."""
    if layer.device.type != "cuda":
        return wall_clock(layer.device)
    cache = machine.describe_gpu(layer.device)["l2_bytes"]
    return event_clock(layer.device, cold_bytes(cache, layer.num_experts * layer.weights.bytes_per_expert))


def _is_here(device: str) -> bool:
    try:
        found = torch.device(device)
    except RuntimeError:
        return False
    if found.type == "cpu":
        return True
    return torch.accelerator.is_available() and (found.index or 0) < torch.accelerator.device_count()


def _only_those_here(plan: Plan) -> tuple[Plan, list[str]]:
    """The plan without peers that cannot run on this machine or device, and the sentences why, each once."""
    reasons: dict[str, list[str]] = {}
    here = []
    for peer in plan.peers:
        reason = peer.absent()
        if peer.device not in (None, torch.device(plan.device).type):
            reason = f"it needs a {peer.device} device, this run is on {plan.device}"
        if reason is None:
            here.append(peer)
        else:
            reasons.setdefault(reason, []).append(peer.name)
    return replace(plan, peers=tuple(here)), [f"{', '.join(names)} skipped: {why}" for why, names in reasons.items()]


def _groups(plan: Plan, dtype: torch.dtype) -> list[Plan]:
    """The plan cut into parts whose weights have equally many bits, in the order of moestro's variants."""
    counts = dict.fromkeys(variant.numbers.bits_in(dtype) for variant in plan.ours)

    def of(bits: int, variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
        return tuple(variant for variant in variants if variant.numbers.bits_in(dtype) == bits)

    return [replace(plan, ours=of(bits, plan.ours), peers=of(bits, plan.peers)) for bits in counts]


def num_points(plan: Plan) -> int:
    """How often `run` calls back where memory holds every layer."""
    groups = sum(len(_groups(plan, dtype)) for dtype in plan.dtypes)
    return len(plan.layers) * len(plan.tokens) * groups


def _run_group(layer: Layer, plan: Plan, limits: _Limits, on_point: Callable[[str], None]) -> Iterator[Row]:
    refused: dict[str, str] = {}
    bound: dict[str, Bind] = {}
    for variant in (*plan.ours, *plan.peers):
        reason = variant.refuses(layer.spec, layer.dtype) or no_room(variant, layer)
        if reason is None:
            try:
                bound[variant.name] = variant.prepare(layer)
            except failures() as error:
                reason = sentence(error)
        if reason is not None:
            refused[variant.name] = reason
    formats = ", ".join(dict.fromkeys(v.numbers.name_in(layer.dtype) for v in plan.ours))
    for num_tokens in plan.tokens:
        on_point(" ".join(dict.fromkeys([layer.spec.name, dtype_name(layer.dtype), formats, f"T={num_tokens}"])))
        yield from _run_point(_Point(layer, plan, limits, num_tokens), bound, refused)


def no_room(variant: Variant, layer: Layer) -> str | None:
    """None, or the sentence why memory does not hold what a variant makes of the weights."""
    if variant.numbers.bits_per_weight is None:
        return None
    weights = 3 * layer.spec.hidden_size * layer.spec.intermediate_size * layer.num_experts
    copy = variant.numbers.bytes_per_expert(layer) * layer.num_experts
    needed = round(copy + weights * variant.numbers.bits_to_prepare / 8) + RESERVE_BYTES
    free = machine.available_bytes(layer.device)
    if needed <= free:
        return None
    return f"needs {needed / 1e9:.1f} GB for a copy of the weights and what else there is; {free / 1e9:.1f} GB are free"


class _Point:
    """One layer, dtype, number of bits and of tokens: its inputs, and the truth about some of them."""

    def __init__(self, layer: Layer, plan: Plan, limits: _Limits, num_tokens: int) -> None:
        self.layer, self.plan, self.num_tokens = layer, plan, num_tokens
        self.roof, self.peaks, self.budget = limits.roof, limits.peaks, limits.budget
        few = num_tokens <= FEW_TOKENS
        self.x, self.routings = inputs(layer, num_tokens, count=16 if few else 4)
        # Few tokens touch few experts, so two inputs are checked; many tokens touch most of them in one.
        self.checked = self.routings[:: max(len(self.routings) - 1, 1)] if few else self.routings[:1]
        self._expected: dict[str, list[Tensor]] = {}
        self.errors: dict[str, float] = {}
        self.flops = flops(layer.spec, self.routings[0])
        self.active = active_experts(self.routings[0].expert_ids)

    def expected(self, format: str) -> list[Tensor]:
        """The reference's outputs for the checked inputs, on weights in a format."""
        if format not in self._expected:
            own = None if format == DENSE else format
            self._expected[format] = [expected_output(self.layer, self.x, r, own) for r in self.checked]
        return self._expected[format]

    def judge(self, variant: Variant, bind: Bind) -> tuple[Status, str | None]:
        """Whether a variant fits, runs, and computes the layer; what its output is off by is kept in `errors`."""
        reason = too_much(variant, self.layer, self.routings[0], self.roof)
        if reason is not None:
            return "skipped", reason
        numbers = variant.numbers
        own = self.expected(numbers.reference)
        for routing, expected, plain in zip(self.checked, own, self.expected(DENSE), strict=True):
            try:
                output: Tensor = bind(self.x, routing)()
            except failures() as error:
                return "skipped", sentence(error)
            if numbers.bound is None:
                wrong = disagreement(output, expected, self.layer.dtype)
            else:
                wrong = too_far(output, expected, numbers.bound)
            if wrong is not None:
                return "wrong output", wrong
            off = relative_error(output, plain)
            self.errors[variant.name] = max(off, self.errors.get(variant.name, 0.0))
        return "ok", None

    def row(self, variant: Variant, status: Status, reason: str | None) -> Row:
        """What is known of a variant before its times are."""
        layer, spec = self.layer, self.layer.spec
        return Row(
            layer=spec.name,
            dtype=dtype_name(layer.dtype),
            bits=variant.numbers.bits_in(layer.dtype),
            num_tokens=self.num_tokens,
            variant=variant.name,
            format=variant.numbers.name_in(layer.dtype),
            kind="moestro" if variant in self.plan.ours else "peer",
            status=status,
            reason=reason,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_experts=layer.num_experts,
            published_num_experts=spec.num_experts,
            top_k=spec.top_k,
            active_experts=self.active,
            flop_per_byte=self.flops / self.nbytes(variant),
            error=self.errors.get(variant.name) if status == "ok" else None,
        )

    def nbytes(self, variant: Variant) -> int:
        """Bytes of the active experts as the variant stores them."""
        return self.active * variant.numbers.bytes_per_expert(self.layer)

    def timed(self, row: Row, variant: Variant, samples: list[float]) -> Row:
        """The row with what follows from the times."""
        seconds, nbytes = median(samples), self.nbytes(variant)
        peak = peak_of(variant, self.layer.dtype, self.peaks)
        return replace(
            row,
            samples=len(samples),
            microseconds=seconds * 1e6,
            gigabytes_per_second=nbytes / seconds / 1e9,
            gigaflops=self.flops / seconds / 1e9,
            roof_share=self.roof.seconds(self.flops, nbytes) / seconds,
            bandwidth_share=nbytes / seconds / self.roof.bytes_per_second,
            peak=peak,
            peak_share=None if peak is None else self.flops / seconds / self.peaks[peak],
        )


def _run_point(point: _Point, bound: dict[str, Bind], refused: dict[str, str]) -> Iterator[Row]:
    plan = point.plan
    variants = (*plan.ours, *plan.peers)
    share = point.budget.share(len(variants), plan.seconds)
    if share is None:
        yield from (point.row(variant, "skipped", BUDGET_SPENT) for variant in variants)
        return
    verdicts: dict[str, tuple[Status, str | None]] = {
        v.name: ("skipped", refused[v.name]) if v.name in refused else point.judge(v, bound[v.name]) for v in variants
    }
    failed: dict[str, str] = {}
    calls = {
        name: [guarded(bound[name](point.x, routing), name, failed) for routing in point.routings]
        for name, (status, _) in verdicts.items()
        if status == "ok"
    }
    times = alternate(calls, share, timer(point.layer))
    for name, reason in failed.items():
        verdicts[name] = ("skipped", reason)
        del times[name]
    baseline = plan.ours[0].name
    for variant in variants:
        row = point.row(variant, *verdicts[variant.name])
        own = times.get(variant.name)
        if own is not None:
            row = point.timed(row, variant, own)
            row.ratios.update((o.name, ratio(own, times[o.name]).median) for o in plan.ours if o.name in times)
            if baseline in times and variant.name != baseline:
                against = ratio(own, times[baseline])
                row = replace(row, ratio=against.median, ratio_low=against.low, ratio_high=against.high)
        yield row


def peak_of(variant: Variant, dtype: torch.dtype, peaks: dict[str, float]) -> str | None:
    """Which peak a variant's rate is a share of, or None where it was not measured."""
    floats = "bf16-mm" if "bf16-mm" in peaks and dtype.itemsize == 2 else "fma"
    name = {"int8": "vnni", "fp8-e4m3": "fp8-mm"}.get(variant.numbers.products, floats)
    return name if name in peaks else None


def too_much(variant: Variant, layer: Layer, routing: Routing, roof: Roof) -> str | None:
    """None, or the sentence why one call of a variant takes too much memory or time."""
    cost = variant.cost(layer, routing)
    free = machine.available_bytes(layer.device)
    if cost.workspace > free // 2:
        return f"needs {cost.workspace / 1e9:.1f} GB beside the weights; half of the free memory is {free / 2e9:.1f} GB"
    seconds = roof.seconds(cost.flops, cost.nbytes)
    if seconds > CALL_LIMIT_SECONDS:
        return f"one call takes {seconds:.0f} s even at this machine's roof; the limit is {CALL_LIMIT_SECONDS:.0f} s"
    return None


def versions() -> dict[str, str]:
    """Versions of Python, moestro, torch, transformers, and the peers in their folder.

    moestro may run from its source tree.
    """
    found = {"python": platform.python_version()}
    for name in ("moestro", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "source tree" if name == "moestro" else "not installed"
    return found | place.versions()


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
