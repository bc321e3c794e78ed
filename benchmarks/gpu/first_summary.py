"""What the first run has found so far, on one page beside its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpu.items import Record, Row


def write(results: Path, steps: Sequence[str]) -> None:
    """Write `summary.md` of the steps that have files."""
    records = [Record.load(results / f"{step}.json", step) for step in steps if (results / f"{step}.json").is_file()]
    parts = [part for record in records for part in _section(record)]
    (results / "summary.md").write_text("\n".join(["# First run on a GPU", "", *parts]) + "\n")


def line(record: Record) -> str:
    """How a step went, in one line."""
    wrong = sum(row.get("status") == "wrong" for row in record.rows)
    taken = sum(record.done.values())
    counts = f"{len(record.done)} items done in {taken:.0f} s, {len(record.failed)} failed, {len(record.left)} left"
    return f"{record.step}: {counts}; {len(record.rows)} rows, {wrong} of them wrong"


def _section(record: Record) -> list[str]:
    lines = [f"## {record.step}", "", line(record), ""]
    lines += [f"- {note}" for note in record.notes]
    lines += [f"- {row.get('item')}: {row.get('reason')}" for row in record.rows if _is_news(row)]
    lines += [f"- {name} failed: {why}" for name, why in record.failed.items()]
    lines += [f"- left: {name}: {why}" for name, why in record.left.items()]
    timed = [row for row in record.rows if "way" in row and "us" in row]
    if timed:
        lines += ["", "| layer | T | variant | way | us | quartiles | of plain read | of matrix rate | peer / ours |"]
        lines += ["|---|---:|---|---|---:|---|---:|---:|---:|", *map(_line, timed)]
    won = [row for row in record.rows if row.get("winner")]
    lines += [f"- {row['layer']} T={row['tokens']}: best plan {_number(row.get('gain'), '.2f')}x" for row in won]
    return [*lines, ""]


def _is_news(row: Row) -> bool:
    return row.get("status") in ("wrong", "failed", "refused") and "reason" in row


def _line(row: Row) -> str:
    low, high = row["us_quartiles"]
    over = row.get("peer_over_ours")
    cells = (
        row["layer"],
        str(row["tokens"]),
        row["variant"],
        row["way"],
        _number(row["us"], ",.1f"),
        f"{low:,.1f} to {high:,.1f}",
        _number(row["of_read"], ".0%"),
        _number(row["of_matrix_rate"], ".0%"),
        _number(over[1] if over else None, ".2f"),
    )
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
