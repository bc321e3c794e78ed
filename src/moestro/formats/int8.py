"""int8: signed bytes with one scale an output channel."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.formats.base import Scaling, WeightFormat
from moestro.formats.codec import Codec, Steps, float32_steps, scaled_by

INT8 = WeightFormat(
    "int8", "int8", 8, torch.int8, scaling=Scaling(1, 0, (torch.float32, torch.float16, torch.bfloat16))
)

_LARGEST = 127
_FACTORS = (0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 0.92, 0.9)


def _round(units: Tensor, steps: Steps) -> Tensor:
    return units.round().clamp_(-_LARGEST, _LARGEST)


CODECS = {
    INT8: Codec(
        nearest=lambda bounds: float32_steps(bounds.amax, _LARGEST),
        others=scaled_by(_FACTORS),
        round=_round,
        encode=lambda units, steps: _round(units, steps).to(torch.int8),
    )
}
