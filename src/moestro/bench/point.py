"""One point of a benchmark: every variant's output checked, then all of them timed against each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from moestro import machine
from moestro.bench.failures import check_device, failures, sentence
from moestro.bench.layers import DENSE, RESERVE_BYTES, Layer, active_experts, dtype_name, expected_output, flops, inputs
from moestro.bench.peers.variant import Bind, Call, Variant
from moestro.bench.records import PlanPoint, Report, Row, Status
from moestro.bench.timing import (
    WARM_SECONDS,
    OwnClock,
    Timer,
    alternate,
    cold_bytes,
    event_clock,
    queued_clock,
    ratio,
    wall_clock,
    warm_up,
)
from moestro.machine import Roof
from moestro.tolerances import disagreement, relative_error, too_far
from moestro.types import Routing

CALL_LIMIT_SECONDS = 30.0
"""A variant whose single call would take longer at the machine's roof is skipped."""

SMALL_BATCH = 16


MOST_FROM_IDLE = 64
"""Tokens of calls on a CUDA device that are timed from when it is idle: for more the host runs ahead of the device."""


def timer(layer: Layer, num_tokens: int) -> Timer:
    """The clock of a layer's calls: the wall's, or on a CUDA device events, with a cold L2 where weights would fit."""
    if layer.device.type != "cuda":
        return wall_clock(layer.device)
    cache = machine.describe_gpu(layer.device)["l2_bytes"]
    clock = event_clock if num_tokens <= MOST_FROM_IDLE else queued_clock
    return clock(layer.device, cold_bytes(cache, layer.num_experts * layer.weights.bytes_per_expert))


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


class Point:
    """One layer, dtype, number of bits and of tokens: its inputs, and the truth about some of them."""

    def __init__(self, layer: Layer, place: PlanPoint, report: Report) -> None:
        self.layer, self.place = layer, place
        self.roof, self.peaks = report.roofs[dtype_name(layer.dtype)], report.peaks
        few = place.num_tokens <= SMALL_BATCH
        self.x, self.routings = inputs(layer, place.num_tokens, count=16 if few else 4)
        # Few tokens touch few experts, so two inputs are checked; many tokens touch most of them in one.
        self.checked = self.routings[:: max(len(self.routings) - 1, 1)] if few else self.routings[:1]
        self._expected: dict[str, list[Tensor]] = {}
        self.errors: dict[str, float] = {}
        self.flops = flops(layer.spec, self.routings[0])
        self.active = active_experts(self.routings[0].expert_ids)

    def expected(self, format: str) -> list[Tensor]:
        """The reference's outputs for the checked inputs, on weights in a format."""
        if format not in self._expected:
            self._expected[format] = [expected_output(self.layer, self.x, r, format) for r in self.checked]
        return self._expected[format]

    def judge(self, variant: Variant, bind: Bind | str) -> tuple[Status, str | None]:
        """Whether a variant fits, runs, and computes the layer; what its output is off by is kept in `errors`.

        A plain read, which computes nothing, is not called: it is "ok" where it fits.

        `bind` is the sentence why it cannot be called, if it cannot.
        """
        if isinstance(bind, str):
            return "skipped", bind
        reason = too_much(variant, self.layer, self.routings[0], self.roof)
        if reason is not None:
            return "skipped", reason
        if variant in self.place.reads:
            return "ok", None
        bound = variant.numbers.bound
        expected = zip(self.checked, self.expected(variant.numbers.reference), self.expected(DENSE), strict=True)
        try:
            for routing, own, dense in expected:
                output = bind(self.x, routing)()
                wrong = disagreement(output, own, self.layer.dtype) if bound is None else too_far(output, own, bound)
                if wrong is not None:
                    return "wrong output", wrong
                off = relative_error(output, dense)
                self.errors[variant.name] = max(off, self.errors.get(variant.name, 0.0))
        except failures() as error:
            check_device(self.layer.device, variant.name, sentence(error))
            return "skipped", sentence(error)
        return "ok", None

    def row(self, variant: Variant, status: Status, reason: str | None, times: dict[str, list[float]]) -> Row:
        """What is known of a variant, with what follows from its times, if it has some, and those of moestro's."""
        nbytes = self.active * variant.numbers.bytes_per_expert(self.layer)
        row = replace(
            Row.skipped(self.place, variant, reason),
            status=status,
            num_experts=self.layer.num_experts,
            active_experts=self.active,
            flop_per_byte=self.flops / nbytes,
            error=self.errors.get(variant.name) if status == "ok" else None,
        )
        if variant.name not in times:
            return row
        own = times[variant.name]
        seconds, peak = median(own), peak_of(variant, self.layer.dtype, self.peaks)
        ratios = {o.name: ratio(own, times[o.name]) for o in self.place.ours if o.name in times}
        first = ratios.get(self.place.ours[0].name) if variant is not self.place.ours[0] else None
        low, middle, high = (None, None, None) if first is None else first
        computes = variant not in self.place.reads
        of, bandwidth = self._bandwidth(variant, times)
        return replace(
            row,
            samples=len(own),
            microseconds=seconds * 1e6,
            gigabytes_per_second=nbytes / seconds / 1e9,
            gigaflops=self.flops / seconds / 1e9 if computes else None,
            roof_share=self.roof.seconds(self.flops, nbytes) / seconds if computes else None,
            bandwidth_share=nbytes / seconds / bandwidth,
            bandwidth_of=of,
            peak=peak if computes else None,
            peak_share=self.flops / seconds / self.peaks[peak] if computes and peak else None,
            ratio=middle,
            ratio_low=low,
            ratio_high=high,
            ratios={name: found.median for name, found in ratios.items()},
        )

    def _bandwidth(self, variant: Variant, times: dict[str, list[float]]) -> tuple[str, float]:
        """A plain read of the variant's own bytes, or else of moestro's first, or the roof: its name and rate."""
        timed = {read.numbers.reference: read for read in self.place.reads if read.name in times}
        read = timed.get(variant.numbers.reference if variant not in self.place.peers else "")
        read = read or timed.get(self.place.ours[0].numbers.reference)
        if read is None:
            return "roof", self.roof.bytes_per_second
        return read.name, self.active * read.numbers.bytes_per_expert(self.layer) / median(times[read.name])


