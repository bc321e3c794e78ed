"""The published expert-parallel load balancer (EPLB, DeepSeek), slot for slot.

Source of the algorithm: github.com/deepseek-ai/EPLB. Computed in float32, as there; where loads are equal the smaller
index goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.errors import invalid_input

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Eplb:
    """The published policy: replicate the heaviest experts, then pack heavy with light.

    It may put two replicas of one expert on one rank, and gives all spare slots of a layer without load to expert 0.

    Attributes:
        num_groups: of experts with successive ids, each kept on one node (group-limited routing sends a token to few).
        num_nodes: of successive ranks. Where it does not divide num_groups, groups and nodes are ignored.
    """

    num_groups: int = 1
    num_nodes: int = 1


def place(loads: Floats, num_slots: int, num_ranks: int, policy: Eplb) -> list[int]:
    """The expert of every slot, [num_slots], rank by rank, for the loads [E] of one layer.

    Raises:
        InvalidInputError: sizes that do not divide each other.
    """
    nested = policy.num_nodes >= 1 and policy.num_groups % policy.num_nodes == 0
    groups, nodes = (policy.num_groups, policy.num_nodes) if nested else (1, 1)
    num_experts = len(loads)
    if groups < 1 or num_experts % groups or num_ranks % nodes or num_slots % num_ranks or num_slots < num_experts:
        raise invalid_input(
            "balance",
            got=f"{num_experts} experts in {groups} groups, {num_slots} slots on {num_ranks} ranks of {nodes} nodes",
            needs="groups that divide the experts, nodes that divide the ranks, and as many slots on every rank",
            fix="The default policy needs none of it.",
        )
    size = num_experts // groups
    node_of_group, place_of_group = _pack(loads.reshape(groups, size).sum(1), nodes)
    order = np.lexsort((place_of_group, node_of_group))
    experts = (order[:, None] * size + np.arange(size)).reshape(nodes, -1)  # of each node
    found: list[int] = []
    for own in experts:
        slots, counts = _replicate(loads[own], num_slots // nodes)
        rank, place_on_rank = _pack((loads[own] / counts)[slots], num_ranks // nodes)
        found += own[slots[np.lexsort((place_on_rank, rank))]].tolist()
    return found


def _pack(weights: Floats, num_packs: int) -> tuple[Ints, Ints]:
    """Items into packs of as many each, from the heaviest to the lightest pack with room. Packs, and places in them."""
    each = len(weights) // num_packs
    if each == 1:
        return np.arange(num_packs), np.zeros(num_packs, np.int64)
    pack, place_in_pack = np.zeros(len(weights), np.int64), np.zeros(len(weights), np.int64)
    sums, items = np.zeros(num_packs, np.float32), np.zeros(num_packs, np.int64)
    for item in np.argsort(-weights, kind="stable"):
        chosen = int(np.where(items < each, sums, np.inf).argmin())
        pack[item], place_in_pack[item] = chosen, items[chosen]
        sums[chosen] += weights[item]
        items[chosen] += 1
    return pack, place_in_pack


def _replicate(loads: Floats, num_slots: int) -> tuple[Ints, Floats]:
    """A slot for each expert, each further one for that with the most load a replica. Experts, replica counts."""
    counts = np.ones(len(loads), np.float32)
    slots = list(range(len(loads)))
    for _ in range(num_slots - len(loads)):
        heaviest = int((loads / counts).argmax())
        slots.append(heaviest)
        counts[heaviest] += 1
    return np.array(slots), counts
