"""Timing variants against each other so that a machine whose speed drifts is fair to all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from math import gcd
from statistics import quantiles
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

FEWEST_SAMPLES = 5
FEWEST_SLOW_SAMPLES = 3
SLOW_ROUND_SECONDS = 20.0
"""From here on a round of all variants takes so long that `FEWEST_SLOW_SAMPLES` have to do."""
MOST_SAMPLES = 200
WARM_SECONDS = 0.1
"""Of a call on a CPU: a shorter one takes longer after another variant's than after some of its own."""
TURN_SECONDS = 0.05
"""How long a variant with such calls is called before one of them counts."""

T = TypeVar("T")
Call = Callable[[], object]
Timer = Callable[[Call], float]


@runtime_checkable
class OwnClock(Protocol):
    """A call that says itself how many seconds of it count."""

    def seconds(self) -> float: ...


MOST_SPREAD = 1.5
"""How many times the lower quartile of a ratio its upper one may be, for the ratio to be printed."""


class Ratio(NamedTuple):
    """How many times longer than a baseline: the median over rounds, and the quartiles around it."""

    low: float
    median: float
    high: float


def wall_clock(device: torch.device | str = "cpu") -> Timer:
    """A timer of one call in seconds, by a clock of its own if it has one (`OwnClock`); it waits for an accelerator."""
    device = torch.device(device)

    def synchronize() -> None:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)

    def seconds(call: Call) -> float:
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        return time.perf_counter() - start

    return lambda call: call.seconds() if isinstance(call, OwnClock) else seconds(call)


def warm_up(calls: Sequence[Call], i: int) -> None:
    """Call the others than call i in turn for `TURN_SECONDS`, at least one of them; call i itself where it is alone."""
    end, others = time.perf_counter() + TURN_SECONDS, max(len(calls) - 1, 1)
    for number in count():
        calls[i - 1 - number % others]()
        if time.perf_counter() >= end:
            return


def event_clock(device: torch.device | str, cold_bytes: int = 0, module: Any = torch.cuda) -> Timer:
    """A timer of one call in seconds between two events on a CUDA device, which is idle before the first.

    So what the host takes to launch counts where the device waits for it. With `cold_bytes` as many bytes are written
    before each call, so that the L2 cache holds nothing that the call reads. `module` is torch.cuda.
    """
    cold = torch.empty(cold_bytes, dtype=torch.uint8, device=device)

    def seconds(call: Call) -> float:
        cold.zero_()
        start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        module.synchronize(device)
        start.record()
        call()
        end.record()
        module.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3

    return lambda call: call.seconds() if isinstance(call, OwnClock) else seconds(call)


FIRST_DELAY, LONGEST_DELAY = 1 << 18, 1 << 21
"""Cycles that a device is busy with before a call: a tenth of a millisecond and more, and a millisecond and more."""


def queued_clock(device: torch.device | str, cold_bytes: int = 0, module: Any = torch.cuda) -> Timer:
    """As `event_clock`, but the device is busy with something else while the host launches the call.

    So what the host takes does not count. A call whose launches outlast the delay is timed again behind one of twice
    the length; one that waits for the device itself outlasts the longest, and is timed as it comes.
    """
    cold = torch.empty(cold_bytes, dtype=torch.uint8, device=device)
    delay = FIRST_DELAY

    def seconds(call: Call) -> float:
        nonlocal delay
        while True:
            module.synchronize(device)
            cold.zero_()
            start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
            module._sleep(delay)
            start.record()
            call()
            end.record()
            was_late = start.query()
            module.synchronize(device)
            if not was_late or delay >= LONGEST_DELAY:
                return float(start.elapsed_time(end)) / 1e3
            delay *= 2

    return lambda call: call.seconds() if isinstance(call, OwnClock) else seconds(call)


