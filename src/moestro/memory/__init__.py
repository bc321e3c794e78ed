"""Experts in less memory than they need: which stay, where each is, what a recorded run would have read."""

from moestro.memory.budget import DeviceMemory, MemoryBudget
from moestro.memory.policy import (
    POLICIES,
    Belady,
    Expected,
    LayerLfu,
    Lfu,
    Lru,
    Pinned,
    Policy,
    Visit,
    policy_named,
    visit_of,
)
from moestro.memory.replay import Replayed, compare, ladder, replay
from moestro.memory.residents import Counts, Residents, Wave
from moestro.memory.sizes import LayerSize, Pool, cycle_bytes, least_budget, total_bytes
from moestro.memory.trace import Recorder, Trace, merged, read_trace

__all__ = [
    "POLICIES",
    "Belady",
    "Counts",
    "DeviceMemory",
    "Expected",
    "LayerLfu",
    "LayerSize",
    "Lfu",
    "Lru",
    "MemoryBudget",
    "Pinned",
    "Policy",
    "Pool",
    "Recorder",
    "Replayed",
    "Residents",
    "Trace",
    "Visit",
    "Wave",
    "compare",
    "cycle_bytes",
    "ladder",
    "least_budget",
    "merged",
    "policy_named",
    "read_trace",
    "replay",
    "total_bytes",
    "visit_of",
]
