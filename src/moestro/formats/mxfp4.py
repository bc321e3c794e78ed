"""mxfp4: e2m1 nibbles with one power of two a group of 32 (OCP Microscaling Formats specification 1.0)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from moestro.formats.base import Scaling, WeightFormat
from moestro.formats.codec import Bounds, Codec, Steps, as_steps
from moestro.formats.fp4 import encode_units, round_units

MXFP4 = WeightFormat("mxfp4", "e2m1", 4.25, torch.uint8, 2, Scaling(1, 32, (torch.uint8, torch.float8_e8m0fnu)))

_MOST = 252
"""6 times 2 ** (252 - 127) is the largest product that float32 holds."""


def _nearest(bounds: Bounds) -> Steps:
    """2 ** (floor(log2(amax)) - 2): the specification's section 6.3, 2 being the exponent of e2m1's largest value."""
    biased = bounds.amax.view(torch.int32) >> 23
    return as_steps((biased - 2).clamp_(0, _MOST).to(torch.uint8))


def _others(bounds: Bounds, nearest: Steps) -> Iterable[Steps]:
    """Twice as large: the power that lets nothing saturate. A smaller one never helped (docs/log.md)."""
    yield as_steps(torch.where(nearest.scales < _MOST, nearest.scales + 1, nearest.scales))


CODECS = {MXFP4: Codec(_nearest, _others, round_units, encode_units)}
