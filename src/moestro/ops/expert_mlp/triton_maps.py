"""Tensor maps over weights, by which the hardware copies tiles of them; CUDA's driver is asked about each layout.

The map of concatenated gate and up has strides that do not grow from dimension to dimension. CUDA documents no such
rule, but writes strides as if there were one, so that a driver may refuse the map. Imports no Triton.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from moestro.formats import PackedTensor, StoredExperts
from moestro.ops.expert_mlp.triton_tuning import Plan, Tile
from moestro.ops.gpu import ALIGNED
from moestro.types import Activation
from moestro.weights import ExpertWeights

_CODES = {torch.uint8: 0, torch.int16: 1, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""The driver's numbers for what is copied; 8-bit floats are bytes to it."""

_SWIZZLES = {32: 1, 64: 2, 128: 3}
"""Bytes of a row of a box as it lies in shared memory, and the driver's number for that."""


class Layout(NamedTuple):
    """What a map says beside its address: sizes, strides and box, in items, the slowest dimension first."""

    shape: list[int]
    strides: list[int]
    box: list[int]


def layout(stored: PackedTensor, tile: Tile, dtype: torch.dtype, activation: Activation | None) -> Layout | None:
    """[experts, outputs, halves, columns] of weights in boxes [1, outputs, halves, depth]; None where they lie wrongly.

    Columns are those of `items`. Either order of gate and up is a matter of strides; the rows of a box alternate
    between them. Boxes are not converted: weights are nibbles, or in `dtype`, what rows are multiplied in.
    `activation` is that of gate_up, None for down.
    """
    data, depth = items(stored), tile.depth // _columns(stored)
    halves = 2 if activation is not None and activation.gated else 1
    expert, row, column = data.stride()
    aligned = data.data_ptr() % ALIGNED == 0 and all(s * data.element_size() % ALIGNED == 0 for s in (expert, row))
    packed = stored.format.per_item == 2
    # Of weights that are not decoded a step past the last column is not to be copied.
    whole = data.numel() > 0 and (data.shape[2] % depth == 0 or packed)
    lies = column == 1 and row > 0 and expert > 0 and aligned and whole
    if not (tile.tensor_map and (data.dtype == dtype or packed) and lies):
        return None
    outputs = data.shape[1] // halves
    apart = halves == 2 and activation is not None and not activation.interleaved
    strides = (row, row * outputs) if apart else (row * halves, row)
    return Layout(
        [data.shape[0], outputs, halves, data.shape[2]],
        [expert, *strides, 1],
        [1, tile.columns // halves, halves, depth],
    )


def items(stored: PackedTensor) -> Tensor:
    """The weights as kernels load them: nibbles two bytes at a time."""
    return stored.data.view(torch.int16) if stored.format.per_item == 2 else stored.data


def _columns(stored: PackedTensor) -> int:
    """In an item."""
    return 4 if stored.format.per_item == 2 else 1


def by_pointers(how: Plan, weights: ExpertWeights, dtype: torch.dtype) -> Plan:
    """The plan without the maps that cannot be: of weights that lie wrongly, and those that the driver refuses.

    The reason of a plan says which product the driver refused the map of; its kernels load the same tiles by pointers.
    """
    for name, stored, activation in _projections(weights):
        tile: Tile = getattr(how, name)
        if not tile.tensor_map:
            continue
        said: str | None = how.reason
        if isinstance(stored, PackedTensor) and (found := layout(stored, tile, dtype, activation)) is not None:
            why = refusal(items(stored), found)
            said = None if why is None else f"{how.reason}; {name} by pointers, since {why}"
        if said is not None:
            how = replace(how, reason=said, **{name: replace(tile, tensor_map=False)})  # type: ignore[arg-type]
    return how


def _projections(weights: ExpertWeights) -> tuple[tuple[str, StoredExperts, Activation | None], ...]:
    return ("gate_up", weights.gate_up, weights.activation), ("down", weights.down, None)


def refusal(data: Tensor, asked: Layout) -> str | None:
    """Why CUDA's driver makes no such map of this tensor; None if it does, or where there is none to ask."""
    if not _is_asked(data):
        return None
    driver = _driver()
    if driver is None:
        return "CUDA's driver has no tensor maps"
    code = encode(driver, data.data_ptr(), data.dtype, asked)
    return None if code == 0 else f"CUDA's driver refuses its tensor map (error {code})"


def encode(driver: ctypes.CDLL, address: int, dtype: torch.dtype, asked: Layout) -> int:
    """The driver's answer, 0 for a map: of boxes as Triton has them copied, a part of 128 bytes of each row at once."""
    size, rank = dtype.itemsize, len(asked.shape)
    inner = min(asked.box[-1], 128 // size)
    numbers: list[ctypes.Array[ctypes.c_uint64]] = [
        (ctypes.c_uint64 * rank)(*reversed(asked.shape)),
        (ctypes.c_uint64 * (rank - 1))(*(stride * size for stride in reversed(asked.strides[:-1]))),
    ]
    boxes: list[ctypes.Array[ctypes.c_uint32]] = [
        (ctypes.c_uint32 * rank)(inner, *reversed(asked.box[:-1])),
        (ctypes.c_uint32 * rank)(*[1] * rank),
    ]
    made = ctypes.create_string_buffer(128 + 64)
    aligned = ctypes.addressof(made) + -ctypes.addressof(made) % 64
    code = _CODES.get(dtype if size > 1 else torch.uint8, -1)
    ways = 0, _SWIZZLES.get(inner * size, 0), 2, 0  # not interleaved; swizzled; fetched into L2 by 128 bytes; zeros
    return int(
        driver.cuTensorMapEncodeTiled(
            ctypes.c_void_p(aligned), code, rank, ctypes.c_void_p(address), *numbers, *boxes, *ways
        )
    )


def _is_asked(data: Tensor) -> bool:
    return data.is_cuda


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        found = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return found if hasattr(found, "cuTensorMapEncodeTiled") else None
