"""What was routed where: counts of a layer, exact, taken of its routings some time after they were used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.routing import expert_counts
from moestro.routing.balancing import selected
from moestro.types import Routing

MOST_KEPT = 2**18
"""Numbers that a layer keeps before they are counted."""


@dataclass(frozen=True)
class LayerLoad:
    """An expert layer in a profile. Rows are (token, expert) pairs that were computed.

    Attributes:
        name: in the model.
        top_k: K, the slots of a token.
        tokens: that it was given.
        loads: rows of each expert, [E].
        together: tokens that used both of two experts, [E][E]; on the diagonal those that used the one.
        dropped: slots that were empty: dropped over a capacity, pruned, or never filled.
        router_entropy: of the softmax over the router's logits, mean over tokens, bits; None where no logits were seen.
    """

    name: str
    top_k: int
    tokens: int
    loads: tuple[int, ...]
    together: tuple[tuple[int, ...], ...]
    dropped: int
    router_entropy: float | None

    @property
    def num_experts(self) -> int:
        return len(self.loads)

    @property
    def rows(self) -> int:
        """Of all experts."""
        return sum(self.loads)

    @property
    def imbalance(self) -> float:
        """The largest load over the mean; 1 where all are equal, E / K where all tokens use the same experts."""
        return max(self.loads) * self.num_experts / max(self.rows, 1)

    @property
    def unused(self) -> int:
        """Experts without a row."""
        return self.loads.count(0)

    @property
    def dropped_share(self) -> float:
        """Of all slots."""
        return self.dropped / max(self.dropped + self.rows, 1)

    def least_used(self, count: int = 1) -> tuple[int, ...]:
        """The experts with the fewest rows, those first."""
        return tuple(sorted(range(self.num_experts), key=lambda e: (self.loads[e], e))[:count])

    def pairs(self, count: int = 1) -> tuple[tuple[int, int, int], ...]:
        """The two experts that were used together most often, and by how many tokens; so many of them."""
        found = [(self.together[a][b], a, b) for a in range(self.num_experts) for b in range(a)]
        return tuple((b, a, tokens) for tokens, a, b in sorted(found, reverse=True)[:count] if tokens)


class LayerCounts:
    """Takes a layer's routings one by one."""

    def __init__(self, name: str, num_experts: int = 0) -> None:
        self.name = name
        self.num_experts = num_experts
        self._top_k, self._tokens, self._slots, self._kept = 0, 0, 0, 0
        self._ids: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._loads: Tensor | int = 0
        self._together: Tensor | int = 0
        self._entropy, self._scored = 0.0, 0

    def add(self, ids: Tensor, num_experts: int) -> None:
        """A routing's ids [T, K], to experts of that number."""
        if self._ids and ids.shape[1] != self._ids[-1].shape[1]:
            self.count()
        self.num_experts = num_experts
        self._ids.append(ids.detach().clone())
        self._grow(ids.numel())

    def add_logits(self, logits: Tensor) -> None:
        """A router's logits [T, E], or their softmax."""
        self._logits.append(logits.detach())
        self._grow(logits.numel())

    def count(self) -> None:
        """Take numbers of what is kept, and let go of it."""
        if self._ids:
            ids = torch.cat(self._ids)
            routing = Routing.unchecked(ids, ids, "output")
            used = selected(routing, self.num_experts).float()
            self._loads = self._loads + expert_counts(routing, self.num_experts)
            self._together = self._together + (used.T @ used).long()  # exact: fewer than 2^24 tokens
            self._top_k = ids.shape[1]
            self._tokens += len(ids)
            self._slots += ids.numel()
        if self._logits:
            found = entropies(torch.cat(self._logits))
            self._entropy += float(found.sum())
            self._scored += len(found)
        self._ids, self._logits, self._kept = [], [], 0

    def load(self) -> LayerLoad | None:
        """All so far; None where nothing was routed."""
        self.count()
        if not isinstance(self._loads, Tensor) or not isinstance(self._together, Tensor):
            return None
        loads = tuple(self._loads.tolist())
        return LayerLoad(
            name=self.name,
            top_k=self._top_k,
            tokens=self._tokens,
            loads=loads,
            together=tuple(map(tuple, self._together.tolist())),
            dropped=self._slots - sum(loads),
            router_entropy=self._entropy / self._scored if self._scored else None,
        )

    def _grow(self, numbers: int) -> None:
        self._kept += numbers
        if self._kept > MOST_KEPT:
            self.count()


def entropies(logits: Tensor) -> Tensor:
    """Of each token, bits [T]: of the softmax of logits [T, E], or of the probabilities that they are already."""
    values = logits.float()
    sums = values.sum(-1)
    if bool((values >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all()):
        shares = values
    else:
        shares = values.softmax(-1)
    return -torch.xlogy(shares, shares).sum(-1) / torch.log(torch.tensor(2.0))
