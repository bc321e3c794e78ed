"""The one form of JSON that every benchmark is written in, and the way to read older ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol

from moestro.machine import Roof

SCHEMA = "moestro-bench/1"
OK = "ok"


class Run(Protocol):
    """What every report has: what `moestro.bench.measure.about` says of its run."""

    @property
    def command(self) -> str: ...
    @property
    def date(self) -> str: ...
    @property
    def machine(self) -> dict[str, Any]: ...
    @property
    def versions(self) -> dict[str, str]: ...


def document(
    run: Run,
    settings: Mapping[str, Any],
    points: Iterable[Any],
    roof: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
) -> dict[str, Any]:
    """What a benchmark found, in plain values for json.dumps, with the same keys whichever it was.

    Args:
        run: the report.
        settings: what was measured, and how, by name.
        points: a record for each thing that was measured, or was to be, with a `status` where it is not "ok".
        roof: of `roof_of`, or None where none was measured.
        notes: sentences.
    """
    return {
        "schema": SCHEMA,
        "command": run.command,
        "date": run.date,
        "versions": run.versions,
        "machine": run.machine,
        "roof": roof,
        "settings": flat(settings),
        "points": [{"status": OK, **flat(point)} for point in points],
        "notes": list(notes),
    }


def roof_of(roofs: Mapping[str, Roof], peaks: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The roof of a document: rates and balance by dtype under "dtypes", and under "peaks" those of registers."""
    dtypes = {dtype: {**asdict(roof), "balance": roof.balance} for dtype, roof in roofs.items()}
    return {"dtypes": dtypes, "peaks": dict(peaks or {})}


def flat(record: Any) -> dict[str, Any]:
    """A dataclass or a mapping without objects inside: their names are joined by dots."""
    return dict(_flattened(asdict(record) if is_dataclass(record) and not isinstance(record, type) else record))


def _flattened(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in _flattened(value))
        else:
            yield name, list(value) if isinstance(value, tuple) else value


def points_of(stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The points of a document as it was stored; of one from before there was a schema, its rows."""
    found: list[dict[str, Any]] = stored.get("points" if "schema" in stored else "rows", [])
    return found
