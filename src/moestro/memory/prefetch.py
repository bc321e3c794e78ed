"""Experts that are read before their layer asks for them: those that its router picks for the rows of the layer before.

Rows change little from layer to layer, so the next router's picks for them are mostly those that it makes when its
turn comes. No bit of a result depends on this; time does, both ways, so it is measured while it runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 8
"""Steps in a row with prefetching, and as many without it, while the two are compared."""
BLOCKS = 4
"""Of a comparison; every second one prefetches."""
STEPS = 256
"""From the end of a comparison to the next."""

Router = Callable[[Tensor], Tensor]
"""Scores [T, E] of rows [T, H]; the highest are picked."""


class Gain:
    """Whether steps are shorter with prefetching: compares medians of alternating blocks, again and again.

    Args:
        clock: in seconds.

    Attributes:
        on: whether the step that goes on prefetches.
        gain: the time of a step without, over that with it, of the last comparison; None before the first has ended.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.on = False
        self.gain: float | None = None
        self._clock = clock
        self._start: float | None = None
        self._seconds: list[float] = []
        self._rest = 0

    @property
    def compares(self) -> bool:
        """Whether a comparison goes on."""
        return self._rest == 0

    def begin(self, counts: bool) -> None:
        """A forward begins; only a step of decoding counts."""
        self._start = self._clock() if counts else None

    def end(self) -> None:
        """The step has ended; one that was never begun, or broke off, does not count."""
        if self._start is None:
            return
        seconds, self._start = self._clock() - self._start, None
        if self._rest:
            self._rest -= 1
            self.on = self.on and not self.compares
            return
        self._seconds.append(seconds)
        if len(self._seconds) == BLOCK * BLOCKS:
            blocks = [self._seconds[i : i + BLOCK] for i in range(0, len(self._seconds), BLOCK)]
            without, with_it = (statistics.median(s for block in blocks[i::2] for s in block) for i in (0, 1))
            self.gain = without / with_it if with_it else 1.0
            self._seconds, self._rest = [], STEPS
            self.on = self.gain > 1
        else:
            self.on = len(self._seconds) // BLOCK % 2 == 1


class Prefetcher:
    """Predicts, and keeps count of how often that was right.

    Args:
        routers: of the layers, in execution order; None where there is none to ask.
        top_k: of the layers.

    Attributes:
        gain: what it is good for; it says whether to prefetch now.
        asked, found: experts that layers asked for in decoding, and those of them that were predicted.
    """

    def __init__(self, routers: Sequence[Router | None], top_k: Sequence[int], gain: Gain | None = None) -> None:
        self.routers, self._top_k = tuple(routers), tuple(top_k)
        self.gain = gain or Gain()
        self.asked = self.found = 0
        self._predicted: tuple[int, frozenset[int]] | None = None

    @property
    def layers(self) -> int:
        """How many have a router and a layer before them."""
        return sum(router is not None for router in self.routers[1:])

    @property
    def recall(self) -> float | None:
        """The share of experts that were predicted, of those that layers asked for; None before any."""
        return self.found / self.asked if self.asked else None

    def predict(self, layer: int, rows: Tensor) -> list[int]:
        """Experts of a layer for rows [T, H] of the one before, the likeliest first; none without a router."""
        router = self.routers[layer] if layer < len(self.routers) else None
        if router is None:
            return []
        with torch.no_grad():
            picked = router(rows).topk(self._top_k[layer]).indices
        experts = list(dict.fromkeys(picked.t().flatten().tolist()))
        self._predicted = layer, frozenset(experts)
        return experts

    def meet(self, layer: int, experts: Iterable[int]) -> None:
        """What a layer really asks for."""
        predicted, self._predicted = self._predicted, None
        if predicted is not None and predicted[0] == layer:
            wanted = set(experts)
            self.asked += len(wanted)
            self.found += len(wanted & predicted[1])

    def told(self) -> dict[str, Any]:
        """As plain values."""
        return {"layers": self.layers, "on": self.gain.on, "recall": self.recall, "gain": self.gain.gain}

    def __str__(self) -> str:
        gain = self.gain.gain
        if gain is None:
            return "prefetch not yet compared"
        verdict = "is compared anew" if self.gain.compares else "is on" if self.gain.on else "is off"
        return f"prefetch {verdict}, a step was {gain:.2f}x as fast with it, recall {self.recall or 0.0:.0%}"
