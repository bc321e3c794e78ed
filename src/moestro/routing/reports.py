"""What the rewrites report: small records, tensors inside, numbers on request."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moestro.types import register_pytree


@dataclass(frozen=True, eq=False)
class DropReport:
    """What `drop_over_capacity` dropped. Reading a number synchronises with the device; holding the report does not.

    Attributes:
        dropped: int64 [E], rows dropped at each expert.
        routed: int64 [E], rows that were routed to each expert.
        capacity: rows that an expert may keep.
    """

    dropped: Tensor
    routed: Tensor
    capacity: int

    @property
    def total(self) -> int:
        """All rows dropped."""
        return int(self.dropped.sum())

    @property
    def share(self) -> float:
        """Rows dropped, of the rows routed; 0 if there were none."""
        return self.total / max(int(self.routed.sum()), 1)

    def __str__(self) -> str:
        full = int((self.dropped > 0).sum())
        return (
            f"dropped {self.total} of {int(self.routed.sum())} rows ({self.share:.1%}) "
            f"at {full} of {len(self.dropped)} experts, capacity {self.capacity}"
        )


@dataclass(frozen=True)
class RoutingChange:
    """How far a routing is from another of the same tokens; what `routing_change` measures.

    Attributes:
        tokens: T.
        tokens_changed: tokens that lost or gained an expert.
        slots: used (token, expert) pairs before.
        slots_lost: those of them that are gone.
        slots_after: used pairs after.
        mass_lost: share of the routing weight before that its expert no longer has, 0..1 for weights >= 0.
    """

    tokens: int
    tokens_changed: int
    slots: int
    slots_lost: int
    slots_after: int
    mass_lost: float

    @property
    def share_lost(self) -> float:
        """Slots lost, of the slots used before."""
        return self.slots_lost / max(self.slots, 1)

    @property
    def compute(self) -> float:
        """Rows computed after, relative to before."""
        return self.slots_after / max(self.slots, 1)

    def __str__(self) -> str:
        return (
            f"{self.slots_lost} of {self.slots} slots lost ({self.share_lost:.1%}), {self.mass_lost:.1%} of the "
            f"routing weight; {self.tokens_changed} of {self.tokens} tokens changed; "
            f"{self.compute:.1%} of the rows computed"
        )


@dataclass(frozen=True)
class RoutingCost:
    """Multiply-adds that choosing experts takes a token: on the centroids (G * H) and on the experts of kept groups.

    `plain` is what the plain router takes, E * H.
    """

    coarse: int
    fine: int
    plain: int

    @property
    def ratio(self) -> float:
        """Two-stage over plain; above 1 two stages cost more than they save."""
        return (self.coarse + self.fine) / self.plain

    def __str__(self) -> str:
        return (
            f"{self.coarse + self.fine} multiply-adds a token ({self.coarse} coarse + {self.fine} fine), "
            f"{self.ratio:.1%} of the plain router's {self.plain}"
        )


register_pytree(DropReport)
