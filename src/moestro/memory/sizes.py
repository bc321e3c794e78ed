"""What the experts of a model need in bytes, and how a budget is cut into slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moestro.errors import invalid_input

LEAST_SLOTS = 2
"""Of a pool with more experts: one is read while another is computed."""


@dataclass(frozen=True)
class LayerSize:
    """One expert layer.

    Attributes:
        experts: how many it has, E.
        top_k: slots of a token, K.
        expert_bytes: of one expert in its slot: all projections and their scales.
        pool_key: layers share slots where this and `expert_bytes` are equal.
    """

    experts: int
    top_k: int
    expert_bytes: int
    pool_key: str = ""

    def __post_init__(self) -> None:
        if not (1 <= self.top_k <= self.experts and self.expert_bytes >= 1):
            raise invalid_input(
                "memory",
                got=f"a layer of {self.experts} experts, top-k {self.top_k}, {self.expert_bytes} bytes an expert",
                needs="1 <= top_k <= experts, and at least one byte",
                fix="Pass the sizes of a layer.",
            )


@dataclass(frozen=True)
class Pool:
    """Slots that some layers share.

    Attributes:
        layers: their indices, in execution order.
        expert_bytes: of a slot.
        experts: of all these layers together.
        least: the fewest slots that work.
        slots: how many there are.
    """

    layers: tuple[int, ...]
    expert_bytes: int
    experts: int
    least: int
    slots: int


def total_bytes(layers: Sequence[LayerSize]) -> int:
    """Of all experts."""
    return sum(layer.experts * layer.expert_bytes for layer in layers)


def cycle_bytes(layers: Sequence[LayerSize]) -> int:
    """Of one token cycle: the experts of one token in all layers."""
    return sum(layer.top_k * layer.expert_bytes for layer in layers)


def least_budget(layers: Sequence[LayerSize]) -> int:
    """The fewest bytes that work: of layers that share slots, the experts of one token in one layer."""
    return sum(pool.least * pool.expert_bytes for pool in _pools(layers))


def cut(operation: str, layers: Sequence[LayerSize], budget: int) -> tuple[Pool, ...]:
    """Pools whose slots together take at most a budget in bytes.

    Each has the least that works. The rest is shared in proportion to the bytes that each lacks for all of its experts.

    Raises:
        InvalidInputError: a budget below the least, or no layer.
    """
    pools = _pools(layers)
    least = least_budget(layers)
    if not layers or budget < least:
        raise invalid_input(
            operation,
            got=f"a budget of {budget:,} bytes for the experts of {len(layers)} layers",
            needs=f"at least {least:,} bytes: one token's experts in a layer" if layers else "at least one layer",
            fix=f"One token's experts in all layers are {cycle_bytes(layers):,} bytes; below that nearly all are read "
            "for every token.",
        )
    rest = budget - least
    lacking = [(pool.experts - pool.least) * pool.expert_bytes for pool in pools]
    whole = sum(lacking)
    more = [
        min(lacks, rest * lacks // whole if whole else 0) // p.expert_bytes
        for p, lacks in zip(pools, lacking, strict=True)
    ]
    rest -= sum(count * pool.expert_bytes for count, pool in zip(more, pools, strict=True))
    for i, pool in enumerate(pools):
        extra = min(rest // pool.expert_bytes, pool.experts - pool.least - more[i])
        more[i] += extra
        rest -= extra * pool.expert_bytes
    return tuple(
        Pool(pool.layers, pool.expert_bytes, pool.experts, pool.least, pool.least + count)
        for pool, count in zip(pools, more, strict=True)
    )


def _pools(layers: Sequence[LayerSize]) -> list[Pool]:
    """With the least that works, in the order of their first layers."""
    members: dict[tuple[int, str], list[int]] = {}
    for index, layer in enumerate(layers):
        members.setdefault((layer.expert_bytes, layer.pool_key), []).append(index)
    found = []
    for (expert_bytes, _), indices in members.items():
        experts = sum(layers[i].experts for i in indices)
        least = min(experts, max(LEAST_SLOTS, *(layers[i].top_k for i in indices)))
        found.append(Pool(tuple(indices), expert_bytes, experts, least, least))
    return found
