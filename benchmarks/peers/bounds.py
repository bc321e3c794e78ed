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
"""How far the logits of one engine may be from another's, in relative L2 norm, on the same weights of a whole model.

It holds for checkpoints whose layers add little to what passes through them (`--branches 0.05` of
examples/make_checkpoint.py). On random weights of full size roundings turn choices of experts, and each turn costs a
token 0.1 to 0.3 in the next layer: two correct engines were 0.97 apart, where zeros are 1 off.
"""

OTHER_WEIGHTS = 0.1
"""As `WHOLE_MODEL`, where an engine rounds weights to a format of its own."""
