"""A plan measured in parts, those first that are wanted most; what was found up to now is kept in a file."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

from gpu.precompile import compile_ahead
from moestro.bench.failures import DeviceLostError
from moestro.bench.layers import dtype_name
from moestro.bench.measure import Say, extend, only_those_here, start
from moestro.bench.peers.variant import Variant
from moestro.bench.records import Plan, PlanPoint, Report
from moestro.bench.timing import Budget
from moestro.errors import UnsupportedError
from peers.graphs import GRAPH

FIRST = (("olmoe", 16), ("gpt-oss-20b", 4), ("qwen3-30b-a3b", 8))
"""Layers and bits of a weight that a spent budget must not leave out."""
FIRST_TOKENS = (1, 4096, 16, 64, 8192)
"""Numbers of tokens that come before the others: the ends of decode and of prefill."""
AHEAD_SHARE = 0.25
"""Of the budget, that compiling ahead may take at most."""
LOST = 75
"""Exit code of a process that lost the device."""

Key = tuple[str, str, int]
"""Layer, dtype of x, bits of a weight."""


@dataclass
class Found:
    """What a run has found so far, for its next process.

    Attributes:
        head: a report without rows, with the roof; None before that was measured.
        reports: by layer.
        variants: those that broke the device, by part of the plan and name, and why they are not called there again.
        points: those at which a process ended, by part and number of tokens, and why they are not tried again.
    """

    head: Report | None = None
    reports: dict[str, Report] = field(default_factory=dict)
    variants: dict[tuple[Key, str], str] = field(default_factory=dict)
    points: dict[tuple[Key, int], str] = field(default_factory=dict)

    def has(self, key: Key, num_tokens: int) -> bool:
        """Whether a point has its rows."""
        rows = self.reports[key[0]].rows if key[0] in self.reports else []
        return any(row.point == (*key, num_tokens) for row in rows)

    def save(self, path: Path) -> None:
        """Keep it in a file, which is whole at any time."""
        new = path.with_suffix(".new")
        new.write_bytes(pickle.dumps(self))
        new.replace(path)

    @classmethod
    def load(cls, path: Path) -> Found:
        """What `save` kept; nothing where there is no file."""
        found = pickle.loads(path.read_bytes()) if path.is_file() else cls()
        assert isinstance(found, cls)
        return found


def stages(plan: Plan) -> list[Plan]:
    """The plan cut into parts of one layer and as many bits of a weight, those first that are wanted most.

    They are every number of tokens of `FIRST`, then `FIRST_TOKENS` of all other layers, then the rest.
    """
    early = tuple(t for t in FIRST_TOKENS if t in plan.tokens)
    late = tuple(t for t in plan.tokens if t not in early)
    ranked: list[tuple[int, int, Plan]] = []
    for dtype, spec in itertools.product(plan.dtypes, plan.layers):
        for bits, group in plan.by_bits(dtype).items():
            part = replace(group, layers=(spec,), dtypes=(dtype,))
            pieces = [(len(FIRST), early), (len(FIRST) + 1, late)]
            if (spec.name, bits) in FIRST:
                pieces = [(FIRST.index((spec.name, bits)), early + late)]
            ranked += [(rank, -bits, replace(part, tokens=tokens)) for rank, tokens in pieces if tokens]
    return [part for _, _, part in sorted(ranked, key=lambda item: item[:2])]


def key_of(part: Plan) -> Key:
    """Of a part that `stages` made."""
    [spec], [dtype] = part.layers, part.dtypes
    return spec.name, dtype_name(dtype), part.ours[0].numbers.bits_in(dtype)


def run_stages(
    plan: Plan, found: Found, on_point: Say = lambda text: None, clock: Callable[[], float] = perf_counter
) -> Iterator[Report]:
    """After each part of the plan, the report of its layer with all that was found of it up to then.

    Everything counts against the budget: compiling ahead, measuring the roof, making layers. Points share what is left
    of it evenly, in the order of `stages`; those that it does not reach are rows that say so. What was found before is
    not measured again.

    Raises:
        UnsupportedError: memory holds none of the layers.
        DeviceLostError: a variant broke the device; `found` knows which, and has all rows before that point.
    """
    parts = stages(plan)
    left = sum(not found.has(key_of(part), t) for part in parts for t in part.tokens)
    budget = Budget(plan.budget, left, clock)
    if found.head is None:
        if plan.budget is not None:
            compile_ahead(plan, plan.budget * AHEAD_SHARE, on_point)
        found.head, _ = start(plan)
        found.head.notes.setdefault("run", [])
    here = only_those_here(plan)[0].peers
    refusals: list[UnsupportedError] = []
    for part in parts:
        [spec] = part.layers
        fresh = replace(found.head, rows=[], notes={"run": found.head.notes["run"]})
        report = found.reports.setdefault(spec.name, fresh)
        rest = _rest(replace(part, peers=tuple(peer for peer in part.peers if peer in here)), found, budget)
        if rest is not None:
            refusals += _extend(report, rest, budget, found, on_point)
        order = [(dtype_name(dtype), bits) for dtype in plan.dtypes for bits in plan.by_bits(dtype)]
        report.rows.sort(key=lambda row: (order.index((row.dtype, row.bits)), row.num_tokens))
        if report.rows:
            yield report
    if refusals and not any(report.rows for report in found.reports.values()):
        refusal = refusals[-1]
        raise refusal


def _rest(part: Plan, found: Found, budget: Budget) -> Plan | None:
    """What is to be measured of a part: points that ended a process get rows, variants that broke the device refuse.

    Where a call did, so does its graph.
    """
    key, [spec], [dtype] = key_of(part), part.layers, part.dtypes

    def known(variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
        broken = found.variants
        whys = [broken.get((key, v.name)) or broken.get((key, v.name.removesuffix(GRAPH))) for v in variants]
        pairs = zip(variants, whys, strict=True)
        return tuple(v if why is None else replace(v, refuses=lambda *given, why=why: why) for v, why in pairs)

    part = replace(part, ours=known(part.ours), peers=known(part.peers))
    left = [t for t in part.tokens if not found.has(key, t)]
    for t in [t for t in left if (key, t) in found.points]:
        found.reports[spec.name].rows += PlanPoint(spec, dtype, t, part.ours, part.peers).skipped(found.points[key, t])
        budget.drop(1)
        left.remove(t)
    return replace(part, tokens=tuple(left)) if left else None


def _extend(report: Report, part: Plan, budget: Budget, found: Found, on_point: Say) -> list[UnsupportedError]:
    try:
        return extend(report, part, budget, on_point)
    except DeviceLostError as lost:
        why = f"it cost its process the device: {lost.reason}"
        if lost.variant is None:
            end_point(part, found, why)
        else:
            found.variants[key_of(part), lost.variant] = why
        raise


def end_point(plan: Plan, found: Found, why: str) -> None:
    """Give up the first point, in the order of `stages`, that has no rows."""
    points = ((key_of(part), t) for part in stages(plan) for t in part.tokens)
    for point in points:
        if not found.has(*point) and point not in found.points:
            found.points[point] = why
            return
