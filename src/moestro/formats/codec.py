"""What a family of formats does differently when it encodes; the walk over a weight is the same for all.

A block is the weights that share a scale: blocks [B, M], what is known of each [B, 1]. A weight divided by its block's
step is in units; an element's encoding rounds units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.formats.elements import decode_e4m3, decode_e8m0, divided

LEAST_FLOAT32 = 2.0**-126
"""The smallest float32 that no processor flushes to zero."""
LEAST_FLOAT16 = 2.0**-24
MOST_FLOAT16 = 65504.0


@dataclass(frozen=True, eq=False)
class Bounds:
    """The least and the greatest weight of blocks, [B, 1] float32, or 0 where that lies outside of them.

    `unit` [] float32 is the factor of all scales, for formats with global scales.
    """

    low: Tensor
    high: Tensor
    unit: Tensor | None = None

    @property
    def amax(self) -> Tensor:
        """[B, 1]: the largest magnitude."""
        return torch.maximum(-self.low, self.high)


@dataclass(frozen=True, eq=False)
class Steps:
    """Scales of blocks [B, 1] as stored, and their values in float32, times the global one where there is one.

    `zeros` [B, 1] float32 are the codes that mean 0, for formats with zero points.
    """

    scales: Tensor
    step: Tensor
    zeros: Tensor | None = None

    @staticmethod
    def where(condition: Tensor, a: Steps, b: Steps) -> Steps:
        """a's where the condition [B, 1] holds, else b's."""
        zeros = None if a.zeros is None or b.zeros is None else torch.where(condition, a.zeros, b.zeros)
        scales = torch.where(condition, a.scales.view(_bits(a.scales)), b.scales.view(_bits(b.scales)))
        return Steps(scales.view(a.scales.dtype), torch.where(condition, a.step, b.step), zeros)


@dataclass(frozen=True)
class Codec:
    """How one family encodes.

    Attributes:
        nearest: the steps that the blocks' extremes ask for.
        others: further steps that an error search tries, given the nearest.
        round: blocks in units, and their steps -> the values in units that would be stored.
        encode: the same -> the codes, one item a weight.
    """

    nearest: Callable[[Bounds], Steps]
    others: Callable[[Bounds, Steps], Iterable[Steps]]
    round: Callable[[Tensor, Steps], Tensor]
    encode: Callable[[Tensor, Steps], Tensor]


def float32_steps(extent: Tensor, largest: float) -> Steps:
    """Scales extent / largest as float32, no smaller than its least normal number; largest times one is finite."""
    scales = divided(extent, largest).clamp_(min=LEAST_FLOAT32)
    return as_steps(torch.where((scales * largest).isinf(), torch.nextafter(scales, scales.new_zeros(())), scales))


def float16_steps(extent: Tensor, largest: float) -> Steps:
    """Scales extent / largest rounded up to float16, so that no block saturates; infinity beyond its range."""
    exact = divided(extent, largest).clamp_(min=LEAST_FLOAT16)
    scales = exact.to(torch.float16)
    return as_steps((scales.view(torch.int16) + (scales.to(torch.float32) < exact)).view(torch.float16))


def scaled(steps: Steps, factors: Sequence[float]) -> Iterable[Steps]:
    """The same scales times each factor, in their own dtype and within its range."""
    least, most = (
        (LEAST_FLOAT16, MOST_FLOAT16)
        if steps.scales.dtype == torch.float16
        else (LEAST_FLOAT32, torch.finfo(torch.float32).max)
    )
    for factor in factors:
        scales = (steps.step * factor).clamp_(least, most).to(steps.scales.dtype)
        yield Steps(scales, scales.to(torch.float32), steps.zeros)


def scaled_by(factors: Sequence[float]) -> Callable[[Bounds, Steps], Iterable[Steps]]:
    """The nearest scales times each factor, as a codec's `others`."""
    return lambda bounds, nearest: scaled(nearest, factors)


def as_steps(scales: Tensor, unit: Tensor | None = None) -> Steps:
    """The steps that stored scales [B, 1] stand for."""
    step = read_scales(scales)
    return Steps(scales, step if unit is None else step * unit)


def read_scales(scales: Tensor) -> Tensor:
    """Scales as stored -> float32; bytes are e8m0."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return decode_e8m0(scales)
    return decode_e4m3(scales) if scales.dtype == torch.float8_e4m3fn else scales.to(torch.float32)


def _bits(scales: Tensor) -> torch.dtype:
    """An integer dtype of the same size: torch.where is not made for every float8."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[scales.element_size()]