def run_point(point: Point, prepared: dict[str, Bind | str], seconds: float) -> list[Row]:
    """A row for each variant: those that can be called are checked and timed, `seconds` each."""
    place = point.place
    verdicts = {v.name: point.judge(v, prepared[v.name]) for v in place.variants}
    right = {name: bind for name, bind in prepared.items() if verdicts[name][0] == "ok" and not isinstance(bind, str)}
    trips = [_round_trip(point.layer)]
    times, failed = _timed(point, right, seconds)
    trips.append(_round_trip(point.layer))
    for name, reason in failed.items():
        check_device(point.layer.device, name, reason)
        verdicts[name] = ("skipped", reason)
    rows = [point.row(variant, *verdicts[variant.name], times) for variant in place.variants]
    return [replace(row, round_trips=tuple(trip for trip in trips if trip is not None)) for row in rows]


def _round_trip(layer: Layer) -> float | None:
    return machine.round_trip() if layer.device.type == "cpu" else None


def _timed(point: Point, bound: dict[str, Bind], seconds: float) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Times of those that did not fail, and why the others did, the first of them first.

    On a CPU a short call follows others of the same variant that are not timed, as a step of decoding does.
    """
    clock = timer(point.layer, point.place.num_tokens)
    failed: dict[str, str] = {}
    beside = dict.fromkeys(bound, 0.0)
    least = dict.fromkeys(bound, 0.0 if point.layer.device.type == "cpu" else WARM_SECONDS)

    def timed(name: str, own: list[Call], i: int) -> float:
        """0 where a call of the name has failed: its times are worth nothing."""
        if name in failed:
            return 0.0
        start = time.perf_counter()
        try:
            if least[name] < WARM_SECONDS and not isinstance(own[i], OwnClock):
                warm_up(own, i)
            seconds = clock(own[i])
        except failures() as error:
            failed[name] = sentence(error)
            return 0.0
        least[name] = min(seconds, least[name] or seconds)
        if point.layer.device.type == "cpu":
            beside[name] += time.perf_counter() - start - seconds
        return seconds

    calls: dict[str, list[Callable[[], float]]] = {}
    for name, bind in bound.items():
        try:
            own = [bind(point.x, routing) for routing in point.routings]
            calls[name] = [partial(timed, name, own, i) for i in range(len(own))]
        except failures() as error:
            failed[name] = sentence(error)
            check_device(point.layer.device, name, failed[name])
    times = alternate(calls, seconds, lambda call: call(), beside)
    return {name: own for name, own in times.items() if name not in failed}, failed


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
