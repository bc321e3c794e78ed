"""What a server counts, in Prometheus' text."""

from __future__ import annotations

import os
from collections import Counter as Counted
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moestro.hf.memory import expert_memory
from moestro.memory.experts import ExpertMemory
from moestro.ops.dispatch import Prepared, observed
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.serve.engine import Engine
from moestro.serve.request import Ended

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_EVERY = 16
"""Of so many passes through a model one is counted."""
_STATM = "/proc/self/statm"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SPEEDS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 150.0, 200.0, 500.0, 1000.0)


class Loads:
    """How many rows each expert of each layer had, in a sample of all passes through a model.

    Args:
        layers: the modules of the model's expert layers. Each says when it begins, for as long as it is there.

    Attributes:
        implementations: what has computed them.
    """

    def __init__(self, layers: Iterable[torch.nn.Module] = ()) -> None:
        self._layer = 0
        self._calls: Counted[int] = Counted()
        self._rows: dict[int, torch.Tensor] = {}
        self.implementations: set[str] = set()
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._enter, number))

    def watched(self) -> AbstractContextManager[None]:
        """Inside, calls in this context are counted, and those of an engine that is made inside."""
        return observed(EXPERT_MLP, self._tell)

    @property
    def imbalance(self) -> float:
        """The rows of a layer's busiest expert over the mean of its experts, in the mean of all layers.

        1 is balanced, 0 says that nothing was counted yet.
        """
        ratios = [float(rows.max() / rows.double().mean()) for rows in list(self._rows.values()) if rows.any()]
        return sum(ratios) / len(ratios) if ratios else 0.0

    def _enter(self, number: int, *_: Any) -> None:
        self._layer = number

    def _tell(self, prepared: Prepared, arguments: tuple[Any, ...], result: Any) -> None:
        layer = self._layer
        self._calls[layer] += 1
        if (self._calls[layer] - 1) % _EVERY:
            return
        self.implementations.add(prepared.implementation)
        _, routing, weights = arguments[:3]
        ids = routing.expert_ids
        rows = torch.bincount(ids[ids >= 0].cpu(), minlength=weights.num_experts)
        before = self._rows.get(layer)
        self._rows[layer] = rows if before is None or len(before) != len(rows) else before + rows


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self, loads: Loads | None = None) -> None:
        self.registry = CollectorRegistry()
        self.loads = loads or Loads()
        counter = {"namespace": "moestro", "registry": self.registry}
        self._prompt_tokens = Counter("prompt_tokens", "Tokens of prompts, reused ones included.", **counter)  # type: ignore[arg-type]
        self._new_tokens = Counter("generated_tokens", "New tokens.", **counter)  # type: ignore[arg-type]
        self._cached_tokens = Counter("cached_prompt_tokens", "Tokens of prompts that were reused.", **counter)  # type: ignore[arg-type]
        self._ended = Counter("requests", "Requests that ended, and why.", ["reason"], **counter)  # type: ignore[arg-type]
        self._refused = Counter("requests_refused", "Requests that were refused.", ["status"], **counter)  # type: ignore[arg-type]
        self._first = Histogram(
            "time_to_first_token_seconds",
            "From a request to its first new token, the wait included.",
            buckets=_SECONDS,
            **counter,  # type: ignore[arg-type]
        )
        self._speed = Histogram(
            "tokens_per_second",
            "New tokens a second of each request, after its first.",
            buckets=_SPEEDS,
            **counter,  # type: ignore[arg-type]
        )
        self._last_speed = Gauge("last_tokens_per_second", "The same of the request that ended last.", **counter)  # type: ignore[arg-type]
        self._seconds = 1.0

    def watch(self, engine: Engine) -> None:
        """Tell of this engine too, and of its experts where they are within a memory budget."""
        self.registry.register(_OfEngine(engine, self.loads))
        memory = expert_memory(engine.text_model.model)
        if memory is not None:
            self.registry.register(_OfMemory(memory))

    def ended(self, ended: Ended) -> None:
        """A request has ended."""
        self._ended.labels(ended.reason).inc()
        self._new_tokens.inc(ended.new_tokens)
        if not ended.new_tokens:
            return
        self._prompt_tokens.inc(ended.prompt_tokens)
        self._cached_tokens.inc(ended.cached_tokens)
        self._first.observe(ended.waited + ended.prompt_seconds)
        self._seconds += 0.2 * (ended.prompt_seconds + ended.new_seconds - self._seconds)
        if ended.new_tokens > 1 and ended.new_seconds > 0:
            speed = (ended.new_tokens - 1) / ended.new_seconds
            self._speed.observe(speed)
            self._last_speed.set(speed)

    def refused(self, status: int) -> None:
        """A request was refused."""
        self._refused.labels(str(status)).inc()

    def seconds_to_wait(self, engine: Engine) -> int:
        """Seconds until another request may be taken, from how long the last ones took: 1 to 60."""
        return max(1, min(60, round(self._seconds / engine.batch)))

    @property
    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self.registry)


