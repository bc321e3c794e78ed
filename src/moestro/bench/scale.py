"""How time and memory of a layer grow with E, K and T: one of them varied at a time, each point under the roof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

import torch

from moestro import machine
from moestro.bench.failures import check_device, failures, sentence
from moestro.bench.layers import Layer, LayerSpec, dtype_name, experts_that_fit, flops, make_layer
from moestro.bench.measure import Say, prepared, release, start
from moestro.bench.memory import peak_of
from moestro.bench.peaks import settle
from moestro.bench.peers.variant import Bind, Variant
from moestro.bench.point import Point, run_point
from moestro.bench.records import BUDGET_SPENT, Plan, PlanPoint, Report, Row
from moestro.bench.schema import document, roof_of
from moestro.bench.timing import Budget
from moestro.errors import UnsupportedError, invalid_input, unsupported

OPERATION = "bench scale"
Axis = Literal["num_experts", "top_k", "num_tokens"]
AXES: dict[Axis, str] = {"num_experts": "E", "top_k": "K", "num_tokens": "T"}
"""What is varied, and the letter for it."""
AT_TOKENS = 16


@dataclass(frozen=True)
class ScalePlan:
    """What to measure: each of E, K and T over its values, while the other two are the layer's own.

    Attributes:
        spec: the layer.
        experts, top_k, tokens: values of E, of K, of T; none for an axis that is left out.
        at_tokens: T while E or K is varied, since a layer has no T of its own.
        dtype: of x, and of weights that are not quantised.
        variants: of moestro.
        seconds: that each variant may spend on a point.
        device, budget: as of `Plan`.

    Raises:
        InvalidInputError: nothing to vary, a number below 1, more experts a token than there are, and what `Plan`
            refuses.
    """

    spec: LayerSpec
    experts: tuple[int, ...]
    top_k: tuple[int, ...]
    tokens: tuple[int, ...]
    variants: tuple[Variant, ...]
    at_tokens: int = AT_TOKENS
    dtype: torch.dtype = torch.bfloat16
    seconds: float = 1.0
    device: str = "cpu"
    budget: float | None = None

    def __post_init__(self) -> None:
        values = (*self.experts, *self.top_k, *self.tokens)
        if not values or min(*values, self.at_tokens) < 1:
            got = f"experts {list(self.experts)}, top_k {list(self.top_k)}, tokens {list(self.tokens)}"
            fix = "Leave an option out for its default."
            raise invalid_input(OPERATION, got=got, needs="numbers of at least 1", fix=fix)
        for spec, _ in (case for _, case in self.cases()):
            if spec.top_k > spec.num_experts:
                raise invalid_input(
                    OPERATION,
                    got=f"top_k {spec.top_k} of {spec.num_experts} experts",
                    needs="at most as many experts a token as there are",
                    fix=f"{self.spec.name} has {self.spec.num_experts} experts, top {self.spec.top_k}.",
                )
        self.plan()

    def plan(self) -> Plan:
        """The same as a plan of one layer."""
        tokens = self.tokens or (self.at_tokens,)
        return Plan(
            (self.spec,), tokens, (self.dtype,), self.variants, (), self.seconds, self.device, self.budget, OPERATION
        )

    def cases(self) -> list[tuple[Axis, tuple[LayerSpec, int]]]:
        """The axis, the layer and the number of tokens of each point, in the order of the report."""
        spec, at = self.spec, self.at_tokens
        return [
            *(("num_experts", (replace(spec, num_experts=count), at)) for count in self.experts),
            *(("top_k", (replace(spec, top_k=count), at)) for count in self.top_k),
            *(("num_tokens", (spec, count)) for count in self.tokens),
        ]

    @property
    def num_different(self) -> int:
        """Points that are measured: what several axes share is one."""
        return len({case for _, case in self.cases()})

    def settings(self) -> dict[str, Any]:
        """What was asked, by name, in plain values."""
        return {
            "layer": self.spec.name,
            "num_experts": list(self.experts),
            "top_k": list(self.top_k),
            "num_tokens": list(self.tokens),
            "at_tokens": self.at_tokens,
            "dtype": dtype_name(self.dtype),
            "variants": [variant.name for variant in self.variants],
            "seconds_per_point": self.seconds,
            "device": self.device,
            "budget": self.budget,
        }


@dataclass(frozen=True)
class ScalePoint:
    """One variant at one value of one axis.

    Attributes:
        axis: what is varied.
        row: what `moestro bench layer` says of the point, whose `num_experts` are those in memory.
        weight_bytes: of all experts, as the variant stores them.
        read_bytes: of the distinct experts that the routing touches, once.
        roof_microseconds: the least time at the measured roof for these bytes, and for 6 H I FLOP for each pair.
        workspace_bytes: the most that a call holds beside the weights, measured (`moestro.bench.memory.peak_of`).
    """

    axis: Axis
    row: Row
    weight_bytes: int | None = None
    read_bytes: int | None = None
    roof_microseconds: float | None = None
    workspace_bytes: int | None = None

    @property
    def value(self) -> int:
        """Of the axis."""
        found: int = getattr(self.row, self.axis)
        return found

    def as_record(self) -> dict[str, Any]:
        """For a document: the row's values and these, side by side."""
        own = {name: value for name, value in vars(self).items() if name != "row"}
        shown = {name: value for name, value in vars(self.row).items() if name not in _OF_RATIOS}
        return {"axis": self.axis, "value": self.value, **shown, **own}


_OF_RATIOS = ("kind", "ratio", "ratio_low", "ratio_high", "ratios", "peak", "peak_share")


