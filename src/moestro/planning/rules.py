"""Rules of thumb of a published guide, "MoE architecture deep dive" of AWS Neuron's NxD Inference, as functions.

They need no more than sizes and a machine's two rates, and say what to try first where nothing can be measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024)
ALPHA = 0.8
"""Of experts, by as many slots as which a decoding batch computes all of them; the guide says 0.8 to 1."""
FEW_EXPERTS, MANY_EXPERTS = 32, 64
LEAST_COLUMNS = 128
"""Of the intermediate size on one rank, so that a matrix unit is filled."""


def num_blocks(num_tokens: int, top_k: int, num_experts: int, block_size: int) -> int:
    """Blocks that hold the slots of any routing: those of full blocks, and for each expert but one a last, started one.

    With one slot a token this is the guide's example: 2,000 tokens, 8 experts and blocks of 256 make 15.
    """
    slots = num_tokens * top_k
    return math.ceil(slots / block_size) + min(num_experts, slots) - 1 if slots else 0


def intensity(num_tokens: int, top_k: int, num_experts: int, block_size: int) -> float:
    """FLOP for each byte of 16-bit weights, the guide's AIF: block_size * num_blocks / num_experts."""
    return block_size * num_blocks(num_tokens, top_k, num_experts, block_size) / num_experts


def block_size(
    num_tokens: int, top_k: int, num_experts: int, balance: float, sizes: Sequence[int] = BLOCK_SIZES
) -> int:
    """The smallest block at which products, not reading, bound a prompt: intensity of at least the machine's balance.

    Where none reaches it, the largest. `balance` is FLOP per byte.
    """
    found = (size for size in sizes if intensity(num_tokens, top_k, num_experts, size) >= balance)
    return next(found, max(sizes))


def strategy(num_tokens: int, top_k: int, num_experts: int, alpha: float = ALPHA) -> str:
    """How a decoding batch is computed: "selective", each slot's expert, or "all_experts" from alpha * E slots on."""
    return "all_experts" if num_tokens * top_k >= alpha * num_experts else "selective"


def prefers(num_experts: int, intermediate_size: int, ranks: int) -> str:
    """How experts are cut over ranks: "tp" slices of each, "ep" whole ones, or "both".

    Few experts are cut in slices, many are given out whole. Between them, slices as long as they fill a matrix unit.
    """
    wide = intermediate_size // ranks >= LEAST_COLUMNS
    if num_experts <= FEW_EXPERTS:
        return "tp" if wide else "both"
    if num_experts >= MANY_EXPERTS:
        return "ep" if ranks <= num_experts else "both"
    return "tp" if wide else "ep"
