"""How much a rewrite changed: the first number to look at before looking at a model's quality."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.routing.reports import RoutingChange
from moestro.types import EMPTY, Routing


def routing_change(before: Routing, after: Routing) -> RoutingChange:
    """Compare two routings of the same tokens, expert by expert; the order of slots does not matter.

    The numbers say what the layer no longer computes, not what that does to a model: measure that (held-out
    likelihood) with the rewrite on and off. Ids must mean the same experts in both: compare before a `remap` or
    `keep_local`, or rename `before` the same way.

    Args:
        before: [T, K].
        after: [T, K'].

    Raises:
        InvalidInputError: the numbers of tokens differ.
    """
    if before.num_tokens != after.num_tokens:
        raise invalid_input(
            "routing_change",
            got=f"{before.num_tokens} and {after.num_tokens} tokens",
            needs="two routings of the same tokens",
            fix="Route one batch twice.",
        )
    with torch.no_grad():
        old, new = _expert_weights(before, before), _expert_weights(before, after)
        used = _first_use(before)
        used_after = _first_use(after)
        held = _present(before, after)
        lost = used & ~held
        gained = used_after & ~_present(after, before)
        magnitude = old.abs().masked_fill(~used, 0.0)
        loss = (old - new).masked_fill(~used, 0.0) * old.sign()
        total = float(magnitude.sum())
        return RoutingChange(
            tokens=before.num_tokens,
            tokens_changed=int((lost.any(-1) | gained.any(-1)).sum()),
            slots=int(used.sum()),
            slots_lost=int(lost.sum()),
            slots_after=int(used_after.sum()),
            mass_lost=float(loss.clamp(min=0).sum()) / total if total else 0.0,
        )


def _same(a: Routing, b: Routing) -> Tensor:
    """[T, Ka, Kb]: whether slot i of a and slot j of b name the same expert; empty slots name none."""
    return (a.expert_ids[:, :, None] == b.expert_ids[:, None, :]) & (a.expert_ids != EMPTY)[:, :, None]


def _expert_weights(slots: Routing, routing: Routing) -> Tensor:
    """[T, K]: the whole weight that `routing` gives to the expert in each slot of `slots`."""
    weights = routing.routing_weights.double()[:, None, :]
    return torch.where(_same(slots, routing), weights, 0.0).sum(-1)


def _present(slots: Routing, routing: Routing) -> Tensor:
    return _same(slots, routing).any(-1)


def _first_use(routing: Routing) -> Tensor:
    """[T, K]: slots in use whose expert no earlier slot of the token names."""
    earlier = torch.ones(routing.top_k, routing.top_k, dtype=torch.bool, device=routing.expert_ids.device).tril(-1)
    return (routing.expert_ids != EMPTY) & ~(_same(routing, routing) & earlier).any(-1)
