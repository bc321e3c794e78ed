"""Where something else is faster than an instruction set of the engine that could run: measured, and never forced."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro import settings
from moestro.ops.expert_mlp import tuning
from moestro.ops.native import Isa
from moestro.types import Routing
from moestro.weights import ExpertWeights

_ANYWAY = "forced by name, or with torch.use_deterministic_algorithms, it runs"


def reason(isa: Isa, x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    """None, or the sentence why the next of the list is the better choice for this many rows.

    What this decides depends on the batch, and so do a token's bits then: an implementation that is forced, or
    `torch.use_deterministic_algorithms(True)`, takes one for every batch.
    """
    if settings.current().implementation is not None or torch.are_deterministic_algorithms_enabled():
        return None
    rows = routing.expert_ids.numel() / max(weights.planned_experts, 1)
    stored = {x.dtype, weights.gate_up.format.storage, weights.down.format.storage}
    if (
        stored == {torch.bfloat16}
        and not isa.multiplies_bfloat16
        and tuning.multiplies_bfloat16()
        and rows > tuning.BFLOAT16_ROWS
    ):
        return (
            f"this processor's bfloat16 instructions, which PyTorch uses and it does not, are faster from "
            f"{tuning.BFLOAT16_ROWS} rows an expert on ({rows:.0f} here); {_ANYWAY}"
        )
    columns = max(weights.hidden_size, weights.intermediate_size)
    if stored in ({torch.float32}, {torch.bfloat16}) and columns > tuning.WIDE_COLUMNS and rows > tuning.WIDE_ROWS:
        return (
            f"PyTorch's matmuls are faster from {tuning.WIDE_ROWS} rows an expert on ({rows:.0f} here) where it has "
            f"more than {tuning.WIDE_COLUMNS} columns ({columns}); {_ANYWAY}"
        )
    return None
