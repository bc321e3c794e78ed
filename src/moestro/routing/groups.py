"""Which experts compete with which, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moestro.errors import invalid_input


@dataclass(frozen=True)
class GroupLimit:
    """Experts compete in groups first: only those of the best groups can be selected.

    Group g holds the experts g * E / num_groups onwards. A group's score is the sum of its `best` best scores.

    Attributes:
        num_groups: how many groups; divides num_experts.
        top_groups: how many of them a token may use.
        best: 2 for DeepSeek-V3, 1 (the maximum) for DeepSeek-V2.
        excluded: the score that experts of other groups get: -inf keeps them out. A few models have 0.0, which
            beats an expert whose score plus correction bias is negative.

    Raises:
        InvalidInputError: a value is out of range.
    """

    num_groups: int
    top_groups: int
    best: int = 2
    excluded: float = -torch.inf

    def __post_init__(self) -> None:
        if not (1 <= self.top_groups <= self.num_groups and self.best >= 1 and self.excluded <= 0):
            raise invalid_input(
                "GroupLimit",
                got=f"{self}",
                needs="1 <= top_groups <= num_groups, best >= 1 and excluded <= 0",
                fix="DeepSeek-V3 uses GroupLimit(num_groups=8, top_groups=4).",
            )

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises InvalidInputError unless E splits into the groups and the kept ones hold at least top_k experts."""
        size, rest = divmod(num_experts, self.num_groups)
        if rest or size * self.top_groups < top_k:
            raise invalid_input(
                "GroupLimit",
                got=f"num_experts={num_experts} and top_k={top_k} with {self}",
                needs="num_experts divisible by num_groups and top_k <= top_groups * num_experts / num_groups",
                fix="Change num_groups, or raise top_groups.",
            )
