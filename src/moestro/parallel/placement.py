"""Which rank holds which experts, and which replica of an expert computes which token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.types import EMPTY, Routing


@dataclass(frozen=True)
class Placement:
    """The experts of every rank, by their global ids, in the order of their local ids.

    Ranks may hold different numbers of experts, or none. An expert that several ranks hold has replicas, which are
    counted from the lowest rank. A placement is plain numbers: it can be compared, hashed and written as JSON.

    Attributes:
        num_experts: E.
        experts: a row for each rank; local id i of rank r is expert ``experts[r][i]``.

    Raises:
        InvalidInputError: there is no rank, an id lies outside 0..E-1, or an expert has no rank.
    """

    num_experts: int
    experts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        rows = tuple(tuple(int(expert) for expert in row) for row in self.experts)
        object.__setattr__(self, "experts", rows)
        held = {expert for row in rows for expert in row}
        outside = sorted(held - set(range(self.num_experts)))
        missing = sorted(set(range(self.num_experts)) - held)
        if not rows or outside or missing or self.num_experts < 1:
            wrong = [f"unknown ids {outside[:3]}"] if outside else []
            wrong += [f"no rank for experts {missing[:3]}"] if missing else []
            raise invalid_input(
                "Placement",
                got=" and ".join([f"{self.num_experts} experts over {len(rows)} ranks", *wrong]),
                needs=f"every id of 0..{self.num_experts - 1} on at least one rank, and no other",
                fix="Placement.contiguous places each expert once; balance adds replicas.",
            )

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> Placement:
        """Each expert once, in ranges of ids: the first ``E % ranks`` ranks hold one expert more than the others.

        Raises:
            InvalidInputError: a number below 1.
        """
        if num_experts < 1 or num_ranks < 1:
            raise invalid_input(
                "Placement.contiguous",
                got=f"num_experts={num_experts}, num_ranks={num_ranks}",
                needs="both at least 1",
                fix="A rank may hold no expert, but there is one rank and one expert.",
            )
        share, more = divmod(num_experts, num_ranks)
        ends = [share * (rank + 1) + min(rank + 1, more) for rank in range(num_ranks)]
        return cls(num_experts, tuple(tuple(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)))

    @classmethod
    def from_slots(cls, slots: Sequence[int], num_experts: int, num_ranks: int) -> Placement:
        """From one list of all slots, rank by rank, as many on each; -1 is a slot without an expert.

        Raises:
            InvalidInputError: the slots cannot be divided among the ranks, or an expert has none.
        """
        if num_ranks < 1 or len(slots) % num_ranks:
            raise invalid_input(
                "Placement.from_slots",
                got=f"{len(slots)} slots and {num_ranks} ranks",
                needs="as many slots on every rank",
                fix="Fill up with -1.",
            )
        each = len(slots) // num_ranks
        rows = (slots[rank * each : (rank + 1) * each] for rank in range(num_ranks))
        return cls(num_experts, tuple(tuple(expert for expert in row if expert != EMPTY) for row in rows))

    @property
    def num_ranks(self) -> int:
        return len(self.experts)

    @property
    def num_slots(self) -> int:
        """Experts held by all ranks together, replicas counted."""
        return sum(map(len, self.experts))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of replicas of each expert, [E]."""
        found = Counter(expert for row in self.experts for expert in row)
        return tuple(found[expert] for expert in range(self.num_experts))

    def locate(self, expert_ids: Tensor, first_token: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Where each pair is computed.

        Token number t computes expert e on replica ``(t + e) % counts[e]``: the choice depends on that number and on
        nothing else, so every rank comes to the same one without asking another.

        Dispatchers and `simulate` number the tokens of rank r from r on: ranks that each have one token share the
        replicas as well as the tokens of one rank do, and no rank has to know how many tokens others have.

        Args:
            expert_ids: integer [T, K] (or [T, ...]) of global ids.
            first_token: the number of the first token, from which the others go on; or the numbers of all, [T].

        Returns:
            ranks and local ids, int64 and of the same shape; both are -1 where the slot is empty or the id unknown.
        """
        counts, ranks, local = self._tables(expert_ids.device)
        used = (expert_ids >= 0) & (expert_ids < self.num_experts)
        ids = torch.where(used, expert_ids, 0).long()
        tokens = first_token
        if not isinstance(tokens, Tensor):
            tokens = torch.arange(tokens, tokens + ids.shape[0], device=ids.device)
        replica = (tokens.view(-1, *[1] * (ids.dim() - 1)) + ids) % counts[ids]
        return tuple(torch.where(used, table[ids, replica], EMPTY) for table in (ranks, local))  # type: ignore[return-value]

    def local_routing(self, routing: Routing, rank: int, first_token: int = 0) -> Routing:
        """What one rank computes of a routing of all tokens: its pairs with local ids, every other slot empty.

        The outputs of all ranks add up to the whole layer's.

        Raises:
            InvalidInputError: there is no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise invalid_input(
                "Placement.local_routing",
                got=f"rank={rank}",
                needs=f"a rank of 0..{self.num_ranks - 1}",
                fix="Place the experts over as many ranks as there are.",
            )
        ranks, local = self.locate(routing.expert_ids, first_token)
        return routing.with_ids(torch.where(ranks == rank, local, EMPTY).to(routing.expert_ids.dtype))

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Replica counts [E], and rank and local id of every replica, both [E, most replicas], on a device."""
        kept = self._kept_tables
        if device not in kept:
            kept[device] = tuple(table.to(device) for table in self._host_tables)  # type: ignore[assignment]
        return kept[device]

    @cached_property
    def _kept_tables(self) -> dict[torch.device, tuple[Tensor, Tensor, Tensor]]:
        return {}

    @cached_property
    def _host_tables(self) -> tuple[Tensor, Tensor, Tensor]:
        where: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for rank, row in enumerate(self.experts):
            for local, expert in enumerate(row):
                where[expert].append((rank, local))
        width = max(self.counts)
        filled = torch.tensor([found + [(EMPTY, EMPTY)] * (width - len(found)) for found in where])
        return torch.tensor(self.counts), filled[..., 0].contiguous(), filled[..., 1].contiguous()
