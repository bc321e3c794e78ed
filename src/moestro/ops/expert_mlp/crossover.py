"""Where something else is faster than an instruction set of the engine that could run: predicted from what was
measured on this machine, and never where the implementation was forced."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from moestro import settings
from moestro.formats import StoredExperts
from moestro.ops import measured
from moestro.ops.expert_mlp import costs, plain, tuning
from moestro.ops.native import Isa
from moestro.types import Routing
from moestro.weights import ExpertWeights

MARGIN = 0.9
"""PyTorch is chosen where its predicted time is below this share of the engine's: nearer ones may be errors."""


def wide_rows(isa: Isa, bind: costs.Bind, x: Tensor, weights: ExpertWeights) -> int:
    """Rows from which on the engine takes its kernels for many rows; 0: its own table says.

    They are tiles, eight rows of weights at once, or, where a set has neither, weights that are decoded once.
    """
    if not is_measured(x, weights):
        return 0
    both = (weights.gate_up, weights.down)
    return max(_costs(f"cpu-{isa.name}", bind, x, stored, weights).wide_rows for stored in both)


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
    """Seconds by implementation, of this set and of plain torch; empty where nothing is measured."""
    work = costs.Work.of(routing, weights)
    if not is_measured(x, weights) or not work.experts:
        return {}
    rate, found = costs.read_rate(), {}
    for name, way in ((f"cpu-{isa.name}", bind), (costs.PLAIN, bind_plain)):
        first, second = (_costs(name, way, x, stored, weights) for stored in (weights.gate_up, weights.down))
        found[name] = work.seconds(first, second, rate)
    return found


def is_measured(x: Tensor, weights: ExpertWeights) -> bool:
    """Whether what is measured decides a call."""
    return x.is_cpu and decides(weights.bytes_per_expert)


def decides(expert_bytes: int) -> bool:
    """Whether what is measured decides: of experts large enough to be worth it, where bits may depend on the batch."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    return measured.measures() and expert_bytes > tuning.SMALL_BYTES


def _costs(way: str, bind: costs.Bind, x: Tensor, stored: StoredExperts, weights: ExpertWeights) -> costs.Costs:
    columns = costs.columns_of(stored.num_columns)
    case = costs.Sample(x.dtype, stored.format.name, weights.input_format, columns, torch.get_num_threads())
    return costs.costs(way, bind, case)


def bind_plain(x: Tensor, routing: Routing, weights: ExpertWeights, wide: int) -> Callable[[], object]:
    """What computes samples with plain torch."""
    prepared = plain.prepare(x, routing, weights, "grouped")
    assert not isinstance(prepared, str), prepared
    return functools.partial(prepared.compute, x, routing, weights)