@dataclass
class ScaleReport:
    """Everything one run found; `base` has what every report of layers has, and a row for each point."""

    plan: ScalePlan
    base: Report
    points: list[ScalePoint] = field(default_factory=list)

    @property
    def wrong(self) -> list[Row]:
        """Rows whose output disagreed with the reference."""
        return self.base.wrong

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps, in the form of every benchmark."""
        base, records = self.base, [point.as_record() for point in self.points]
        notes = [text for texts in base.notes.values() for text in texts]
        return document(base, self.plan.settings(), records, roof_of(base.roofs, base.peaks), notes)


@torch.inference_mode()
def scale(plan: ScalePlan, on_point: Say = lambda text: None) -> ScaleReport:
    """Measure the roof, then every point of the plan; `on_point` is called with a short description before each.

    What several axes share (the layer's own E and K at `at_tokens`) is measured once. Layers of which memory does not
    hold the experts are skipped, which their points say.

    Raises:
        UnsupportedError: memory holds no layer of the plan.
    """
    base, _ = start(plan.plan())
    report, cases = ScaleReport(plan, base), plan.cases()
    different = sorted({case for _, case in cases}, key=lambda case: (case[0].num_experts, case[1], case[0].top_k))
    budget, found = Budget(plan.budget, len(different)), dict[tuple[LayerSpec, int], list[ScalePoint]]()
    refusals: list[UnsupportedError] = []
    for num_experts, group in groupby(different, key=lambda case: case[0].num_experts):
        points = list(group)
        try:
            layer = _made(plan, num_experts, points)
        except UnsupportedError as error:
            refusals.append(error)
            found |= {case: _skipped(plan, case, sentence(error)) for case in points}
            budget.drop(len(points))
            continue
        for case in points:
            on_point(f"{plan.spec.name} E={num_experts} K={case[0].top_k} T={case[1]}")
            share = budget.share(len(plan.variants), plan.seconds)
            found[case] = _measured(report, layer, case, share)
    if refusals and all(point.row.status == "skipped" for points in found.values() for point in points):
        refusal = refusals[-1]
        raise refusal
    base.rows = [point.row for points in found.values() for point in points]
    if torch.device(plan.device).type == "cpu":
        settle(base)
    report.points = [replace(point, axis=axis) for axis, case in cases for point in found[case]]
    return report


def _made(plan: ScalePlan, num_experts: int, points: list[tuple[LayerSpec, int]]) -> Layer:
    """A layer of so many experts in memory, or an UnsupportedError where it does not hold all of them."""
    release(plan.device)
    spec, num_tokens = max(points, key=lambda case: case[0].top_k * case[1])
    count = experts_that_fit(spec, plan.dtype, machine.available_bytes(plan.device), num_tokens)
    if count < num_experts:
        raise unsupported(
            OPERATION,
            got=f"{num_experts} experts of {spec.name} in {dtype_name(plan.dtype)}",
            needs=f"memory for all of them; it holds {count}",
            fix="Name fewer with --experts, or free memory.",
        )
    return make_layer(replace(plan.spec, num_experts=num_experts), plan.dtype, num_experts, plan.device)


def _skipped(plan: ScalePlan, case: tuple[LayerSpec, int], reason: str) -> list[ScalePoint]:
    place = PlanPoint(case[0], plan.dtype, case[1], plan.variants, ())
    return [ScalePoint("num_tokens", row) for row in place.skipped(reason)]


def _measured(report: ScaleReport, layer: Layer, case: tuple[LayerSpec, int], share: float | None) -> list[ScalePoint]:
    """The points of a case, a variant each; those that break say what broke them."""
    plan, own = report.plan, replace(layer, spec=case[0])
    if share is None:
        return _skipped(plan, case, BUDGET_SPENT)
    try:
        bound = prepared(own, plan.variants)
        point = Point(own, PlanPoint(case[0], plan.dtype, case[1], plan.variants, ()), report.base)
        rows = run_point(point, bound, share)
        return [
            _with_memory(point, variant, bound[variant.name], row)
            for variant, row in zip(plan.variants, rows, strict=True)
        ]
    except failures() as error:
        check_device(layer.device, None, sentence(error))
        return _skipped(plan, case, sentence(error))


def _with_memory(point: Point, variant: Variant, bind: Bind | str, row: Row) -> ScalePoint:
    """A row with what it reads and holds; a variant that does not run has neither."""
    if row.status != "ok" or isinstance(bind, str):
        return ScalePoint("num_tokens", row)
    each, routing = variant.numbers.bytes_per_expert(point.layer), point.routings[0]
    read = point.active * each
    return ScalePoint(
        "num_tokens",
        row,
        weight_bytes=point.layer.num_experts * each,
        read_bytes=read,
        roof_microseconds=1e6 * point.roof.seconds(flops(point.layer.spec, routing), read),
        workspace_bytes=peak_of(bind(point.x, routing), point.layer.device),
    )


def by_axis(report: ScaleReport) -> Iterator[tuple[Axis, str, list[ScalePoint]]]:
    """The points of each axis and variant, the axes in their order."""
    for axis in AXES:
        for variant in report.plan.variants:
            points = [p for p in report.points if p.axis == axis and p.row.variant == variant.name]
            if points:
                yield axis, variant.name, points


def default_experts(spec: LayerSpec) -> tuple[int, ...]:
    """A quarter, half, all and twice the layer's experts, as far as a token has its own top_k of them."""
    counts = (spec.num_experts // 4, spec.num_experts // 2, spec.num_experts, 2 * spec.num_experts)
    return tuple(count for count in counts if count >= spec.top_k)


def default_top_k(spec: LayerSpec) -> tuple[int, ...]:
    """1, 2, 4, 8 and the layer's own, of those that the layer has."""
    return tuple(count for count in sorted({1, 2, 4, 8, spec.top_k}) if count <= spec.num_experts)
