"""moestro: run Mixture-of-Experts models. One primitive, `expert_mlp`; everything else rewrites its routing."""

from __future__ import annotations

from moestro.errors import MoestroError
from moestro.ops.expert_mlp import expert_mlp
from moestro.ops.grouping import block_schedule, group_by_expert
from moestro.ops.topk import topk
from moestro.settings import use
from moestro.types import Activation, Routing
from moestro.weights import ExpertWeights

__version__ = "0.1.0"
