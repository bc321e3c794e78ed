"""Routers, which make a Routing, and rewrites, which make another one of it."""

from moestro.routing.change import routing_change
from moestro.routing.groups import GroupLimit
from moestro.routing.merge import merge_experts
from moestro.routing.reports import DropReport, RoutingChange, RoutingCost
from moestro.routing.rewrites import (
    drop_over_capacity,
    expert_counts,
    keep_confident,
    keep_local,
    most_used,
    prune_experts,
    remap,
    rescale,
    scale_experts,
    token_weight,
)
from moestro.routing.routers import GroupLimitedRouter, TopKRouter
from moestro.routing.scoring import PRESETS, Scoring
from moestro.routing.selection import route, weigh
from moestro.routing.two_stage import TwoStageRouter, similar_groups

__all__ = [
    "PRESETS",
    "DropReport",
    "GroupLimit",
    "GroupLimitedRouter",
    "RoutingChange",
    "RoutingCost",
    "Scoring",
    "TopKRouter",
    "TwoStageRouter",
    "drop_over_capacity",
    "expert_counts",
    "keep_confident",
    "keep_local",
    "merge_experts",
    "most_used",
    "prune_experts",
    "remap",
    "rescale",
    "route",
    "routing_change",
    "scale_experts",
    "similar_groups",
    "token_weight",
    "weigh",
]
