"""`moestro.profile`: what happened in a model while it ran: loads of experts, and where the time went."""

from __future__ import annotations

import sys
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
        self._memory, self._sent = _memory_of(model), _sent()

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
            memory=_since(self._memory, _memory_of(profiler.model)),
            wire_bytes={kind: n for kind, count in _sent().items() if (n := count - self._sent.get(kind, 0))},
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


_COUNTED = ("lookups", "hits")


def _memory_of(model: nn.Module) -> dict[str, Any] | None:
    """What a model's memory budget has counted so far; None without one."""
    if "moestro.hf.memory" not in sys.modules:
        return None
    from moestro.hf.memory import expert_memory

    memory = expert_memory(model)
    return None if memory is None else memory.statistics()


def _since(before: dict[str, Any] | None, now: dict[str, Any] | None) -> dict[str, Any] | None:
    """What has been counted since."""
    if now is None:
        return None
    then = now if before is None else before
    phases = {name: {key: now[name][key] - then[name][key] for key in _COUNTED} for name in ("prompt", "decode")}
    return {**phases, **{key: now[key] - then[key] for key in ("bytes_from_files", "seconds_waiting")}}


def _sent() -> dict[str, int]:
    if "moestro.parallel.guard" not in sys.modules:
        return {}
    from moestro.parallel.guard import bytes_sent

    return bytes_sent()
