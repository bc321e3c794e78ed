"""The benchmark of layers: point after point of a plan, within its budget; what fails is a row that says why."""

from __future__ import annotations

import contextlib
import datetime
import gc
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import torch

from moestro import machine
from moestro.bench.failures import DeviceLostError, check_device, failures, sentence
from moestro.bench.layers import Layer, LayerSpec, experts_that_fit, make_layer
from moestro.bench.peaks import settle
from moestro.bench.peers import outside
from moestro.bench.peers.variant import Bind, Variant
from moestro.bench.point import Limits, Point, no_room, run_point
from moestro.bench.records import BUDGET_SPENT, Plan, PlanPoint, Report, Row, dtype_name
from moestro.bench.timing import Budget
from moestro.errors import UnsupportedError

Say = Callable[[str], None]


def run(plan: Plan, on_point: Say = lambda text: None) -> Report:
    """Measure the roof, then every point of the plan.

    Args:
        plan: what to measure.
        on_point: called with a short description before each point.

    Raises:
        UnsupportedError: memory does not hold the top_k experts of any layer; where it holds some layers', the
            others are named in the notes.
    """
    report, plan = start(plan)
    refusal: UnsupportedError | None = None
    try:
        refusals = extend(report, plan, Budget(plan.budget, num_points(plan)), on_point)
        refusal = refusals[-1] if refusals else None
    except DeviceLostError as lost:
        by = f" by {lost.variant}" if lost.variant else ""
        report.rows += _unreached(report, plan, f"the device was lost{by}: {lost.reason}")
    if refusal is not None and not report.rows:
        raise refusal
    if torch.device(plan.device).type == "cpu":
        settle(report)
    return report


def _unreached(report: Report, plan: Plan, reason: str) -> list[Row]:
    """Rows for every point of the plan that has none."""
    reached = {(row.layer, row.dtype, row.bits, row.num_tokens) for row in report.rows}
    rows = [
        row
        for spec in plan.layers
        for dtype in plan.dtypes
        for group in groups(plan, dtype)
        for place in _plan_points(group, spec, dtype)
        for row in place.skipped(reason)
    ]
    return [row for row in rows if (row.layer, row.dtype, row.bits, row.num_tokens) not in reached]


def start(plan: Plan) -> tuple[Report, Plan]:
    """A report without rows, with the roof as measured now; and the plan without the peers that are not here."""
    on_cpu = torch.device(plan.device).type == "cpu"
    report = Report(
        **about(plan.device),
        roofs={dtype_name(dtype): machine.measure(dtype, plan.device) for dtype in plan.dtypes},
        peaks=machine.peaks() if on_cpu else machine.matrix_rates(plan.device),
    )
    if torch.device(plan.device).type == "cuda":
        report.machine |= {"gpu": machine.describe_gpu(plan.device), "bandwidths": machine.bandwidths(plan.device)}
    plan, notes = only_those_here(plan)
    if notes:
        report.notes["run"] = notes
    if on_cpu:
        settle(report)
    return report, plan


def extend(report: Report, plan: Plan, budget: Budget, on_point: Say) -> list[UnsupportedError]:
    """Add a row for every variant at every point of the plan, in its order.

    Returns:
        what was said of the layers that memory does not hold, and that have no rows; the notes say it too.

    Raises:
        DeviceLostError: a variant broke the device. The point has no rows then, those before it have.
    """
    refusals = []
    with torch.inference_mode():
        for spec in plan.layers:
            for dtype in plan.dtypes:
                parts = groups(plan, dtype)
                try:
                    _run_layer(_Stage(report, plan.device, budget, on_point), spec, dtype, parts)
                except UnsupportedError as error:
                    budget.drop(len(parts) * len(plan.tokens))
                    refusals.append(error)
                    notes = report.notes.setdefault("run", [])
                    notes += [] if str(error) in notes else [str(error)]
    return refusals


@dataclass(frozen=True)
class _Stage:
    """What the points of a run have in common."""

    report: Report
    device: str
    budget: Budget
    on_point: Say


