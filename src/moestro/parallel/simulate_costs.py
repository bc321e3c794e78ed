"""What a dispatch and an expert step cost, as formulas with measured figures of one published design."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class DispatchCost:
    """Microseconds of a multicast dispatch along a ring of rows, linear in the experts that a token has in its column.

    Each line is (microseconds for one expert, for each further one), by where the experts' rows lie: nearest to the
    token, spread evenly, farthest. The figures are those of the Tenstorrent DeepSeek-V3 design. Its table prints
    96.183 for two experts in the best case, which is its figure for the worst; the line's is 29.936.
    """

    best: tuple[float, float] = (26.868, 3.068)
    average: tuple[float, float] = (55.258, 11.4555)
    worst: tuple[float, float] = (88.238, 7.9455)

    def microseconds(self, num_experts: int) -> tuple[float, float, float]:
        """The best, average and worst case of `num_experts` >= 1 in a column."""
        first, second, third = (a + b * (num_experts - 1) for a, b in (self.best, self.average, self.worst))
        return first, second, third

    def at(self, num_experts: int, hops: float, distances: NDArray[np.int64]) -> float:
        """The cost between the three cases, by the mean number of hops from a token to its experts.

        Experts on every row have one case only, the average.

        Args:
            num_experts: on different rows of one column, at least 1.
            hops: their mean distance from the token.
            distances: hops from a row to every row, its own included.
        """
        rising = np.sort(distances)
        cases = self.microseconds(num_experts)
        known = [rising[:num_experts].mean(), rising.mean(), rising[-num_experts:].mean()]
        return float(np.interp(hops, known, cases)) if known[0] < known[2] else cases[1]


@dataclass(frozen=True)
class ComputeCost:
    """Microseconds of a rank's experts: a base, and a step for each further started block of rows of each expert.

    The figures are those of the Tenstorrent DeepSeek-V3 design. A rank without rows takes none.
    """

    base: float = 235.0
    step: float = 130.0
    block_size: int = 32

    def microseconds(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """For the rows of each expert, [..., experts of a rank] -> [...]."""
        further = np.maximum(-(-counts // self.block_size) - 1, 0).sum(-1)
        return np.where(counts.sum(-1) > 0, self.base + self.step * further, 0.0)
