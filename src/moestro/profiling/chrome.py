"""A profile's spans as a file that chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from moestro.profiling.marks import Span


def write_chrome_trace(spans: Iterable[Span], path: str | Path, model: str) -> None:
    """Write spans as complete events of the Trace Event Format, in microseconds; each phase has a line of its own.

    Source: "Trace Event Format", Google 2016 (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
    """
    spans = list(spans)
    lines = {phase: number for number, phase in enumerate(dict.fromkeys(span.phase for span in spans))}
    named = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": model}},
        *(
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": phase}}
            for phase, number in lines.items()
        ),
    ]
    events = [
        {
            "name": span.place.name,
            "cat": span.place.stage,
            "ph": "X",
            "ts": span.begin * 1e6,
            "dur": (span.end - span.begin) * 1e6,
            "pid": 0,
            "tid": lines[span.phase],
            "args": {"stage": span.place.stage},
        }
        for span in spans
    ]
    Path(path).write_text(json.dumps({"traceEvents": [*named, *events], "displayTimeUnit": "ms"}), encoding="utf-8")
