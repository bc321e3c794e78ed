"""Placements that give every rank the same load: which experts get replicas, and which rank holds what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.parallel import balance_search as search
from moestro.parallel import eplb
from moestro.parallel.balance_search import Floats, Ints, State
from moestro.parallel.eplb import Eplb
from moestro.parallel.placement import Placement


@dataclass(frozen=True)
class Balanced:
    """The default policy: the least load on the slowest rank, and few moves from one placement to the next.

    Replicas go to the experts with the most load a replica, slots are filled from the heaviest, and the slowest rank
    then exchanges experts with others while that helps. Up to 256 slots times experts every placement is searched
    through, within 5,000 steps. No rank holds an expert twice; a slot that nothing else can use stays empty.

    Attributes:
        num_groups: of experts with successive ids, each kept on one node (group-limited routing sends a token to few).
        num_nodes: of successive ranks, among which groups are divided evenly.
        hysteresis: how far from the best placement the slowest rank may be before anything moves: 0.02 is 2 %.
        max_moves: at most so many experts come to a rank that did not hold them; None for no limit.
    """

    num_groups: int = 1
    num_nodes: int = 1
    hysteresis: float = 0.02
    max_moves: int | None = None


@dataclass(frozen=True)
class Move:
    """One expert that a rank has to receive, and a rank that held it before."""

    expert: int
    source: int
    rank: int


def balance(
    loads: Tensor | Sequence[float],
    num_ranks: int,
    num_slots: int | None = None,
    policy: Balanced | Eplb = Balanced(),
    previous: Placement | None = None,
) -> Placement:
    """Place experts on ranks so that each has the same load.

    Args:
        loads: [E], at least 0: rows of each expert (`routing.expert_counts`), or any measure in proportion to them.
            Without any load every expert counts as much as another.
        num_ranks: ranks.
        num_slots: experts that all ranks hold together; what exceeds E becomes replicas. Else E, rounded up to as many
            on each rank; or as many as `previous` has.
        policy: `Balanced`, or `Eplb` for the published algorithm.
        previous: the placement that is in use. It is kept while its slowest rank is within the policy's hysteresis
            of the best; else experts move until it is, or until max_moves are spent.

    Raises:
        InvalidInputError: loads that are no finite numbers of at least 0, fewer slots than experts, groups or nodes
            that do not divide experts, ranks and slots, a previous placement of other sizes or with the policy `Eplb`.
    """
    weights = _checked(loads)
    if num_slots is None and num_ranks >= 1:
        num_slots = -(-len(weights) // num_ranks) * num_ranks if previous is None else previous.num_slots
    if num_ranks < 1 or num_slots is None or num_slots < len(weights):
        raise invalid_input(
            "balance",
            got=f"{len(weights)} experts, num_ranks={num_ranks}, num_slots={num_slots}",
            needs="at least one rank, and a slot for every expert",
            fix="Leave num_slots out for as many as are needed.",
        )
    if previous is not None:
        _check_previous(previous, search.empty_slots(num_slots, num_ranks), len(weights), policy)
    if isinstance(policy, Eplb):
        slots = eplb.place(weights.astype(np.float32), num_slots, num_ranks, policy)
        return Placement.from_slots(slots, len(weights), num_ranks)
    return _balanced(weights, search.empty_slots(num_slots, num_ranks), policy, previous)


def balance_layers(
    loads: Tensor | Sequence[Sequence[float]],
    num_ranks: int,
    num_slots: int | None = None,
    policy: Balanced | Eplb = Balanced(),
    previous: Sequence[Placement] | None = None,
) -> tuple[Placement, ...]:
    """`balance` for each layer's loads [L, E]; max_moves of the policy is a layer's.

    Raises:
        InvalidInputError: as `balance`, or not as many previous placements as layers.
    """
    layers = list(loads)
    if previous is not None and len(previous) != len(layers):
        raise invalid_input(
            "balance_layers",
            got=f"loads of {len(layers)} layers and {len(previous)} previous placements",
            needs="one for each layer",
            fix="Give what the last call returned.",
        )
    before: Sequence[Placement | None] = previous or [None] * len(layers)
    return tuple(balance(layer, num_ranks, num_slots, policy, old) for layer, old in zip(layers, before, strict=True))


def rank_loads(loads: Tensor | Sequence[float], placement: Placement) -> Tensor:
    """The load of each rank, float64 [ranks], where every replica of an expert has the same share of the expert's [E].

    Raises:
        InvalidInputError: not a load of at least 0 for each expert.
    """
    weights = _checked(loads, placement.num_experts)
    share = torch.from_numpy(weights / np.array(placement.counts))
    return torch.stack([share[list(row)].sum() for row in placement.experts])


def imbalance(loads: Tensor | Sequence[float], placement: Placement) -> float:
    """The load of the slowest rank over the mean of all; 1.0 without any load."""
    ranks = rank_loads(loads, placement)
    mean = float(ranks.mean())
    return float(ranks.max()) / mean if mean > 0 else 1.0


def moves(before: Placement, after: Placement) -> tuple[Move, ...]:
    """What ranks have to receive to get from one placement to another. Sources take turns among an expert's ranks.

    Raises:
        InvalidInputError: the placements have other numbers of ranks or experts.
    """
    sizes = [(placement.num_experts, placement.num_ranks) for placement in (before, after)]
    if sizes[0] != sizes[1]:
        raise invalid_input(
            "moves",
            got="{} experts on {} ranks, then {} on {}".format(*sizes[0], *sizes[1]),
            needs="the same experts and ranks",
            fix="Place the experts anew.",
        )
    holders: dict[int, list[int]] = {}
    for rank, row in enumerate(before.experts):
        for expert in dict.fromkeys(row):
            holders.setdefault(expert, []).append(rank)
    taken = dict.fromkeys(holders, 0)
    found = []
    for rank, row in enumerate(after.experts):
        for expert in dict.fromkeys(row):
            if rank not in holders[expert]:
                source = holders[expert][taken[expert] % len(holders[expert])]
                taken[expert] += 1
                found.append(Move(expert, source, rank))
    return tuple(found)


def _balanced(loads: Floats, slots: Ints, policy: Balanced, previous: Placement | None) -> Placement:
    best = _planned(loads, slots, policy)
    if previous is None:
        return _placement(best)
    now = State.of(loads, _slots_of(previous, slots))
    wanted = best.slowest * (1 + policy.hysteresis)
    if now.slowest <= wanted:
        return previous
    found = _improved(now, wanted, policy)
    if found.slowest <= wanted or policy.max_moves is not None:
        return _placement(found)
    return _placement(_relabelled(best, now, policy.num_nodes))


def _planned(loads: Floats, slots: Ints, policy: Balanced) -> State:
    """A placement from nothing; with nodes, each node's from the groups of experts that it was given."""
    nodes, groups, num_ranks = policy.num_nodes, policy.num_groups, len(slots)
    sizes = (len(loads) % max(groups, 1), groups % max(nodes, 1), num_ranks % max(nodes, 1), int((slots == -2).sum()))
    limits = 0 <= policy.hysteresis < float("inf") and (policy.max_moves is None or policy.max_moves >= 0)
    if nodes < 1 or groups < 1 or not limits or (nodes > 1 and any(sizes)):
        raise invalid_input(
            "balance",
            got=f"{policy} for {len(loads)} experts on {num_ranks} ranks of {slots.shape[1]} slots",
            needs="limits of at least 0, groups that divide the experts, nodes that divide groups, ranks and slots",
            fix="num_groups=1 and num_nodes=1 place every expert anywhere.",
        )
    if nodes == 1:
        return search.plan(loads, slots)
    of_group = loads.reshape(groups, -1).sum(1)
    by_node = search.plan(of_group, np.full((nodes, groups // nodes), -1)).slots
    experts = np.arange(len(loads)).reshape(groups, -1)
    parts = []
    for own, part in zip(by_node, np.split(slots, nodes), strict=True):
        ids = experts[np.sort(own)].reshape(-1)
        found = search.plan(loads[ids], part).slots
        parts.append(np.where(found >= 0, ids[np.maximum(found, 0)], found))
    return State.of(loads, np.concatenate(parts))


def _improved(now: State, wanted: float, policy: Balanced) -> State:
    """Experts exchanged among the ranks of each node, slowest node first, within the budget of all."""
    left, each = policy.max_moves, len(now.slots) // policy.num_nodes
    slots = now.slots.copy()
    for node in np.argsort(-now.ranks.reshape(policy.num_nodes, each).max(1), kind="stable"):
        part = slice(node * each, (node + 1) * each)
        ids = np.unique(slots[part][slots[part] >= 0])
        local = np.where(slots[part] >= 0, np.searchsorted(ids, slots[part]), slots[part])
        found = search.improve(State.of(now.loads[ids], local), wanted, left).slots
        changed = np.where(found >= 0, ids[np.maximum(found, 0)], found)
        left = None if left is None else left - int((changed != slots[part]).sum())
        slots[part] = changed
    return State.of(now.loads, slots)


def _placement(state: State) -> Placement:
    return Placement(len(state.loads), tuple(tuple(int(e) for e in row if e >= 0) for row in state.slots))


def _slots_of(placement: Placement, slots: Ints) -> Ints:
    """A placement's experts in slots as they are now; of an expert that a rank holds twice, once."""
    made = slots.copy()
    for row, experts in zip(made, placement.experts, strict=True):
        own = list(dict.fromkeys(experts))
        row[: len(own)] = own
    return made


def _relabelled(best: State, now: State, num_nodes: int) -> State:
    """The same rows for other ranks of their node, so that many experts stay on their rank, and there in their slot."""
    each = len(now.slots) // num_nodes
    slots = best.slots.copy()
    for first in range(0, len(slots), each):
        part = slice(first, first + each)
        common = best.held[part].astype(np.int64) @ now.held[part].T.astype(np.int64)
        room = (best.slots[part] != -2).sum(1)[:, None] == (now.slots[part] != -2).sum(1)[None, :]
        common = np.where(room, common, -1)
        for _ in range(each):
            row, rank = np.unravel_index(int(common.argmax()), common.shape)
            slots[first + rank] = _in_place(now.slots[first + rank], best.slots[first + row])
            common[row, :] = common[:, rank] = -2
    return State.of(best.loads, slots)


def _in_place(before: Ints, after: Ints) -> Ints:
    """The experts of a row in another order: those that were there keep their slots."""
    kept = np.isin(before, after) & (before >= 0)
    made = np.where(kept | (before == -2), before, -1)
    new = after[(after >= 0) & ~np.isin(after, before)]
    made[np.flatnonzero(made == -1)[: len(new)]] = new
    return made


def _checked(loads: Tensor | Sequence[float], num_experts: int | None = None) -> Floats:
    found = np.asarray(torch.as_tensor(loads).detach().cpu().double(), np.float64)
    fits = found.ndim == 1 and len(found) > 0 and (num_experts is None or len(found) == num_experts)
    if not fits or not np.isfinite(found).all() or (found < 0).any():
        low = f" with {found.min() if np.isfinite(found).all() else 'NaN or infinity'}" if found.size else ""
        raise invalid_input(
            "balance",
            got=f"loads {list(found.shape)}{low}",
            needs=f"finite numbers of at least 0, [{'num_experts' if num_experts is None else num_experts}]",
            fix="Count rows with moestro.routing.expert_counts.",
        )
    return found


def _check_previous(previous: Placement, slots: Ints, num_experts: int, policy: Balanced | Eplb) -> None:
    fits = isinstance(policy, Balanced) and (previous.num_experts, previous.num_ranks) == (num_experts, len(slots))
    room = (slots == -1).sum(1)
    fits = fits and all(len(row) <= n for row, n in zip(previous.experts, room, strict=True))
    if fits and policy.num_nodes > 1 and policy.num_groups > 0 and num_experts % policy.num_groups == 0:
        group, node = num_experts // policy.num_groups, max(1, len(slots) // policy.num_nodes)
        pairs = {(expert // group, rank // node) for rank, row in enumerate(previous.experts) for expert in row}
        fits = len(pairs) == policy.num_groups
    if not fits:
        raise invalid_input(
            "balance",
            got=f"a previous placement of {previous.num_experts} experts on {previous.num_ranks} ranks, for "
            f"{num_experts} experts in {int(room.sum())} slots on {len(slots)} ranks by {policy}",
            needs="the same experts and ranks, room for what each rank holds, each group on one node, and Balanced",
            fix="Leave previous out to place the experts anew.",
        )
