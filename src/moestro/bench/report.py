"""A report for people: tables for a terminal, Markdown for the results folder."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from moestro.bench.records import Report, Row

if TYPE_CHECKING:
    from rich.table import Table


QUANTISED_BITS = 8
"""At most as many bits of a weight mean that it is a quantised one."""


def by_layer(rows: Iterable[Row]) -> list[tuple[tuple[str, str, int], list[Row]]]:
    """Rows of each layer, dtype and bits, in the order they were measured."""
    return [(key, list(group)) for key, group in groupby(rows, key=lambda row: (row.layer, row.dtype, row.bits))]


def title(row: Row) -> str:
    """Name, dtype, bits where they are not the dtype's, and sizes of a row's layer."""
    experts = f"{row.num_experts}"
    if row.num_experts != row.published_num_experts:
        experts += f" of {row.published_num_experts}"
    sizes = f"H {row.hidden_size}, I {row.intermediate_size}, E {experts}, K {row.top_k}"
    what = row.dtype if row.bits > QUANTISED_BITS else f"{row.bits} bits, x in {row.dtype}"
    return f"{row.layer} {what} ({sizes})"


def verdict(row: Row) -> str:
    """What stands where a ratio would: it and its quartiles, the status, or "-" where there is nothing to compare."""
    if row.status != "ok":
        return row.status
    if row.ratio is None:
        return "-"
    return f"{row.ratio:.2f}x ({row.ratio_low:.2f}-{row.ratio_high:.2f})"


def reasons(rows: list[Row]) -> list[str]:
    """Why rows have no numbers, one line for each reason; and that ratios are refused where moestro has none."""
    found: dict[str, list[str]] = {}
    baseline = rows[0].variant
    for row in rows:
        if row.status != "ok":
            found.setdefault(f"{row.variant} {row.status}: {row.reason}", []).append(str(row.num_tokens))
            if row.variant == baseline:
                found.setdefault("no ratio without it", []).append(str(row.num_tokens))
    return [f"T={', '.join(tokens)}: {reason}" for reason, tokens in found.items()]


COLUMNS = ("us", "GB/s", "of bw", "GFLOP/s", "of peak")


def tables(report: Report) -> list[Table]:
    """One table per layer, dtype and bits for `rich.print`. The last column is time over moestro's, with quartiles."""
    from rich.table import Table

    found = []
    for (layer, dtype, _), rows in by_layer(report.rows):
        table = Table(title=title(rows[0]), title_justify="left", caption_justify="left", padding=0)
        table.caption = "\n".join([*report.notes.get(f"{layer} {dtype}", []), *reasons(rows)]) or None
        errors = ("error",) if shows_errors(rows) else ()
        for name in ("T", "variant", *COLUMNS, *errors):
            table.add_column(name, justify="left" if name == "variant" else "right", no_wrap=True)
        table.add_column(f"time / {rows[0].variant}'s", justify="right", no_wrap=True)
        for row in rows:
            style = "bold" if row.kind == "moestro" else "red" if row.status == "wrong output" else None
            table.add_row(
                str(row.num_tokens),
                row.variant,
                *measured(row),
                *(error(row) for _ in errors),
                verdict(row),
                style=style,
                end_section=row is rows[-1] or rows[rows.index(row) + 1].num_tokens != row.num_tokens,
            )
        found.append(table)
    return found


def shows_errors(rows: list[Row]) -> bool:
    """Whether a table tells how far outputs are off: where weights were quantised."""
    return rows[0].bits <= QUANTISED_BITS


def machine_line(machine: dict[str, Any]) -> str:
    """Processor, threads, memory and vector units in one line."""
    units = [f for f in machine["features"] if f.startswith(("avx2", "avx512", "amx", "asimd", "sve"))]
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    parts = [machine["processor"], threads, f"{machine['memory_bytes'] / 2**30:.0f} GiB", *units]
    return ", ".join(parts if machine["device"] == "cpu" else [machine["device"], *machine["accelerators"], *parts])


def roof_lines(report: Report) -> list[str]:
    """The measured roof of each dtype and the peaks, a line each."""
    lines = [
        f"{dtype} roof: {roof.bytes_per_second / 1e9:.1f} GB/s, {roof.flops_per_second / 1e9:,.0f} GFLOP/s, "
        f"balance {roof.balance:.0f} FLOP per byte"
        for dtype, roof in report.roofs.items()
    ]
    peaks = [f"{name} {rate / 1e9:,.0f}" for name, rate in report.peaks.items()]
    if "gpu" in report.machine:
        found = [f"{name} {rate / 1e9:,.0f}" for name, rate in report.machine["bandwidths"].items()]
        lines += [f"bandwidth of each probe: {', '.join(found)} GB/s"]
        return [*lines, f"large matrix products: {', '.join(peaks)} GFLOP/s"]
    return [*lines, f"peaks from registers: {', '.join(peaks)} GFLOP/s (GOP/s of integers)"] if peaks else lines


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
    "Times are medians; variants alternate in one process. GB/s counts the weights of the experts that the routing",
    "touches, once, as the variant stores them, scales included; of bw is its share of the roof's. GFLOP/s counts",
    "6 H I for each (token, expert) pair; of peak is its share of the fma peak from registers, or of the vnni peak",
    "where i8 stands: the variant multiplies int8 numbers. An error is the relative L2 error of the output against the",
    "layer before anything was quantised. Ratios say how many times longer than moestro's first variant of the table",
    "another takes (above 1: moestro is faster): the median of the rounds, and in brackets their lower and upper",
    "quartile.",
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
    footnotes = [f"- {reason}" for reason in reasons(rows)]
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


def measured(row: Row) -> tuple[str, ...]:
    """The cells of `COLUMNS`."""
    if row.microseconds is None or row.gigabytes_per_second is None or row.gigaflops is None:
        return ("-",) * len(COLUMNS)
    return (
        f"{row.microseconds:,.0f}",
        f"{row.gigabytes_per_second:.1f}",
        "-" if row.bandwidth_share is None else f"{row.bandwidth_share:.0%}",
        f"{row.gigaflops:,.1f}",
        "-" if row.peak_share is None else f"{row.peak_share:.0%}{_MARKS.get(row.peak or '', '')}",
    )


_MARKS = {"vnni": " i8", "fp8-mm": " f8"}
"""Of shares of a peak that is not the floats'."""


def error(row: Row) -> str:
    """The cell of the output's error."""
    return "-" if row.error is None else f"{row.error:.1e}"
