"""Peaks that can be true: one below a rate of the same run was measured while something else ran."""

from __future__ import annotations

from dataclasses import replace

from moestro import machine
from moestro.bench.records import Report, Row

ATTEMPTS = 3
_HALF_AS_WIDE = 2
"""How many products of 16 bits a vector instruction makes for each that it makes of float32."""


def settle(report: Report) -> None:
    """Measure peaks from registers again that are below a rate in the report; refuse what stays below.

    The best of all measurements counts. A peak that is refused is removed, from rows too, and a note says why.
    """
    for _ in range(ATTEMPTS):
        if not refuted(report):
            break
        again = machine.peaks()
        report.peaks = {name: max(rate, again.get(name, 0.0)) for name, rate in report.peaks.items()}
    for name, (rate, who) in refuted(report).items():
        found = report.peaks[name]
        report.peaks = {other: kept for other, kept in report.peaks.items() if other != name}
        report.notes.setdefault("run", []).append(
            f"the peak {name} is refused: {_giga(found)} from registers, after {ATTEMPTS} more measurements, is below "
            f"the {_giga(rate)} of {who} in this run; other work may use the processor"
        )
    report.rows = [_against(row, report.peaks) for row in report.rows]


def refuted(report: Report) -> dict[str, tuple[float, str]]:
    """Peaks that cannot be, by name: the rate that is above, and whose it is."""
    matmuls = [roof.flops_per_second for dtype, roof in report.roofs.items() if dtype == "float32"]
    rates = [("fma", "float32", rate, "a matmul") for rate in matmuls]
    rates += [
        (row.peak, row.dtype, row.gigaflops * 1e9, f"{row.variant} at T = {row.num_tokens}")
        for row in report.rows
        if row.peak is not None and row.gigaflops is not None
    ]
    found: dict[str, tuple[float, str]] = {}
    for peak, dtype, rate, who in rates:
        if peak in report.peaks and rate > max(_most(peak, dtype, report.peaks), found.get(peak, (0.0,))[0]):
            found[peak] = rate, who
    return found


def _most(peak: str, dtype: str, peaks: dict[str, float]) -> float:
    """The most operations per second that a peak leaves possible. 16 bits and tiles may pass it."""
    if peak == "vnni":
        return max(peaks[peak], peaks.get("amx-int8", 0.0))
    if peak == "fma" and dtype != "float32":
        return max(_HALF_AS_WIDE * peaks[peak], peaks.get("amx-bf16", 0.0))
    return peaks[peak]


def _against(row: Row, peaks: dict[str, float]) -> Row:
    if row.peak is None or row.gigaflops is None:
        return row
    if row.peak not in peaks:
        return replace(row, peak=None, peak_share=None)
    return replace(row, peak_share=row.gigaflops * 1e9 / peaks[row.peak])


def _giga(rate: float) -> str:
    return f"{rate / 1e9:,.0f} GFLOP/s"
