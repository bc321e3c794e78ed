"""The Transformers seam. Importing it registers ``experts_implementation="moestro"``.

    import moestro.hf
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moestro")

`accelerate` does the same for a model in hand, and for the families that interface does not reach.
"""

from __future__ import annotations

from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moestro.hf.attention_steps import served_steps
from moestro.hf.config import MoestroConfig
from moestro.hf.dense import served_projections
from moestro.hf.experts import serve
from moestro.hf.loading import load
from moestro.hf.low_precision import serve_fp8
from moestro.hf.quantization import register
from moestro.hf.serving import Served, accelerate, cut_experts, served
from moestro.parallel.rebalance import FINDERS

IMPLEMENTATION = "moestro"
"""The name under which Transformers finds the implementation."""

ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, serve)
ALL_FP8_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, serve_fp8)
register()
if cut_experts not in FINDERS:
    FINDERS.append(cut_experts)
try:
    from moestro.hf import expert_parallel
except ImportError:  # Transformers before 5.23
    pass
else:
    expert_parallel.register()

__all__ = [
    "IMPLEMENTATION",
    "MoestroConfig",
    "Served",
    "accelerate",
    "load",
    "serve",
    "served",
    "served_projections",
    "served_steps",
]
