"""Where the experts of a checkpoint come from."""

from __future__ import annotations

from dataclasses import dataclass

from moestro.formats import StoredExperts


@dataclass(frozen=True, eq=False)
class ExpertSource:
    """One projection of one layer's experts, as a checkpoint stores it.

    Attributes:
        target: the full name of its parameter in the Transformers model ("model.layers.0.mlp.experts.gate_up_proj").
        stored: its experts in the logical layout [E, N, K], memory-mapped; rows of gate_up in the model's own order.
        names: the tensors of the checkpoint that it is made of, which quantising replaces.
    """

    target: str
    stored: StoredExperts
    names: tuple[str, ...]
