"""Peaks that can be true: one below a rate of the same run was measured while something else ran."""

from __future__ import annotations

from dataclasses import replace

from moestro import machine
from moestro.bench.records import Report

ATTEMPTS = 3


def settle(report: Report) -> None:
    """Measure peaks from registers again that are below a rate in the report; refuse what stays below.

    The best of all measurements counts. A peak that is refused is removed, from rows too, and a note says why.
    """
    for _ in range(ATTEMPTS):
        if not refuted(report):
            break
        found = machine.peaks()
        report.peaks = {name: max(rate, found.get(name, 0.0)) for name, rate in report.peaks.items()}
    for name, (rate, who) in refuted(report).items():
        report.notes.setdefault("run", []).append(
            f"the peak {name} is refused: {report.peaks[name] / 1e9:,.0f} GFLOP/s from registers, after {ATTEMPTS} "
            f"more measurements, is below the {rate / 1e9:,.0f} GFLOP/s of {who} in this run; other work may use the "
            "processor"
        )
        report.peaks = {other: kept for other, kept in report.peaks.items() if other != name}
    for place, row in enumerate(report.rows):
        if row.peak is not None and row.gigaflops is not None:
            peak = report.peaks.get(row.peak)
            share = None if peak is None else row.gigaflops * 1e9 / peak
            report.rows[place] = replace(row, peak=row.peak if peak else None, peak_share=share)


def refuted(report: Report) -> dict[str, tuple[float, str]]:
    """Peaks that cannot be, by name: the rate that is above, and whose it is."""
    rates = (
        [("fma", "float32", report.roofs["float32"].flops_per_second, "a matmul")] if "float32" in report.roofs else []
    )
    rates += [
        (row.peak, row.dtype, row.gigaflops * 1e9, f"{row.variant} at T = {row.num_tokens}")
        for row in report.rows
        if row.peak is not None and row.gigaflops is not None
    ]
    above = [rate for rate in rates if rate[0] in report.peaks and rate[2] > _most(*rate[:2], report.peaks)]
    return {peak: (rate, who) for peak, _, rate, who in sorted(above, key=lambda found: found[2])}


def _most(peak: str, dtype: str, peaks: dict[str, float]) -> float:
    """The most operations per second that a peak leaves possible. 16 bits and tiles may pass it."""
    if peak == "vnni":
        return max(peaks[peak], peaks.get("amx-int8", 0.0))
    if peak == "fma" and dtype != "float32":
        return max(2 * peaks[peak], peaks.get("amx-bf16", 0.0))  # a vector instruction makes twice as many products
    return peaks[peak]
