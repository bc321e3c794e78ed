"""How far the outputs of other engines may be off, which choose stored weights and round rows in ways of their own."""

from __future__ import annotations

QUANTISED = {8: 0.1, 4: 0.35}
"""How far a token's output may be off in relative L2 norm where others chose the stored weights, by bits of a weight.

On normal weights the formats themselves cost 0.014 to 0.05 in 8 bits and 0.13 to 0.27 in 4; an expert that is left
out of eight costs a token about 0.35, halves that are swapped more than 1.
"""

INT4_ROWS = 0.45
"""As `QUANTISED`, for int4 with one scale a row, which costs 0.25 to 0.31."""

WHOLE_MODEL = 1.0
"""How far the logits of one engine may be from another's, in relative L2 norm, on the same weights of a whole model.

Zeros are 1 off, another model's logits 1.4. On random weights roundings turn choices of experts, and each turn costs a
token 0.1 to 0.3 in the next layer; where none is turned, the logits of two layers are 0.0004 (rows of floats) to 0.01
(rows of 8 bits) apart.
"""
