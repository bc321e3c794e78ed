"""What was routed where: counts of a layer, exact, taken of its routings some time after they were used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
        self._few: list[int] = []
        self._logits: list[Tensor] = []
        self._place: int | None = None
        self._early: list[Any] = []
        self._loads: Tensor | int = 0
        self._together: Tensor | int = 0
        self._entropy, self._scored = 0.0, 0

    def add(self, ids: Tensor, num_experts: int) -> int:
        """A routing's ids [T, K], to experts of that number; returns T."""
        tokens, top_k = ids.shape
        if top_k != self._top_k:
            self.count()
        self._top_k, self.num_experts = top_k, num_experts
        self._tokens += tokens
        self._kept += tokens * top_k
        if tokens == 1 and ids.is_cpu:
            self._few += ids.tolist()[0]  # a third of what a clone takes
        else:
            self._ids.append(ids.clone())
        return tokens

    def add_logits(self, logits: Tensor) -> None:
        """A router's logits [T, E], or their softmax."""
        self._logits.append(logits.detach() if logits.requires_grad else logits)
        self._kept += logits.numel()

    def take_logits(self, result: Any) -> None:
        """Those that a router of Transformers returns beside what it has chosen: the last that may be, after scores."""
        if isinstance(result, Routing) or result is None:
            return
        if not self.num_experts:
            self._early.append(result)  # until a call has told
            return
        outputs = result if isinstance(result, tuple) else (result,)
        if self._place is None:
            places = (i for i in reversed(range(len(outputs))) if _may_be_logits(outputs[i], self.num_experts))
            self._place = next(places, -1)
        if self._place >= 0:
            logits = outputs[self._place]
            self.add_logits(logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1]))

    def settle(self) -> None:
        """Count, if much is kept."""
        if self._early and self.num_experts:
            early, self._early = self._early, []
            for result in early:
                self.take_logits(result)
        if self._kept > MOST_KEPT:
            self.count()

    def count(self) -> None:
        """Take numbers of what is kept, and let go of it."""
        if self._few:
            self._ids.append(torch.tensor(self._few).view(-1, self._top_k))
        if self._ids:
            ids = torch.cat(self._ids)
            routing = Routing.unchecked(ids, ids, "output")
            used = selected(routing, self.num_experts).float()
            self._loads = self._loads + expert_counts(routing, self.num_experts)
            self._together = self._together + (used.T @ used).long()  # exact: fewer than 2^24 tokens
            self._slots += ids.numel()
        if self._logits:
            found = entropies(torch.cat(self._logits))
            self._entropy += float(found.sum())
            self._scored += len(found)
        self._ids, self._few, self._logits, self._kept = [], [], [], 0

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


def _may_be_logits(value: Any, num_experts: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1:] == (num_experts,)


def entropies(logits: Tensor) -> Tensor:
    """Of each token, bits [T]: of the softmax of logits [T, E], or of the probabilities that they are already."""
    values = logits.float()
    sums = values.sum(-1)
    if bool((values >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all()):
        shares = values
    else:
        shares = values.softmax(-1)
    return -torch.xlogy(shares, shares).sum(-1) / torch.log(torch.tensor(2.0))
