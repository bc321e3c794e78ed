"""How far the outputs of other engines may be off, which choose stored weights and round rows in ways of their own."""

from __future__ import annotations

QUANTISED = {8: 0.1, 4: 0.35}
"""How far a token's output may be off in relative L2 norm where others chose the stored weights, by bits of a weight.

On normal weights the formats themselves cost 0.014 to 0.05 in 8 bits and 0.13 to 0.27 in 4; an expert that is left
out of eight costs a token about 0.35, halves that are swapped more than 1.
"""

INT4_ROWS = 0.45
"""As `QUANTISED`, for int4 with one scale a row, which costs 0.25 to 0.31."""

WHOLE_MODEL = 2e-2
"""How far a whole model's logits may be from those of the same stored weights with all else in float32, in relative L2
norm.

It holds for checkpoints whose layers add little to what passes through them, and whose routers give the last of the
chosen experts little weight (`--branches 0.05 --routers 4` of examples/make_checkpoint.py). On random weights of full
size roundings turn choices of experts, and each turn costs a token 0.1 to 0.3 in the next layer: two correct engines
were 0.97 apart, where zeros are 1 off.
"""

OTHER_WEIGHTS = 0.1
"""As `WHOLE_MODEL`, where an engine rounds weights to a format of its own."""


def whole_model(num_layers: int, stream: str) -> float:
    """`WHOLE_MODEL` for an engine that keeps what passes through the layers in the dtype `stream`.

    Both additions of a layer round it. Roundings are independent, so n of them are off by at most about sqrt(n) unit
    roundoffs (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019); bfloat16's is 2^-8.
    """
    return max(WHOLE_MODEL, 2.0**-8 * (2 * num_layers) ** 0.5) if stream == "bfloat16" else WHOLE_MODEL
