"""A report for people: tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from moestro.bench.records import Report, Row
from moestro.bench.timing import ratio_text

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
    if row.ratio is None or row.ratio_low is None or row.ratio_high is None:
        return "-"
    return ratio_text(row.ratio, row.ratio_low, row.ratio_high)


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


def round_trips(rows: list[Row]) -> list[str]:
    """How long a cache line took between threads at each number of tokens, in a line; none where none was measured."""
    found = {row.num_tokens: row.round_trips for row in rows if row.round_trips}
    each = [f"T={tokens} {' and '.join(f'{trip * 1e9:.0f}' for trip in trips)}" for tokens, trips in found.items()]
    return [f"a cache line from thread to thread and back, before and after, ns: {', '.join(each)}"] if each else []


COLUMNS = {
    "us": ("microseconds", ",.0f"),
    "GB/s": ("gigabytes_per_second", ".1f"),
    "of bw": ("bandwidth_share", ".0%"),
    "GFLOP/s": ("gigaflops", ",.1f"),
    "of peak": ("peak_share", ".0%"),
}
"""What is measured of a row: its attribute, and how that is written."""

STYLES = {"moestro": "bold", "read": "dim", "peer": None}
"""Of the lines of each kind of row."""


def tables(report: Report) -> list[Table]:
    """One table per layer, dtype and bits for `rich.print`. The last column is time over moestro's, with quartiles."""
    from rich.table import Table

    found = []
    for (layer, dtype, _), rows in by_layer(report.rows):
        table = Table(title=title(rows[0]), title_justify="left", caption_justify="left", padding=0)
        table.caption = (
            "\n".join([*report.notes.get(f"{layer} {dtype}", []), *reasons(rows), *round_trips(rows)]) or None
        )
        errors = ("error",) if shows_errors(rows) else ()
        for name in ("T", "variant", *COLUMNS, *errors):
            table.add_column(name, justify="left" if name == "variant" else "right", no_wrap=True)
        table.add_column(f"time / {rows[0].variant}'s", justify="right", no_wrap=True)
        for row in rows:
            style = "red" if row.status == "wrong output" else STYLES[row.kind]
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
    """Processor, threads, memory, vector units in one line, and if features are masked those and PyTorch's kernels."""
    units = [f for f in machine["features"] if f.startswith(("avx2", "avx512", "amx", "asimd", "sve"))]
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    masked = [f"{f} masked" for f in machine.get("masked_features", ())]
    if masked and "torch_kernels" in machine:
        masked.append(f"PyTorch's kernels {machine['torch_kernels']}")
    parts = [machine["processor"], threads, f"{machine['memory_bytes'] / 2**30:.0f} GiB", *units, *masked]
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


def written(row: object, columns: Iterable[tuple[str, str]], none: str = "-") -> list[str]:
    """The cells of a row: attributes, each with how it is written, and what stands where one is None."""
    found = [(getattr(row, name), form) for name, form in columns]
    return [none if value is None else format(value, form) for value, form in found]


def measured(row: Row) -> list[str]:
    """The cells of `COLUMNS`, with a mark at a share of a peak that is not the floats'."""
    *cells, share = written(row, COLUMNS.values())
    mark = {"vnni": " i8", "fp8-mm": " f8"}.get(row.peak or "", "")
    return [*cells, share if row.peak_share is None else share + mark]


def error(row: Row) -> str:
    """The cell of the output's error."""
    return written(row, [("error", ".1e")])[0]
