"""int4: nibbles with one float16 scale a group of a row, symmetric or with a zero point."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from moestro.formats.base import Scaling, WeightFormat
from moestro.formats.codec import Bounds, Codec, Steps, as_steps, float16_steps, scaled

GROUPS = (32, 64, 128)
_SCALES = (torch.float16, torch.bfloat16, torch.float32)

INT4 = tuple(WeightFormat(f"int4-g{g}", "int4", 4 + 16 / g, torch.uint8, 2, Scaling(1, g, _SCALES)) for g in GROUPS)
INT4_ZP = tuple(
    WeightFormat(f"int4-g{g}-zp", "uint4", 4 + 24 / g, torch.uint8, 2, Scaling(1, g, _SCALES, zeros=True))
    for g in GROUPS
)

_FACTORS = (0.7, 0.75, 0.8, 0.825, 0.85, 0.875, 0.9, 0.95)
"""Those that helped most on weights of normal and Student-t distribution (docs/log.md)."""
_ZERO_FACTORS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72, 0.68)


def _others(bounds: Bounds, nearest: Steps) -> Iterable[Steps]:
    """Scales of the sign that gives the largest weight the code -8, which has no positive counterpart."""
    downwards = bounds.high > -bounds.low
    for steps in scaled(nearest, _FACTORS):
        yield as_steps(torch.where(downwards, -steps.scales, steps.scales))


def _round(units: Tensor, steps: Steps) -> Tensor:
    return units.round().clamp_(-8, 7)


def _nearest_zp(bounds: Bounds) -> Steps:
    steps = float16_steps(bounds.high - bounds.low, 15)
    return replace(steps, zeros=(-bounds.low / steps.step).round_())


def _others_zp(bounds: Bounds, nearest: Steps) -> Iterable[Steps]:
    """Narrower ranges about the same centre."""
    for steps in scaled(nearest, _ZERO_FACTORS):
        yield replace(steps, zeros=(7.5 - 0.5 * (bounds.low + bounds.high) / steps.step).round_().clamp_(0, 15))


def _encode_zp(units: Tensor, steps: Steps) -> Tensor:
    assert steps.zeros is not None
    return units.round().add_(steps.zeros).clamp_(0, 15)


def _round_zp(units: Tensor, steps: Steps) -> Tensor:
    assert steps.zeros is not None
    return _encode_zp(units, steps).sub_(steps.zeros)


_SYMMETRIC = Codec(
    nearest=lambda bounds: float16_steps(bounds.amax, 7),
    others=_others,
    round=_round,
    encode=lambda units, steps: _round(units, steps).to(torch.int8),
)
_WITH_ZERO = Codec(
    nearest=_nearest_zp,
    others=_others_zp,
    round=_round_zp,
    encode=lambda units, steps: _encode_zp(units, steps).to(torch.uint8),
)

CODECS = {**dict.fromkeys(INT4, _SYMMETRIC), **dict.fromkeys(INT4_ZP, _WITH_ZERO)}
