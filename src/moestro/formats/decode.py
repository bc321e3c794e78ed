"""From stored weights back to floating point, a panel of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.formats.base import PackedTensor, WeightFormat
from moestro.formats.codec import read_scales
from moestro.formats.elements import decode_e4m3, write_e4m3, write_nibbles

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_PANEL = 1 << 18
"""Weights converted at a time: 1 MiB of float32, which stays in cache (docs/log.md)."""


def dequantize(packed: PackedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights as an ordinary tensor.

    A weight's value is computed in float32 as docs/reference/formats.md defines it for each format, and rounded to
    `dtype` once. What `dtype` cannot hold becomes infinity, as everywhere in torch; float32 and bfloat16 hold whatever
    `quantize` writes.

    Args:
        packed: [N, K] or [E, N, K] in any format, on any device.
        dtype: float32, bfloat16, float16 or float64.

    Returns:
        [N, K] or [E, N, K] of `dtype`. Dense weights that have it already are returned as they are. Beside the result
        a few MiB are used.

    Raises:
        InvalidInputError: `dtype` is none of the four.
    """
    if dtype not in DTYPES:
        raise invalid_input(
            "dequantize",
            got=f"dtype={dtype}",
            needs="float32, bfloat16, float16 or float64",
            fix="Convert the result further with .to(dtype).",
        )
    if packed.format.is_dense:
        return packed.data.to(dtype)
    out = torch.empty(packed.shape, dtype=dtype, device=packed.device)
    if out.numel() and not out.is_meta:
        with torch.no_grad():
            if out.dim() == 2:
                _write(packed, out)
            else:
                for e in range(out.shape[0]):
                    _write(packed[e], out[e])
    return out


INTEGERS = ("int8", "int4", "uint4", "e2m1")
"""Elements whose values, or twice their values, are integers."""


def integers(matrix: PackedTensor) -> tuple[Tensor, Tensor]:
    """A matrix [N, K] as integers and what each of them counts: their product is what `dequantize` returns.

    Float32 [N, K] of whole numbers between -255 and 127 (zero points subtracted; of e2m1 twice the value), and float32
    [N, K / group] (one column for a scale a row). The format's element has to be in `INTEGERS`.
    """
    values = torch.empty(matrix.shape, dtype=torch.float32, device=matrix.device)
    steps = _write_codes(matrix, values)
    if matrix.format.element == "e2m1":
        values, steps = values.mul_(2.0), steps * 0.5
    return values, steps


def floats(matrix: PackedTensor) -> tuple[Tensor, Tensor, int]:
    """A matrix [N, K] of e4m3 as its codes' values and what each counts: their product is what `dequantize` returns.

    Float32 [N, K]; float32 [N, C], one for each block of columns; and the columns of a block, at least 1.
    """
    scaling = matrix.format.scaling
    assert scaling is not None
    assert matrix.scales is not None
    (num_rows, num_columns), steps = matrix.shape, read_scales(matrix.scales)
    steps = steps.repeat_interleave(scaling.rows or num_rows, dim=0)[:num_rows]
    return decode_e4m3(matrix.data), steps, scaling.columns or max(num_columns, 1)


def _write(matrix: PackedTensor, out: Tensor) -> None:
    height = panel_height(matrix.format, *out.shape)
    direct = out.dtype == torch.float32
    values = out if direct else torch.empty((min(height, out.shape[0]), out.shape[1]), device=out.device)
    for start in range(0, out.shape[0], height):
        target = out[start : start + height]
        panel = target if direct else values[: target.shape[0]]
        part = matrix.rows(start, start + target.shape[0])
        for weights, step in _over_blocks(panel, _write_codes(part, panel), part.format):
            weights.mul_(step)
        if not direct:
            target.copy_(panel)


def panel_height(format: WeightFormat, num_rows: int, num_columns: int) -> int:
    """Rows of a panel: a multiple of the rows that share a scale, of as many weights as stay in cache."""
    together = 1 if format.scaling is None else max(format.scaling.rows, 1)
    return min(max(_PANEL // max(num_columns, 1) // together, 1) * together, max(num_rows, 1))


def _write_codes(panel: PackedTensor, out: Tensor) -> Tensor:
    """Write what codes stand for, zero points subtracted, into a contiguous float32 tensor; returns what 1 counts."""
    assert panel.scales is not None
    steps = read_scales(panel.scales)
    if panel.global_scales is not None:
        steps = steps * panel.global_scales
    element = panel.format.element
    if element == "int8":
        out.copy_(panel.data)
    elif element == "e4m3":
        # Its fast conversion yields values / 256; scales times 256 must be finite, which NaN is not either.
        if out.device.type == "cpu" and bool(steps.amax() < 2.0**120) and write_e4m3(panel.data, out):
            steps = steps * 256.0
        else:
            out.copy_(decode_e4m3(panel.data))
    elif out.numel():
        write_nibbles(panel.data, element, out)
    if panel.zeros is not None and out.numel():
        for weights, zeros in _over_blocks(out, panel.zeros.to(torch.float32), panel.format):
            weights.sub_(zeros)
    return steps


def _over_blocks(out: Tensor, of_block: Tensor, format: WeightFormat) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of out [n, K], each with a tensor that broadcasts over it: what belongs to the block of every weight."""
    assert format.scaling is not None
    rows, columns = format.scaling.rows, format.scaling.columns
    if not columns:
        yield out, of_block
    elif rows == 1:
        yield out.view(*of_block.shape, columns), of_block[..., None]
    else:
        wide = of_block.repeat_interleave(columns, dim=1)[:, : out.shape[1]]
        for i, row in enumerate(wide):
            yield out[i * rows : (i + 1) * rows], row
