"""Up to how many rows the engine is faster than PyTorch's matmul: measured on the machine at hand."""

from __future__ import annotations

import torch

from moestro import settings
from moestro.ops.measured import measures
from moestro.ops.native import Isa
from moestro.ops.projection import measured

TILED_ROWS, DOTTED_ROWS = 128, 4
"""With an instruction set that has a unit for tiles of bfloat16, and with any other: where nothing may be measured."""

MEASURED = "measured on this machine"


def slower(isa: Isa, num_rows: int, dtype: torch.dtype, engine: measured.Multiply) -> str | None:
    """The sentence why PyTorch is the better choice for so many rows; None where it is not, or is not asked for.

    `engine` multiplies rows by a matrix with this instruction set.
    """
    if settings.current().implementation is not None or torch.are_deterministic_algorithms_enabled():
        return None
    if dtype == torch.float32:
        return "PyTorch's float32 matrix products read memory as fast; forced by name it runs"
    most, how = TILED_ROWS if isa.has_tile_unit else DOTTED_ROWS, "where nothing is measured"
    if measures():
        found = measured.most_rows(isa.name, dtype, torch.get_num_threads(), engine)
        most, how = (most, "as threads waited for cores when it was measured") if found is None else (found, MEASURED)
    if num_rows > most:
        verb = "is faster" if how == MEASURED else "runs"
        return f"PyTorch's matmul {verb} beyond {most} rows ({num_rows} here), {how}; forced by name this one runs"
    return None