def _run_layer(stage: _Stage, spec: LayerSpec, dtype: torch.dtype, parts: list[Plan]) -> None:
    """Add rows of one layer in memory; where it cannot be made, or the budget is spent before, rows that say so.

    Raises:
        DeviceLostError: as for `extend`.
        UnsupportedError: memory does not hold top_k experts of it.
    """
    reason = BUDGET_SPENT
    if not stage.budget.is_spent:
        try:
            release(stage.device)
            free = machine.available_bytes(stage.device)
            num_experts = experts_that_fit(spec, dtype, free, max(parts[0].tokens))
            layer = make_layer(spec, dtype, num_experts, stage.device)
        except UnsupportedError:
            raise
        except failures() as error:
            reason = sentence(error)
        else:
            if layer.notes:
                stage.report.notes[f"{spec.name} {dtype_name(dtype)}"] = layer.notes
            for group in parts:
                _run_group(stage, replace(layer, quantized={}), group)
            return
    stage.budget.drop(len(parts) * len(parts[0].tokens))
    places = [place for group in parts for place in _plan_points(group, spec, dtype)]
    stage.report.rows += [row for place in places for row in place.skipped(reason)]


def _plan_points(group: Plan, spec: LayerSpec, dtype: torch.dtype) -> list[PlanPoint]:
    return [PlanPoint(spec, dtype, num_tokens, group.ours, group.peers) for num_tokens in group.tokens]


def _run_group(stage: _Stage, layer: Layer, group: Plan) -> None:
    """Add rows of the variants whose weights have equally many bits; a point that breaks says what broke it."""
    release(stage.device)
    limits = Limits(stage.report.roofs[dtype_name(layer.dtype)], stage.report.peaks)
    bound, refused = _prepared(layer, (*group.ours, *group.peers))
    formats = ", ".join(dict.fromkeys(v.numbers.name_in(layer.dtype) for v in group.ours))
    for place in _plan_points(group, layer.spec, layer.dtype):
        what = [layer.spec.name, dtype_name(layer.dtype), formats, f"T={place.num_tokens}"]
        stage.on_point(" ".join(dict.fromkeys(what)))
        share = stage.budget.share(len(place.variants), group.seconds)
        if share is None:
            stage.report.rows += place.skipped(BUDGET_SPENT)
            continue
        try:
            stage.report.rows += run_point(Point(layer, place, limits), bound, refused, share)
        except failures() as error:
            check_device(layer.device, None, sentence(error))
            stage.report.rows += place.skipped(sentence(error))


def _prepared(layer: Layer, variants: tuple[Variant, ...]) -> tuple[dict[str, Bind], dict[str, str]]:
    """Variants by name that can be called, and why the others cannot."""
    bound: dict[str, Bind] = {}
    refused: dict[str, str] = {}
    for variant in variants:
        try:
            reason = variant.refuses(layer.spec, layer.dtype) or no_room(variant, layer)
            if reason is None:
                bound[variant.name] = variant.prepare(layer)
        except failures() as error:
            reason = sentence(error)
            check_device(layer.device, variant.name, reason)
        if reason is not None:
            refused[variant.name] = reason
    return bound, refused


def release(device: str) -> None:
    """Give back what nobody holds any more: what the last layer or group used must not count against the next."""
    gc.collect()
    if torch.device(device).type == "cuda":
        with contextlib.suppress(*failures()):  # a device that broke says so to the next one who asks
            torch.cuda.empty_cache()


def only_those_here(plan: Plan) -> tuple[Plan, list[str]]:
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


def groups(plan: Plan, dtype: torch.dtype) -> list[Plan]:
    """The plan cut into parts whose weights have equally many bits, in the order of moestro's variants."""

    def of(bits: int, variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
        return tuple(variant for variant in variants if variant.numbers.bits_in(dtype) == bits)

    return [replace(plan, ours=of(bits, plan.ours), peers=of(bits, plan.peers)) for bits in bits_of(plan, dtype)]


def bits_of(plan: Plan, dtype: torch.dtype) -> list[int]:
    """Bits of a weight that moestro's variants have, in their order."""
    return list(dict.fromkeys(variant.numbers.bits_in(dtype) for variant in plan.ours))


def num_points(plan: Plan) -> int:
    """How often `run` calls back where memory holds every layer."""
    return len(plan.layers) * len(plan.tokens) * sum(len(bits_of(plan, dtype)) for dtype in plan.dtypes)


def about(device: str) -> dict[str, Any]:
    """What every report says of its run: `command`, `date`, `machine` and `versions`."""
    return {
        "command": " ".join(["moestro", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {**machine.describe(), "device": device},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, moestro, torch, transformers, and the peers from outside.

    moestro may run from its source tree.
    """
    found = {"python": platform.python_version()}
    for name in ("moestro", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "source tree" if name == "moestro" else "not installed"
    return found | outside.versions()
