"""Routers, which make a Routing, and rewrites, which make another one of it."""

from moestro.routing.balancing import (
    BiasUpdate,
    balanced_bias,
    olmoe_balance_loss,
    router_z_loss,
    switch_balance_loss,
)
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
    "BiasUpdate",
    "DropReport",
    "GroupLimit",
    "GroupLimitedRouter",
    "RoutingChange",
    "RoutingCost",
    "Scoring",
    "TopKRouter",
    "TwoStageRouter",
    "balanced_bias",
    "drop_over_capacity",
    "expert_counts",
    "keep_confident",
    "keep_local",
    "merge_experts",
    "most_used",
    "olmoe_balance_loss",
    "prune_experts",
    "remap",
    "rescale",
    "route",
    "router_z_loss",
    "routing_change",
    "scale_experts",
    "similar_groups",
    "switch_balance_loss",
    "token_weight",
    "weigh",
]
