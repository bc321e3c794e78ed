"""What is counted elsewhere while a profile is taken: lookups of a memory budget, bytes that ranks sent."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_COUNTED = ("lookups", "hits")
_TOTALS = ("bytes_from_files", "seconds_waiting")


class Counters:
    """Differences since `start`, which stay as they are from `stop` on; a model is kept until then.

    Attributes:
        memory: of a model within a memory budget: lookups and hits of each phase, bytes read, seconds waited for.
        wire_bytes: that this rank sent to others, by what they are.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._memory: dict[str, Any] | None = None
        self._sent: dict[str, int] = {}
        self._found: tuple[dict[str, Any] | None, dict[str, int]] = None, {}

    def start(self, model: nn.Module) -> None:
        """From now on."""
        self._model, self._memory, self._sent = model, _memory_of(model), _sent()

    def stop(self) -> None:
        """Until now."""
        self._found, self._model = self._look(), None

    @property
    def memory(self) -> dict[str, Any] | None:
        return self._look()[0]

    @property
    def wire_bytes(self) -> dict[str, int]:
        return self._look()[1]

    def _look(self) -> tuple[dict[str, Any] | None, dict[str, int]]:
        if self._model is None:
            return self._found
        sent = {kind: n for kind, count in _sent().items() if (n := count - self._sent.get(kind, 0))}
        return _since(self._memory, _memory_of(self._model)), sent


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
    return {**phases, **{key: now[key] - then[key] for key in _TOTALS}}


def _sent() -> dict[str, int]:
    if "moestro.parallel.guard" not in sys.modules:
        return {}
    from moestro.parallel.guard import bytes_sent

    return bytes_sent()
