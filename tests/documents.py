"""The form of what benchmarks write as JSON, as docs/reference/bench.md has it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

KEYS = {
    "schema": str,
    "command": str,
    "date": str,
    "versions": dict,
    "machine": dict,
    "roof": dict | None,
    "settings": dict,
    "points": list,
    "notes": list,
}
RATES = {"bytes_per_second", "flops_per_second", "balance"}
PLAIN = str | int | float | None


def check_document(found: dict[str, Any]) -> None:
    """That a document is of the one form, whichever command wrote it."""
    assert list(found) == list(KEYS)
    assert found["schema"] == "moestro-bench/1"
    assert {name: value for name, value in found.items() if not isinstance(value, KEYS[name])} == {}
    assert found["command"].startswith("moestro")
    assert datetime.fromisoformat(found["date"]).tzinfo is not None
    assert {"python", "moestro", "torch"} <= set(found["versions"])
    assert {"processor", "threads", "memory_bytes", "device"} <= set(found["machine"])
    if found["roof"] is not None:
        assert set(found["roof"]) == {"dtypes", "peaks"}
        assert all(set(rates) == RATES for rates in found["roof"]["dtypes"].values())
    for record in (found["settings"], *found["points"]):
        assert {name: value for name, value in record.items() if not _is_plain(value)} == {}
    assert all(isinstance(point["status"], str) for point in found["points"])
    assert all(isinstance(note, str) for note in found["notes"])


def _is_plain(value: object) -> bool:
    """A value without objects inside: of a point of ranks also a list for each of them."""
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, PLAIN)
