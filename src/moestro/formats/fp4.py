"""fp4: e2m1 nibbles with one 16-bit scale a group of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.formats.base import Scaling, WeightFormat
from moestro.formats.codec import Codec, Steps, float16_steps, scaled_by
from moestro.formats.elements import E2M1_LARGEST, encode_e2m1, round_e2m1

FP4 = tuple(
    WeightFormat(f"fp4-g{g}", "e2m1", 4 + 16 / g, torch.uint8, 2, Scaling(1, g, (torch.float16, torch.bfloat16)))
    for g in (32, 64, 128)
)

_FACTORS = (0.85, 0.9, 0.925, 0.95, 0.975, 1.025, 1.075, 1.35, 1.4, 1.5, 1.575)
"""Those that helped most on weights of normal and Student-t distribution (docs/log.md); 1.5 maps the largest to 4."""


def round_units(units: Tensor, steps: Steps) -> Tensor:
    """Units -> the nearest e2m1 values; what every codec of this element has in common."""
    return round_e2m1(units)


def encode_units(units: Tensor, steps: Steps) -> Tensor:
    """Units -> e2m1 codes."""
    return encode_e2m1(units)


_CODEC = Codec(
    nearest=lambda bounds: float16_steps(bounds.amax, E2M1_LARGEST),
    others=scaled_by(_FACTORS),
    round=round_units,
    encode=encode_units,
)

CODECS = dict.fromkeys(FP4, _CODEC)
