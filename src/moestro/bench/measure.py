"""The benchmark of layers: point after point of a plan, within its budget; what fails is a row that says why."""

from __future__ import annotations

import contextlib
import datetime
import gc
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from itertools import groupby
from typing import Any

import torch

import moestro
from moestro import machine
from moestro.bench.failures import DeviceLostError, check_device, failures, sentence
from moestro.bench.layers import Layer, dtype_name, experts_that_fit, make_layer
from moestro.bench.peaks import settle
from moestro.bench.peers import outside
from moestro.bench.peers.variant import Bind, Variant
from moestro.bench.point import Point, no_room, run_point
from moestro.bench.records import BUDGET_SPENT, Plan, PlanPoint, Report
from moestro.bench.timing import Budget
from moestro.errors import UnsupportedError

Say = Callable[[str], None]


def run(
    plan: Plan, on_point: Say = lambda text: None, so_far: Callable[[Report], None] = lambda report: None
) -> Report:
    """Measure the roof, then every point of the plan.

    Before each point `on_point` is called with a short description of it, and `so_far` with the report of those that
    are measured. Layers of which memory does not hold the top_k experts are named in the notes; an UnsupportedError if
    all are such.
    """
    report, plan = start(plan)

    def before_point(text: str) -> None:
        so_far(report)
        on_point(text)

    try:
        refusals = extend(report, plan, Budget(plan.budget, len(plan.points())), before_point)
        if refusals and not report.rows:
            refusal = refusals[-1]
            raise refusal
    except DeviceLostError as lost:
        by = f" by {lost.variant}" if lost.variant else ""
        reached = {row.point for row in report.rows}
        missed = [place.skipped(f"the device was lost{by}: {lost.reason}") for place in plan.points()]
        report.rows += [row for rows in missed for row in rows if row.point not in reached]
    if torch.device(plan.device).type == "cpu":
        settle(report)
    return report


def start(plan: Plan) -> tuple[Report, Plan]:
    """A report without rows, with the roof as measured now; and the plan without the peers that are not here."""
    kind = torch.device(plan.device).type
    report = Report(
        **about(plan.device),
        roofs={dtype_name(dtype): machine.measure(dtype, plan.device) for dtype in plan.dtypes},
        peaks=machine.peaks() if kind == "cpu" else machine.matrix_rates(plan.device),
        settings=plan.settings(),
    )
    if kind == "cuda":
        report.machine |= {"gpu": machine.describe_gpu(plan.device), "bandwidths": machine.bandwidths(plan.device)}
    plan, notes = only_those_here(plan)
    if notes:
        report.notes["run"] = notes
    return report, plan


@torch.inference_mode()
def extend(report: Report, plan: Plan, budget: Budget, on_point: Say) -> list[UnsupportedError]:
    """Add a row for every variant at every point of the plan, in its order.

    Returns what was said of the layers that memory does not hold, and that have no rows; the notes say it too. Where a
    variant breaks the device, a DeviceLostError, the point has no rows, those before it have.
    """
    refusals = []
    for _, found in groupby(plan.points(), key=lambda place: (place.spec, place.dtype)):
        points, layer, reason = list(found), None, BUDGET_SPENT
        try:
            if not budget.is_spent:
                layer = _made(points, plan.device)
        except UnsupportedError as error:
            reason = ""
            refusals.append(error)
            notes = report.notes.setdefault("run", [])
            notes += [] if str(error) in notes else [str(error)]
        except failures() as error:
            reason = sentence(error)
        if layer is None:
            budget.drop(len(points))
            report.rows += [row for place in points if reason for row in place.skipped(reason)]
            continue
        if layer.notes:
            report.notes[f"{layer.spec.name} {dtype_name(layer.dtype)}"] = layer.notes
        for _, group in groupby(points, key=lambda place: place.ours):
            _run_group(report, plan, replace(layer, quantized={}), list(group), budget, on_point)
    return refusals


def _made(points: list[PlanPoint], device: str) -> Layer:
    """The layer of these points in memory, with as many experts as fit; see `experts_that_fit`."""
    spec, dtype = points[0].spec, points[0].dtype
    release(device)
    most_tokens, copies = max(place.num_tokens for place in points), max(map(_bits_of_copies, points))
    num_experts = experts_that_fit(spec, dtype, machine.available_bytes(device), most_tokens, copies)
    return make_layer(spec, dtype, num_experts, device)


def _bits_of_copies(place: PlanPoint) -> float:
    """Of a weight: what the variants of a point make of it, which they hold at once, and while they make it."""
    kept, most = 0.0, 0.0
    for variant in place.variants:
        numbers = variant.numbers
        with contextlib.suppress(*failures()):  # who breaks makes nothing
            if numbers.bits_per_weight is not None and variant.refuses(place.spec, place.dtype) is None:
                kept, most = kept + numbers.bits_per_weight, max(most, numbers.bits_to_prepare)
    return kept + most


def _run_group(
    report: Report, plan: Plan, layer: Layer, points: list[PlanPoint], budget: Budget, on_point: Say
) -> None:
    """Add rows of the variants whose weights have equally many bits; a point that breaks says what broke it."""
    release(layer.device)
    bound = prepared(layer, points[0].variants)
    formats = ", ".join(dict.fromkeys(v.numbers.name_in(layer.dtype) for v in points[0].ours))
    for place in points:
        what = [layer.spec.name, dtype_name(layer.dtype), formats, f"T={place.num_tokens}"]
        on_point(" ".join(dict.fromkeys(what)))
        share = budget.share(len(place.variants), plan.seconds)
        if share is None:
            report.rows += place.skipped(BUDGET_SPENT)
            continue
        try:
            report.rows += run_point(Point(layer, place, report), bound, share)
        except failures() as error:
            check_device(layer.device, None, sentence(error))
            report.rows += place.skipped(sentence(error))


def prepared(layer: Layer, variants: tuple[Variant, ...]) -> dict[str, Bind | str]:
    """What calls each variant, by its name, or the sentence why nothing can."""
    found: dict[str, Bind | str] = {}
    for variant in variants:
        try:
            reason = variant.refuses(layer.spec, layer.dtype) or no_room(variant, layer)
            found[variant.name] = reason or variant.prepare(layer)
        except failures() as error:
            found[variant.name] = sentence(error)
            check_device(layer.device, variant.name, sentence(error))
    return found


def release(device: torch.device | str) -> None:
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


def about(device: str) -> dict[str, Any]:
    """What every report says of its run: `command`, `date`, `machine` and `versions`."""
    return {
        "command": " ".join(["moestro", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {**machine.describe(), "device": device},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, moestro, torch, transformers if it is installed, and the peers from outside."""
    found = {"torch": metadata.version("torch")}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["transformers"] = metadata.version("transformers")
    return {"python": platform.python_version(), "moestro": moestro.__version__, **found, **outside.versions()}
