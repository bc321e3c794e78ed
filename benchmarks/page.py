"""A report as Markdown, for the results folder."""

from __future__ import annotations

from itertools import groupby

from moestro.bench.records import Report, Row
from moestro.bench.report import (
    COLUMNS,
    by_layer,
    error,
    machine_line,
    measured,
    reasons,
    roof_lines,
    round_trips,
    shows_errors,
    title,
    verdict,
)


def markdown(report: Report) -> str:
    """The whole report as a dated page: machine, versions, command, a table per layer and dtype."""
    probe = report.machine["probe_bytes"] / 2**20
    lines = [
        f"# Layer benchmark, {report.date[:10]}",
        "",
        f"- machine: {machine_line(report.machine)}",
        f"- caches: {', '.join(f'{k} {v / 2**20:g} MiB' for k, v in report.machine['cache_bytes'].items())}",
        *(f"- {line}" for line in roof_lines(report)),
        f"- bandwidth is read over {probe:.0f} MiB; of a virtual machine's last-level cache only a share is its own",
        f"- versions: {', '.join(f'{k} {v}' for k, v in report.versions.items())}",
        f"- command: `{report.command}`",
        *(f"- {note}" for note in report.notes.get("run", [])),
        "",
        *(_GPU_LEGEND if "gpu" in report.machine else _LEGEND),
    ]
    for (layer, dtype, _), rows in by_layer(report.rows):
        notes = [f"- {note}" for note in report.notes.get(f"{layer} {dtype}", [])]
        lines += ["", f"## {title(rows[0])}", "", *notes, *([""] if notes else []), *_layer_markdown(rows)]
    return "\n".join(lines) + "\n"


_LEGEND = (
    "Times are medians; variants alternate, those with threads of their own in processes of their own. A call of less",
    "than 0.1 s follows 50 ms of others of its variant, which are not timed. GB/s counts the",
    "weights of the experts that the routing touches, once, as the variant stores them, scales included; of bw is its",
    "share of a plain read's at the same point: all threads read the bytes of moestro's weights and compute nothing.",
    "GFLOP/s counts",
    "6 H I for each (token, expert) pair; of peak is its share of the fma peak from registers, or of the vnni peak",
    "where i8 stands: the variant multiplies int8 numbers. An error is the relative L2 error of the output against the",
    "layer before anything was quantised. Ratios say how many times longer than moestro's first variant of the table",
    "another takes (above 1: moestro is faster; a plain read takes longer only where memory was slower for it): the",
    "median of the rounds, and in brackets their lower and upper quartile. Below a table: how long a cache line took",
    "from one thread to another and back before a point and after it: more where they share no cache, and microseconds",
    "where they share a core.",
)


_GPU_LEGEND = (
    "Times are medians of what passes between two events around a call, on a device that is idle before it: what",
    "the host takes to launch counts where the device waits for it. A variant whose name ends in -graph was",
    "captured once and is replayed. Where four times the L2 cache would hold a layer's weights, twice the cache",
    "is written before each call, so that every call reads them from memory; larger weights are not in it, as",
    "calls take turns over the experts. Variants alternate in one process. GB/s counts the weights of the experts",
    "that the routing touches, once, as the variant stores them, scales included; of bw is its share of the",
    "roof's. GFLOP/s counts 6 H I for each (token, expert) pair; of peak is its share of the rate of large",
    "bfloat16 (f8: fp8) matrix products. Ratios say how many times longer than moestro's first variant of the",
    "table another takes (above 1: moestro is faster): the median of the rounds, and in brackets their lower and",
    "upper quartile. Outputs were checked before anything was timed.",
)


def _layer_markdown(rows: list[Row]) -> list[str]:
    if shows_errors(rows) or sum(row.kind == "moestro" for row in rows if row.num_tokens == rows[0].num_tokens) > 1:
        lines = _long_markdown(rows)
    else:
        lines = _wide_markdown(rows)
    footnotes = [f"- {text}" for text in (*reasons(rows), *round_trips(rows))]
    return [*lines, "", *footnotes] if footnotes else lines


def _wide_markdown(rows: list[Row]) -> list[str]:
    """A line for each number of tokens, a column for each variant's ratio."""
    baseline = rows[0].variant
    others = list(dict.fromkeys(row.variant for row in rows if row.variant != baseline))
    lines = [
        f"| T | {baseline}, {' | '.join(COLUMNS)} | {' | '.join(others)} |",
        "|" + "---:|" * (1 + len(COLUMNS) + len(others)),
    ]
    for num_tokens, group in groupby(rows, key=lambda row: row.num_tokens):
        point = {row.variant: row for row in group}
        cells = [str(num_tokens), *measured(point[baseline]), *(verdict(point[name]) for name in others)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _long_markdown(rows: list[Row]) -> list[str]:
    """A line for each variant at each number of tokens, with its format's error."""
    lines = [
        f"| T | variant | format | {' | '.join(COLUMNS)} | error | time / {rows[0].variant}'s |",
        "|---:|---|---|" + "---:|" * (2 + len(COLUMNS)),
    ]
    for row in rows:
        cells = (str(row.num_tokens), row.variant, row.format, *measured(row), error(row), verdict(row))
        lines.append(f"| {' | '.join(cells)} |")
    return lines
