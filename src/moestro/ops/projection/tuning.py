"""Up to how many rows the engine is faster than PyTorch's matmul (measured; docs/log.md)."""

from __future__ import annotations

import torch

from moestro import settings
from moestro.ops.native import Isa

TILED_ROWS, DOTTED_ROWS = 128, 4
"""With an instruction set that has a unit for tiles of bfloat16, and with any other."""


def slower(isa: Isa, num_rows: int, dtype: torch.dtype) -> str | None:
    """The sentence why PyTorch is the better choice for so many rows; None where it is not, or is not asked for."""
    if settings.current().implementation is not None or torch.are_deterministic_algorithms_enabled():
        return None
    most = TILED_ROWS if isa.has_tile_unit else DOTTED_ROWS
    if dtype == torch.float32:
        return "PyTorch's float32 matrix products read memory as fast; forced by name it runs"
    if num_rows > most:
        return f"PyTorch's matmul is faster from {most} rows on ({num_rows} here); forced by name it runs"
    return None
