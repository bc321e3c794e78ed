"""A report for people: tables for a terminal, Markdown for the results folder."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from moestro.bench.measure import Report, Row

if TYPE_CHECKING:
    from rich.table import Table


def by_layer(rows: Iterable[Row]) -> list[tuple[tuple[str, str], list[Row]]]:
    """Rows of each (layer, dtype), in the order they were measured."""
    return [(key, list(group)) for key, group in groupby(rows, key=lambda row: (row.layer, row.dtype))]


def title(row: Row) -> str:
    """Name, dtype and sizes of a row's layer."""
    experts = f"{row.num_experts}"
    if row.num_experts != row.published_num_experts:
        experts += f" of {row.published_num_experts}"
    sizes = f"H {row.hidden_size}, I {row.intermediate_size}, E {experts}, K {row.top_k}"
    return f"{row.layer} {row.dtype} ({sizes})"


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


def tables(report: Report) -> list[Table]:
    """One table per layer and dtype for `rich.print`. The last column is time over moestro's, with quartiles."""
    from rich.table import Table

    found = []
    for (layer, dtype), rows in by_layer(report.rows):
        table = Table(title=title(rows[0]), title_justify="left", caption_justify="left", padding=0)
        table.caption = "\n".join([*report.notes.get(f"{layer} {dtype}", []), *reasons(rows)]) or None
        for name in ("T", "variant", "us", "GB/s", "GFLOP/s", "of roof"):
            table.add_column(name, justify="left" if name == "variant" else "right", no_wrap=True)
        table.add_column(f"time / {rows[0].variant}'s", justify="right", no_wrap=True)
        for row in rows:
            style = "bold" if row.kind == "moestro" else "red" if row.status == "wrong output" else None
            table.add_row(
                str(row.num_tokens),
                row.variant,
                *_measured(row),
                verdict(row),
                style=style,
                end_section=row is rows[-1] or rows[rows.index(row) + 1].num_tokens != row.num_tokens,
            )
        found.append(table)
    return found


def machine_line(machine: dict[str, Any]) -> str:
    """Processor, threads, memory and vector units in one line."""
    units = [f for f in machine["features"] if f.startswith(("avx2", "avx512", "amx", "asimd", "sve"))]
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    parts = [machine["processor"], threads, f"{machine['memory_bytes'] / 2**30:.0f} GiB", *units]
    return ", ".join(parts if machine["device"] == "cpu" else [machine["device"], *machine["accelerators"], *parts])


def roof_lines(report: Report) -> list[str]:
    """The measured roof of each dtype, a line each."""
    return [
        f"{dtype} roof: {roof.bytes_per_second / 1e9:.1f} GB/s, {roof.flops_per_second / 1e9:,.0f} GFLOP/s, "
        f"balance {roof.balance:.0f} FLOP per byte"
        for dtype, roof in report.roofs.items()
    ]


def markdown(report: Report) -> str:
    """The whole report as a dated page: machine, versions, command, a table per layer and dtype."""
    probe = report.machine["probe_bytes"] / 2**20
    baseline = report.rows[0].variant
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
        "Times are medians; variants alternate in one process. GB/s counts the weights of the experts that the routing",
        "touches, once; GFLOP/s counts 6 H I for each (token, expert) pair; the share is of the roof above. Columns",
        f"after it say how many times longer than {baseline} a variant takes (above 1: {baseline} is faster): the",
        "median of the rounds, and in brackets their lower and upper quartile.",
    ]
    for (layer, dtype), rows in by_layer(report.rows):
        notes = [f"- {note}" for note in report.notes.get(f"{layer} {dtype}", [])]
        lines += ["", f"## {title(rows[0])}", "", *notes, *([""] if notes else []), *_layer_markdown(rows)]
    return "\n".join(lines) + "\n"


def _layer_markdown(rows: list[Row]) -> list[str]:
    baseline = rows[0].variant
    others = list(dict.fromkeys(row.variant for row in rows if row.variant != baseline))
    lines = [
        f"| T | {baseline}, us | GB/s | GFLOP/s | of roof | {' | '.join(others)} |",
        "|" + "---:|" * (5 + len(others)),
    ]
    for num_tokens, group in groupby(rows, key=lambda row: row.num_tokens):
        point = {row.variant: row for row in group}
        cells = [str(num_tokens), *_measured(point[baseline]), *(verdict(point[name]) for name in others)]
        lines.append(f"| {' | '.join(cells)} |")
    footnotes = [f"- {reason}" for reason in reasons(rows)]
    return [*lines, "", *footnotes] if footnotes else lines


def _measured(row: Row) -> tuple[str, str, str, str]:
    if row.microseconds is None or row.gigabytes_per_second is None or row.gigaflops is None or row.roof_share is None:
        return ("-", "-", "-", "-")
    return (
        f"{row.microseconds:,.0f}",
        f"{row.gigabytes_per_second:.1f}",
        f"{row.gigaflops:,.1f}",
        f"{row.roof_share:.0%}",
    )
