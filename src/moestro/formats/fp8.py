"""fp8: e4m3 bytes with one float32 scale a matrix, an output channel, or a block of 128 x 128."""

from __future__ import annotations

import torch

from moestro.formats.base import Scaling, WeightFormat
from moestro.formats.codec import Codec, float32_steps, scaled_by
from moestro.formats.elements import E4M3_LARGEST, encode_e4m3, round_e4m3

_SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


def _format(name: str, rows: int, columns: int) -> WeightFormat:
    bits = 8 + 32 / (rows * columns) if rows * columns else 8
    return WeightFormat(f"fp8-e4m3-{name}", "e4m3", bits, torch.float8_e4m3fn, scaling=Scaling(rows, columns, _SCALES))


_FACTORS = tuple(2 ** (i / 8) for i in range(1, 8))
"""Within a factor of two the scale decides where weights fall between the powers of two; beyond, all repeats."""

_CODEC = Codec(
    nearest=lambda bounds: float32_steps(bounds.amax, E4M3_LARGEST),
    others=scaled_by(_FACTORS),
    round=lambda units, steps: round_e4m3(units),
    encode=lambda units, steps: encode_e4m3(units),
)

CODECS = dict.fromkeys((_format("tensor", 0, 0), _format("channel", 1, 0), _format("b128", 128, 128)), _CODEC)
