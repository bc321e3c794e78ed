"""`moestro.profile`: what happened in a model while it ran: loads of experts, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from moestro.profiling import report as tables
from moestro.profiling.loads import LayerLoad
from moestro.profiling.marks import STAGES, Clock, Phase
from moestro.profiling.profiler import Profiler
from moestro.profiling.report import ProfileReport

__all__ = ["STAGES", "LayerLoad", "Phase", "Profile", "ProfileReport", "profile"]


@contextmanager
def profile(model: nn.Module) -> Iterator[Profile]:
    """Inside, see what a model does in this thread: generation, training, or calls of its parts.

    Outputs, gradients and parameters are those without it, and nothing of it is left in the model afterwards.

    Args:
        model: a model of Transformers that moestro serves, or any module with `MoE`, `FFN` or `Experts` in it.

    Returns:
        A `Profile`, whose ``report`` is whole when the block ends; ``print(p)`` shows it.

    Raises:
        InvalidInputError: no module.
        UnsupportedError: a model without an expert layer that moestro runs, or one that is compiled.
    """
    made = Profile(model)
    with made.profiler.taken():
        yield made


class Profile:
    """What a `profile` block has seen so far.

    Attributes:
        profiler: what takes it.
        name: what reports call the model.
    """

    def __init__(self, model: nn.Module, name: str | None = None, clock: Clock | None = None) -> None:
        self.profiler = Profiler(model, clock)
        self.name = type(model).__name__ if name is None else name

    @property
    def report(self) -> ProfileReport:
        """All of it as values."""
        from moestro.bench.measure import about

        profiler = self.profiler
        found = (layer.load() for layer in profiler.layers)
        return ProfileReport(
            **about(str(profiler.device)),
            model=self.name,
            ran=tuple(profiler.ran),
            phases=profiler.marks.phases,
            layers=tuple(load for load in found if load is not None),
            memory=profiler.counters.memory,
            wire_bytes=profiler.counters.wire_bytes,
            dropped_spans=profiler.marks.dropped_spans,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values for json.dumps."""
        return self.report.as_json()

    def __str__(self) -> str:
        """Tables of 80 columns."""
        return tables.text(self.report)

    def plot(self, path: str | Path) -> None:
        """Write a picture (png, svg or pdf by the name's ending); needs matplotlib."""
        from moestro.profiling.plot import profile_plot

        profile_plot(self.report, path)

    def chrome_trace(self, path: str | Path) -> None:
        """Write all spans, the first 200,000, as a file for chrome://tracing or ui.perfetto.dev."""
        from moestro.profiling.chrome import write_chrome_trace

        write_chrome_trace(self.profiler.marks.spans, path, self.name)
