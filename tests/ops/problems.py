"""Hostile inputs for the layer: what every implementation and strategy is run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from moestro import Activation, ExpertWeights, Routing
from moestro.types import GPT_OSS_SWIGLU

ACTIVATIONS = (
    Activation(),
    Activation(interleaved=True),
    Activation("silu", gated=False),
    Activation("gelu"),
    Activation("gelu-tanh", gated=False),
    Activation("relu"),
    Activation("relu2", gated=False),
    Activation("sigmoid"),
    Activation("tanh", gated=False),
    Activation("identity"),
    Activation("silu", limit=2.0),
    Activation("silu", gated=False, limit=0.5, alpha=1.5),
    GPT_OSS_SWIGLU,
)


@dataclass(frozen=True)
class Sizes:
    """T, H, I, E, K of one problem."""

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


def weights(
    sizes: Sizes, activation: Activation, dtype: torch.dtype, *, bias: bool = False, transposed: bool = False
) -> ExpertWeights:
    """Random experts; `transposed` ones are views of matrices stored the other way round."""
    e, h, i = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
    n = 2 * i if activation.gated else i
    gate_up, down = torch.randn(e, n, h) * h**-0.5, torch.randn(e, h, i) * i**-0.5
    if transposed:
        gate_up, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (gate_up, down))
    biases = (torch.randn(e, n).to(dtype), torch.randn(e, h).to(dtype)) if bias else (None, None)
    return ExpertWeights.from_dense(gate_up.to(dtype), down.to(dtype), *biases, activation)


def routing(sizes: Sizes, *, kind: str = "random", weight_on: str = "output") -> Routing:
    """A routing of one kind; empty slots carry NaN weights, which nobody may read.

    random: distinct experts, a third of the slots empty; skewed: expert 0 for everyone; empty: no slot used;
    duplicates: any experts, the same one twice included; full: distinct experts, no slot empty.
    """
    t, e, k = sizes.num_tokens, sizes.num_experts, sizes.top_k
    ids = torch.rand(t, e).argsort(1)[:, :k]
    if kind == "duplicates":
        ids = torch.randint(0, e, (t, k))
    elif kind == "skewed":
        ids = torch.full((t, k), -1)
        ids[:, 0] = 0
    elif kind == "empty":
        ids = torch.full((t, k), -1)
    if kind in ("random", "duplicates"):
        ids = ids.masked_fill(torch.rand(t, k) < 0.3, -1)
    w = torch.rand(t, k).masked_fill(ids < 0, torch.nan)
    return Routing(ids, w, weight_on)  # type: ignore[arg-type]


KINDS = ("random", "skewed", "empty", "duplicates", "full")


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Small sizes off every tile and vector width; K up to E, E from 1, T from 0."""
    num_experts = draw(st.integers(1, 9))
    return Sizes(
        num_tokens=draw(st.sampled_from((0, 1, 2, 3, 5, 17, 40))),
        hidden_size=draw(st.sampled_from((1, 3, 8, 17, 33))),
        intermediate_size=draw(st.sampled_from((1, 2, 7, 16, 31))),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
    )
