"""What of a model beside its experts the engine computes."""

from __future__ import annotations

from torch import nn

from moestro.hf.attention import serve_attention
from moestro.hf.attention_steps import serve_attention_steps
from moestro.hf.dense import serve_projections
from moestro.hf.norms import serve_norms
from moestro.hf.router_steps import serve_router_steps


def serve_beside(model: nn.Module, projections: str) -> None:
    """Serve what is beside the experts of `model`, in place: linear modules as `projections` says, attention, and where
    linear modules may be served also norms, and attention of one token and routers as wholes."""
    serve_projections(model, projections)
    serve_attention(model)
    if projections != "torch":
        serve_norms(model)
        serve_attention_steps(model)
        serve_router_steps(model)
