"""The Transformers seam. Importing it registers ``experts_implementation="moestro"``.

    import moestro.hf
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moestro")

`accelerate` does the same for a model in hand, and for the families that interface does not reach.
"""

from __future__ import annotations

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moestro.hf.accelerate import Served, accelerate, served
from moestro.hf.experts import serve

IMPLEMENTATION = "moestro"
"""The name under which Transformers finds the implementation."""

ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, serve)

__all__ = ["IMPLEMENTATION", "Served", "accelerate", "serve", "served"]
