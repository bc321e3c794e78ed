"""Step-3.x: an experts module with the interface's own signature, and a gate that clamps after the activation."""

from __future__ import annotations

from moestro.hf import experts
from moestro.hf.families.base import Adapter

STEP3P7 = Adapter(
    "Step-3.7",
    "Step3p7Experts",
    experts.inspect,
    experts.settle,
    experts.serve,
    "clamp after the activation",
    projections=experts.projections,
)
