"""The waves of one visit, each handed out once its experts are in their slots; reads go on while it is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moestro.memory.policy import Visit
from moestro.memory.residents import Wave
from moestro.memory.tiers import Arrival
from moestro.weights import ExpertWeights

if TYPE_CHECKING:
    from moestro.memory.experts import LayerMemory


@dataclass(frozen=True, eq=False)
class Turn:
    """What is computed next.

    Attributes:
        wave: experts, and the slots that they are in.
        layer: whose slots; of a tier below where an expert is computed where it is.
    """

    wave: Wave
    layer: LayerMemory


class Turns:
    """Of one visit of a layer.

    Args:
        layer: its part of a tier.
        visit: what was asked for.
        waves: of the visit, from `Residents.visit`.
        like: the layer's experts, whose biases go with them; None where nothing is computed.
        below: whether experts that come from a tier with slots of its own are computed there, while they are copied.

    Raises:
        InvalidInputError: a file is not what it was; then no expert counts as there that is not.
    """

    def __init__(
        self, layer: LayerMemory, visit: Visit, waves: Sequence[Wave], like: ExpertWeights | None, below: bool = False
    ) -> None:
        self._layer, self._visit, self._waves, self._like = layer, visit, waves, like
        self._below = below
        self._begun: list[list[tuple[int, int, Arrival]]] = []
        self._now = self._arrived = 0
        self._ended = False

    def begin(self) -> None:
        """Ask for what may come: a wave whose slots belong to none that has not been computed."""
        while len(self._begun) < len(self._waves) and self._may_begin(len(self._begun)):
            self._begun.append(self._ask(self._waves[len(self._begun)]))

    def each(self, asked: Callable[[], None]) -> Generator[Turn, None, None]:
        """Hand them out in turn; `asked` is called once all has been asked for that may be at first."""
        try:
            for number, wave in enumerate(self._waves):
                self._now = number
                self.begin()
                if number == 0:
                    asked()
                begun, rest = self._begun[number], wave
                if self._below and begun:
                    yield from self._there(begun)
                    rest = _without(wave, {expert for expert, _, _ in begun})
                self._finish(begun)
                self._arrived += 1
                self.begin()
                if rest.experts and self._like is not None:  # of a host slot copies go out, and `empty` waits for them
                    self._layer.pool.use(rest.slots)
                if rest.experts:
                    yield Turn(rest, self._layer)
        finally:
            self.end()

    def _may_begin(self, candidate: int) -> bool:
        """Whether a wave's reads leave alone what is computed from now on before it."""
        if self._layer.memory.below.one_by_one and candidate > self._arrived:
            return False
        used = {slot for wave in self._waves[self._now : candidate] for slot in wave.slots}
        return used.isdisjoint(slot for _, slot in self._waves[candidate].loads)

    def _ask(self, wave: Wave) -> list[tuple[int, int, Arrival]]:
        """Ask for what is not in its slot."""
        layer, pool = self._layer, self._layer.pool
        begun: list[tuple[int, int, Arrival]] = []
        absent: dict[int, int] = {}
        for expert, slot in zip(wave.experts, wave.slots, strict=True):
            if pool.holds[slot] == (layer.index, expert):
                continue
            key, ticket = pool.coming.pop(slot, (None, None))
            if ticket is not None and key == (layer.index, expert):
                ticket.hurry()
                begun.append((expert, slot, ticket))
                continue
            if ticket is not None:
                ticket.settle()
            absent[expert] = slot
        if absent:
            arrivals = layer.ask(self._visit_of(absent), absent, urgent=True)
            begun += [(expert, slot, arrivals[expert]) for expert, slot in absent.items()]
        return begun

    def _visit_of(self, absent: dict[int, int]) -> Visit:
        """The same visit as the tier below sees it."""
        visit = self._visit
        counts = {expert: visit.experts[expert] for expert in absent}
        return Visit(visit.layer, counts, None if visit.last is None else tuple(e for e in visit.last if e in absent))

    def _there(self, begun: Sequence[tuple[int, int, Arrival]]) -> Generator[Turn, None, None]:
        """What comes from a tier with slots, in its slots."""
        delivery: Any = begun[0][2]
        turns, memory = delivery.there(), self._layer.memory
        while True:
            start = time.perf_counter()
            turn = next(turns, None)
            memory.seconds_waiting += time.perf_counter() - start
            if turn is None:
                return
            yield turn

    def _finish(self, begun: Sequence[tuple[int, int, Arrival]]) -> None:
        if not begun:
            return
        layer, start = self._layer, time.perf_counter()
        for expert, slot, arrival in begun:
            if (copy := arrival.wait()) is not None:
                layer.pool.copies[slot] = copy
            if self._like is None:
                layer.pool.unbiased.add(slot)
            else:
                layer.pool.set_bias(self._like, expert, slot)
            layer.pool.holds[slot] = (layer.index, expert)
            layer.memory.residents.arrived(layer.index, expert)
        layer.memory.seconds_waiting += time.perf_counter() - start

    def end(self) -> None:
        """All were computed, or a call broke off; then no expert counts as there that is not."""
        if self._ended:
            return
        layer, rest = self._layer, self._waves[self._arrived :]
        for expert, slot, arrival in (each for begun in self._begun[self._arrived :] for each in begun):
            if layer.pool.holds[slot] != (layer.index, expert):
                arrival.settle()
        if rest:
            layer.forget(rest)
        else:
            layer.memory.step_ended(layer.index)
        self._ended = True


def _without(wave: Wave, experts: Collection[int]) -> Wave:
    """What of a wave was not computed elsewhere."""
    kept = [(e, slot) for e, slot in zip(wave.experts, wave.slots, strict=True) if e not in experts]
    return Wave(tuple(e for e, _ in kept), tuple(slot for _, slot in kept), ())
