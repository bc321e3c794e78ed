"""Coarse-to-fine routing: centroids of groups of experts first, logits of the best groups' experts only."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moestro.errors import invalid_input, unsupported
from moestro.routing.reports import RoutingCost
from moestro.routing.routers import TopKRouter, router_input
from moestro.routing.selection import best_indices, route
from moestro.types import Routing


class TwoStageRouter(nn.Module):
    """A router that looks at the experts of a token's best groups only.

    A group's centroid is the mean of its experts' weight rows (and of their biases); a token keeps the top_groups
    groups whose centroids give the largest logits, and the router's scoring runs on the experts of those. With
    top_groups equal to the number of groups the result is the plain router's. A softmax over all experts becomes one
    over the experts of the kept groups. Groups are walked one after the other, each with its own tokens, so the
    module is not traceable by torch.compile(fullgraph=True).

    Args:
        router: the plain router; its parameters are shared, not copied.
        groups: integer [G, E / G], each expert once; `similar_groups(router.weight, G)` makes one.
        top_groups: groups kept, 1..G.

    Raises:
        InvalidInputError: groups do not partition the experts, or the kept ones hold fewer than top_k.
        UnsupportedError: the router is itself limited to groups or has shared experts.
    """

    groups: Tensor

    def __init__(self, router: TopKRouter, groups: Tensor, top_groups: int) -> None:
        super().__init__()
        if router.groups is not None or router.scoring.shared_experts:
            raise unsupported(
                "TwoStageRouter",
                got=f"a router with {router.extra_repr()}",
                needs="one without GroupLimit and shared experts",
                fix="Use the router as it is.",
            )
        complete = groups.dim() == 2 and groups.flatten().sort().values.tolist() == list(range(router.num_experts))
        if not complete or not 1 <= top_groups <= len(groups) or top_groups * groups.shape[1] < router.top_k:
            raise invalid_input(
                "TwoStageRouter",
                got=f"groups {list(groups.shape)} of {router.num_experts} experts, top_groups={top_groups}",
                needs=f"[G, E / G] with every expert once, 1 <= top_groups <= G, room for top_k={router.top_k}",
                fix="similar_groups(router.weight, num_groups) makes groups.",
            )
        self.router = router
        self.num_experts = router.num_experts
        self.top_groups = top_groups
        self.register_buffer("groups", groups.long(), persistent=False)

    @property
    def cost(self) -> RoutingCost:
        """Multiply-adds a token, against the plain router's."""
        e, h = self.router.weight.shape
        return RoutingCost(self.groups.shape[0] * h, self.top_groups * self.groups.shape[1] * h, e * h)

    def forward(self, x: Tensor) -> Routing:
        """Route x [..., H] to a Routing [T, K]; errors as for `TopKRouter`."""
        router = self.router
        x = router_input(x, router.weight, "TwoStageRouter")
        weight = router.weight.to(x.dtype)[self.groups]
        bias = torch.zeros_like(weight[..., 0]) if router.bias is None else router.bias.to(x.dtype)[self.groups]
        with torch.autocast(x.device.type, enabled=False):
            kept = best_indices(x @ weight.mean(1).T + bias.mean(1), self.top_groups)
            blocks = x.new_full((len(x), self.top_groups, self.groups.shape[1]), -torch.inf)
            for g in range(len(self.groups)):
                tokens, place = (kept == g).nonzero(as_tuple=True)
                blocks = blocks.index_put((tokens, place), x[tokens] @ weight[g].T + bias[g])
        logits = blocks.flatten(1)
        columns = self.groups[kept].flatten(1)
        sparse = logits.new_full((len(x), router.num_experts), -torch.inf).scatter(1, columns, logits)
        return route(sparse, router.top_k, router.scoring, router.correction_bias)


def similar_groups(weight: Tensor, num_groups: int) -> Tensor:
    """Split experts into equal groups of similar routing directions: int64 [G, E / G], deterministic.

    Sets of experts are halved (as evenly as the number of groups allows) at the order of their projections onto the
    set's own first principal direction.

    Args:
        weight: [E, H], a router's.
        num_groups: G, divides E.

    Raises:
        InvalidInputError: E is not divisible by G.
    """
    if weight.dim() != 2 or num_groups < 1 or len(weight) % num_groups:
        raise invalid_input(
            "similar_groups",
            got=f"weight {list(weight.shape)}, num_groups={num_groups}",
            needs="[num_experts, hidden_size] with num_experts divisible by num_groups",
            fix="Choose a divisor of num_experts.",
        )
    rows = weight.detach().double().cpu()
    groups = _split(rows, torch.arange(len(rows)), num_groups)
    return torch.stack([g.sort().values for g in groups]).to(weight.device)


def _split(rows: Tensor, experts: Tensor, num_groups: int) -> list[Tensor]:
    if num_groups == 1:
        return [experts]
    centred = rows[experts] - rows[experts].mean(0)
    direction = torch.linalg.svd(centred, full_matrices=False).Vh[0]
    order = experts[(centred @ direction).sort(stable=True).indices]
    left = num_groups // 2
    cut = len(experts) // num_groups * left
    return _split(rows, order[:cut], left) + _split(rows, order[cut:], num_groups - left)
