"""nvfp4: e2m1 nibbles with one e4m3 scale a group of 16, and one float32 for all of these."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from moestro.formats.base import Scaling, WeightFormat
from moestro.formats.codec import Bounds, Codec, Steps, as_steps
from moestro.formats.elements import E2M1_LARGEST, E4M3_LARGEST, encode_e4m3
from moestro.formats.fp4 import encode_units, round_units

NVFP4 = WeightFormat("nvfp4", "e2m1", 4.5, torch.uint8, 2, Scaling(1, 16, (torch.float8_e4m3fn,), global_scales=True))

LARGEST = E2M1_LARGEST * E4M3_LARGEST
"""The largest element times the largest scale: what a matrix's largest weight is in units of its global scale."""

_LEAST = 2.0**-9
_CHANGES = (-2, -1, 1, 2, 3, 4, 5)


def _nearest(bounds: Bounds) -> Steps:
    assert bounds.unit is not None
    return as_steps(encode_e4m3((bounds.amax / E2M1_LARGEST / bounds.unit).clamp_(min=_LEAST)), bounds.unit)


def _others(bounds: Bounds, nearest: Steps) -> Iterable[Steps]:
    """The scales whose codes lie next to the nearest's; codes of positive numbers are in order."""
    codes = nearest.scales.view(torch.uint8).to(torch.int16)
    for change in _CHANGES:
        scales = (codes + change).clamp_(1, 0x7E).to(torch.uint8).view(torch.float8_e4m3fn)
        yield as_steps(scales, bounds.unit)


CODECS = {NVFP4: Codec(_nearest, _others, round_units, encode_units)}
