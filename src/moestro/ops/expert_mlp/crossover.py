"""Where something else is faster than an instruction set of the engine that could run: predicted from what was
measured on this machine, and never where the implementation was forced."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from moestro import settings
from moestro.ops import measured
from moestro.ops.expert_mlp import costs, plain, tuning
from moestro.ops.native import Isa
from moestro.types import Routing
from moestro.weights import ExpertWeights

MARGIN = 0.9
"""PyTorch is chosen where its predicted time is below this share of the engine's: nearer ones may be errors."""


def wide_rows(isa: Isa, bind: costs.Bind, x: Tensor, weights: ExpertWeights) -> int:
    """Rows from which on the engine takes its kernels for many rows; 0: its own table says.

    They are tiles, eight rows of weights at once, or, where a set has neither, weights that are decoded once and, for
    many rows, outer products.
    """
    if not is_measured(x, weights):
        return 0
    both = _both_costs(f"cpu-{isa.name}", bind, x, weights)
    return max(each.wide_rows for each in both) if all(each.calm for each in both) else 0


def reason(isa: Isa, bind: costs.Bind, x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    """None, or the sentence why plain torch is the better choice for this many rows than any set of the engine.

    `isa` is the best set that can compute the call; lesser ones are not measured.

    What this decides depends on the batch, and so do a token's bits then: an implementation that is forced, or
    `torch.use_deterministic_algorithms(True)`, takes one for every batch.
    """
    if settings.current().implementation is not None:
        return None
    found = predictions(isa, bind, x, routing, weights)
    if not found or found["torch"] >= MARGIN * found[f"cpu-{isa.name}"]:
        return None
    return (
        f"PyTorch's matmuls are predicted to take {1e3 * found['torch']:.2f} ms and cpu-{isa.name} "
        f"{1e3 * found[f'cpu-{isa.name}']:.2f}; forced by name, or with torch.use_deterministic_algorithms, it runs"
    )


def predictions(isa: Isa, bind: costs.Bind, x: Tensor, routing: Routing, weights: ExpertWeights) -> dict[str, float]:
    """Seconds by implementation, of this set and of plain torch; empty where nothing is measured, or `too_busy`."""
    work = costs.Work.of(routing, weights)
    if not is_measured(x, weights) or not work.experts or too_busy(isa, bind, x, routing, weights):
        return {}
    rate = costs.read_rate()
    ways = (f"cpu-{isa.name}", bind), (costs.PLAIN, bind_plain)
    return {name: work.seconds(*_both_costs(name, way, x, weights), rate) for name, way in ways}


def too_busy(isa: Isa, bind: costs.Bind, x: Tensor, routing: Routing, weights: ExpertWeights) -> bool:
    """Whether threads waited for cores while this process measured what predicts the call, so that nothing does."""
    if not is_measured(x, weights) or not costs.Work.of(routing, weights).experts:
        return False
    ways = (f"cpu-{isa.name}", bind), (costs.PLAIN, bind_plain)
    return not (costs.read_is_calm() and all(c.calm for way in ways for c in _both_costs(*way, x, weights)))


def is_measured(x: Tensor, weights: ExpertWeights) -> bool:
    """Whether what is measured decides a call."""
    return x.is_cpu and decides(weights.bytes_per_expert)


def decides(expert_bytes: int) -> bool:
    """Whether what is measured decides: of experts large enough to be worth it, where bits may depend on the batch."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    return measured.measures() and expert_bytes > tuning.SMALL_BYTES


def _both_costs(way: str, bind: costs.Bind, x: Tensor, weights: ExpertWeights) -> tuple[costs.Costs, costs.Costs]:
    """At the columns of gate_up and at those of down."""
    given, threads = weights.input_format, torch.get_num_threads()
    stored = ((each.format.name, costs.columns_of(each.num_columns)) for each in (weights.gate_up, weights.down))
    first, second = (costs.Sample(x.dtype, form, given, n, threads) for form, n in stored)
    return costs.costs(way, bind, first), costs.costs(way, bind, second)


def bind_plain(x: Tensor, routing: Routing, weights: ExpertWeights, wide: int) -> Callable[[], object]:
    """What computes samples with plain torch."""
    prepared = plain.prepare(x, routing, weights, "grouped")
    assert not isinstance(prepared, str), prepared
    return functools.partial(prepared.compute, x, routing, weights)
