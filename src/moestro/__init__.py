"""moestro: run Mixture-of-Experts models. One primitive, `expert_mlp`; everything else rewrites its routing."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from moestro.errors import MoestroError
from moestro.experts import Experts
from moestro.explain import explain
from moestro.moe import FFN, MoE
from moestro.ops.expert_mlp import expert_mlp
from moestro.ops.grouping import block_schedule, group_by_expert
from moestro.ops.topk import topk
from moestro.routing import GroupLimitedRouter, Scoring, TopKRouter
from moestro.settings import use
from moestro.shared import SharedExperts
from moestro.types import Activation, Routing
from moestro.weights import ExpertWeights

if TYPE_CHECKING:
    from moestro.hf import accelerate, load
    from moestro.planning import plan
    from moestro.profiling import profile

__version__ = "0.1.0"

__all__ = [
    "FFN",
    "Activation",
    "ExpertWeights",
    "Experts",
    "GroupLimitedRouter",
    "MoE",
    "MoestroError",
    "Routing",
    "Scoring",
    "SharedExperts",
    "TopKRouter",
    "__version__",
    "accelerate",
    "block_schedule",
    "expert_mlp",
    "explain",
    "group_by_expert",
    "load",
    "plan",
    "profile",
    "topk",
    "use",
]


def __getattr__(name: str) -> Any:
    """`accelerate`, `load` and `plan` need Transformers, which `import moestro` does not; so `profile` may."""
    if name == "profile":
        from moestro.profiling import profile

        return profile
    if name == "plan":
        from moestro.planning import plan

        return plan
    if name in ("accelerate", "load"):
        from moestro import hf

        return getattr(hf, name)
    raise AttributeError(f"module 'moestro' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, and the submodules that were imported."""
    submodules = [name for name, value in globals().items() if isinstance(value, ModuleType)]
    return sorted({*__all__, *submodules, "__doc__", "__file__", "__name__", "__path__"})