def cold_bytes(cache_bytes: int, weight_bytes: int) -> int:
    """Bytes to write between calls: twice the cache where it could hold a quarter of the weights, else none.

    Calls take turns over the experts, so of larger weights the cache holds little that the next call reads.
    """
    return 2 * cache_bytes if weight_bytes <= 4 * cache_bytes else 0


class Budget:
    """Seconds for a whole run, handed out evenly to the points that are left; `clock` is time.perf_counter."""

    def __init__(self, seconds: float | None, num_points: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._left = clock, num_points
        self._end = None if seconds is None else clock() + seconds

    def share(self, num_variants: int, most: float) -> float | None:
        """Seconds that each of the next point's variants may spend, `most` at most; None where none are left."""
        left, self._left = max(self._left, 1), self._left - 1
        if self._end is None:
            return most
        remaining = self._end - self._clock()
        return None if remaining <= 0 else min(most, remaining / left / max(num_variants, 1))

    @property
    def is_spent(self) -> bool:
        """Whether no point is to be begun any more."""
        return self._end is not None and self._clock() >= self._end

    def drop(self, num_points: int) -> None:
        """Take so many points that will not be asked for out of those that share what is left."""
        self._left -= num_points


def alternate(
    variants: Mapping[str, Sequence[T]],
    seconds: float,
    timer: Callable[[T], float],
    beside: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Time variants round-robin, in reversed order on odd rounds.

    Each variant brings one call per input, as many as the others. Consecutive calls, whoever makes them, take different
    inputs, and over twice as many rounds as there are inputs each variant meets each of them. A variant leaves when it
    spent its seconds and has enough samples, or after `MOST_SAMPLES`; sample r of every variant is from round r.
    `beside` has the seconds that each has spent so far beside those of its samples; it is read in each round.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    active = list(variants)
    num_inputs = min((len(calls) for calls in variants.values()), default=0)
    turn = round_number = 0
    fewest = FEWEST_SAMPLES
    collecting = gc.isenabled()
    gc.disable()
    try:
        while active:
            order = active if round_number % 2 == 0 else active[::-1]
            # With an even number of variants the reversed order would meet the same half of the inputs again.
            skip = 1 - len(active) % 2
            for place, name in enumerate(order):
                call = variants[name][(turn + place + skip * (round_number % 2)) % num_inputs]
                times[name].append(timer(call))
            turn += _stride(len(active) + skip, num_inputs)
            round_number += 1
            if round_number == 1:
                slow = sum(samples[0] for samples in times.values()) > SLOW_ROUND_SECONDS
                fewest = FEWEST_SLOW_SAMPLES if slow else FEWEST_SAMPLES
            active = [name for name in active if not _done(times[name], seconds - beside.get(name, 0.0), fewest)]
    finally:
        if collecting:
            gc.enable()
    return times


def _stride(least: int, num_inputs: int) -> int:
    """How far inputs move on in a round: coprime with their number, so that none is left out."""
    stride = least
    while gcd(stride, num_inputs) != 1:
        stride += 1
    return stride


def _done(samples: list[float], seconds: float, fewest: int) -> bool:
    return len(samples) >= MOST_SAMPLES or (len(samples) >= fewest and sum(samples) >= seconds)


def is_steady(low: float, high: float) -> bool:
    """Whether a ratio's quartiles are close enough for its median to say anything."""
    return high <= MOST_SPREAD * low


def ratio_text(middle: float, low: float, high: float) -> str:
    """A ratio with its quartiles; of one that is not steady the quartiles only."""
    quartiles = f"({low:.2f}-{high:.2f})"
    return f"{middle:.2f}x {quartiles}" if is_steady(low, high) else f"unsteady {quartiles}"


def ratio(times: list[float], baseline: list[float]) -> Ratio:
    """How many times longer than the baseline, over the rounds that both ran in; at least two."""
    return Ratio(*quantiles((t / b for t, b in zip(times, baseline, strict=False)), n=4, method="inclusive"))