class _OfEngine:
    """What is read from the engine, and from the system, when somebody asks."""

    def __init__(self, engine: Engine, loads: Loads) -> None:
        self._engine, self._loads = engine, loads

    def collect(self) -> Iterator[Metric]:
        prefixes = self._engine.prefixes
        gauges = {
            "requests_running": ("Requests that are computed.", self._engine.running),
            "requests_waiting": ("Requests that wait.", self._engine.waiting),
            "prefix_cache_bytes": ("Keys and values that are kept of earlier requests.", prefixes.num_bytes),
            "prefix_cache_entries": ("Requests whose keys and values are kept.", prefixes.entries),
            "expert_imbalance": (
                "Rows of a layer's busiest expert over the mean, of all layers.",
                self._loads.imbalance,
            ),
            "resident_bytes": ("Memory that this process takes up.", resident_bytes()),
        }
        for name, (said, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"moestro_{name}", said, value)
        counters = {
            "prefix_cache_lookups": ("Requests that looked for a beginning.", prefixes.lookups),
            "prefix_cache_hits": ("Requests that found one.", prefixes.hits),
            "prefix_cache_hit_tokens": ("Tokens that were found.", prefixes.hit_tokens),
        }
        for name, (said, value) in counters.items():
            yield CounterMetricFamily(f"moestro_{name}", said, value)


class _OfMemory:
    """What is read from the slots of a memory budget when somebody asks."""

    def __init__(self, memory: ExpertMemory) -> None:
        self._memory = memory

    def collect(self) -> Iterator[Metric]:
        told = self._memory.statistics()
        yield GaugeMetricFamily("moestro_expert_slot_bytes", "Memory that experts are read into.", told["slot_bytes"])
        of_phase = (
            (GaugeMetricFamily, "hit_rate", "Experts that were there, of those that were looked for."),
            (CounterMetricFamily, "lookups", "Experts that were looked for."),
            (CounterMetricFamily, "hits", "Experts that were there."),
        )
        for family, name, said in of_phase:
            found = family(f"moestro_expert_{name}", said, labels=["phase"])
            for phase in ("prompt", "decode"):
                found.add_metric([phase], told[phase][name])
            yield found
        read = "Bytes of experts that were read from files."
        yield CounterMetricFamily("moestro_expert_read_bytes", read, told["bytes_from_files"])
        waited = "Seconds that computing waited for reads."
        yield CounterMetricFamily("moestro_expert_read_wait_seconds", waited, told["seconds_waiting"])


def experts_told(memory: ExpertMemory) -> dict[str, float]:
    """The same in short, for a probe: of prompts and decoding together."""
    told = memory.statistics()
    lookups, hits = (told["prompt"][name] + told["decode"][name] for name in ("lookups", "hits"))
    return {
        "hit_rate": hits / lookups if lookups else 0.0,
        "read_bytes": told["bytes_from_files"],
        "seconds_waiting": told["seconds_waiting"],
    }


def resident_bytes() -> int | None:
    """What this process takes up; None where the system does not say."""
    if not os.path.exists(_STATM):
        return None
    with open(_STATM, "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
