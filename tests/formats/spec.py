"""docs/reference/formats.md as a second program: numpy and ml_dtypes, weight by weight, nothing of moestro's own."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from moestro.formats import PackedTensor

Array = NDArray[np.generic]
F32 = np.float32

PACKED = [
    "fp8-e4m3-tensor",
    "fp8-e4m3-channel",
    "fp8-e4m3-b128",
    "int8",
    *(f"int4-g{g}" for g in (32, 64, 128)),
    *(f"int4-g{g}-zp" for g in (32, 64, 128)),
    "mxfp4",
    "nvfp4",
    *(f"fp4-g{g}" for g in (32, 64, 128)),
]
DENSE = ["float32", "bfloat16", "float16", "float64"]

ELEMENTS = {"int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4, "e2m1": ml_dtypes.float4_e2m1fn}


def element_of(name: str) -> str:
    if name.startswith("fp8"):
        return "e4m3"
    if name.startswith("int"):
        return "int8" if name == "int8" else "uint4" if name.endswith("-zp") else "int4"
    return "e2m1"


def block_of(name: str, n: int, k: int) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    if name.startswith("fp8"):
        return {"tensor": (n, k), "channel": (1, k), "b128": (128, 128)}[name.rpartition("-")[2]]
    if name == "int8":
        return 1, k
    return 1, {"mxfp4": 32, "nvfp4": 16}.get(name) or int(name.split("-g")[1].split("-")[0])


def to_numpy(tensor: torch.Tensor) -> Array:
    """The bytes of a tensor as the ml_dtypes (or numpy) type of the same name."""
    names = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e8m0fnu: "float8_e8m0fnu", torch.bfloat16: "bfloat16"}
    if tensor.dtype in names:
        raw = tensor.contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.int16).numpy()
        return raw.view(getattr(ml_dtypes, names[tensor.dtype]))
    return tensor.contiguous().numpy()


def spread(per_block: Array, block: tuple[int, int], n: int, k: int) -> Array:
    """[down, across] -> [n, k]: to every weight what belongs to its block."""
    rows, columns = block
    return np.repeat(np.repeat(per_block, max(rows, 1), axis=0)[:n], max(columns, 1), axis=1)[:, :k]


def values(data: Array, element: str) -> Array:
    """float32 [N, K] of the stored codes."""
    if element not in ELEMENTS:
        return data.astype(F32)
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(data.shape[0], -1)
    return codes.view(ELEMENTS[element]).astype(F32)


def decode(packed: PackedTensor) -> Array:
    """A matrix [N, K] as float32."""
    name = packed.format.name
    n, k = packed.shape
    assert packed.scales is not None
    scales = to_numpy(packed.scales)
    if scales.dtype == np.uint8:
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    steps = scales.astype(F32)
    if packed.global_scales is not None:
        steps = steps * F32(packed.global_scales.item())
    block = block_of(name, n, k)
    q = values(to_numpy(packed.data), element_of(name))
    if packed.zeros is not None:
        q = q - spread(packed.zeros.numpy().astype(F32), block, n, k)
    with np.errstate(all="ignore"):
        return q * spread(steps, block, n, k)


@dataclass
class Stored:
    """What `encode` returns: the tensors of a packed matrix."""

    data: Array
    scales: Array
    zeros: Array | None = None
    global_scale: np.float32 | None = None


def extremes(w: Array, block: tuple[int, int]) -> tuple[Array, Array]:
    n, k = w.shape
    down, across = (range(0, size, step) for size, step in zip((n, k), block, strict=True))
    tiles = [[w[i : i + block[0], j : j + block[1]] for j in across] for i in down]
    low = np.array([[min(t.min(), 0) for t in row] for row in tiles], F32)
    high = np.array([[max(t.max(), 0) for t in row] for row in tiles], F32)
    return low, high


def float32_scale(extent: Array, largest: float) -> Array:
    s = np.maximum((extent / F32(largest)).astype(F32), F32(2.0**-126))
    with np.errstate(over="ignore"):
        return np.where(np.isinf(s * F32(largest)), np.nextafter(s, F32(0)), s).astype(F32)


def float16_scale(extent: Array, largest: float) -> Array:
    """The least float16 that is not below extent / largest."""
    exact = np.maximum((extent / F32(largest)).astype(F32), F32(2.0**-24))
    s = exact.astype(np.float16)
    return np.where(s.astype(F32) < exact, np.nextafter(s, np.float16(np.inf)), s)


def encode(w: Array, name: str) -> Stored:
    """A float32 matrix [N, K], scales by the rule of "nearest"."""
    element, block = element_of(name), block_of(name, *w.shape)
    low, high = extremes(w, block)
    amax = np.maximum(-low, high)
    unit = zeros = None
    if element == "e4m3" or element == "int8":
        scales = float32_scale(amax, 448 if element == "e4m3" else 127)
    elif name == "mxfp4":
        exponent = np.floor(np.log2(np.maximum(amax, 2.0**-127).astype(np.float64))) - 2
        scales = np.clip(exponent + 127, 0, 252).astype(np.uint8)
    elif name == "nvfp4":
        unit = float32_scale(np.max(amax, initial=0), 448 * 6)[()]
        scales = np.maximum(amax / F32(6) / unit, F32(2.0**-9)).astype(ml_dtypes.float8_e4m3fn)
    else:
        extent, largest = (high - low, 15) if element == "uint4" else (amax, 7 if element == "int4" else 6)
        scales = float16_scale(extent, largest)
    steps = (scales.view(ml_dtypes.float8_e8m0fnu) if name == "mxfp4" else scales).astype(F32)
    if unit is not None:
        steps = steps * unit
    if element == "uint4":
        zeros = np.rint(-low / steps).astype(np.uint8)
    q = w / spread(steps, block, *w.shape)
    codes = round_units(q, element, None if zeros is None else spread(zeros, block, *w.shape))
    return Stored(codes, scales, zeros, unit)


def round_units(q: Array, element: str, zeros: Array | None) -> Array:
    if element == "e4m3":
        return np.clip(q, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    if element == "int8":
        return np.clip(np.rint(q), -127, 127).astype(np.int8)
    if element == "e2m1":
        codes = np.clip(q, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    elif zeros is None:
        codes = np.clip(np.rint(q), -8, 7).astype(np.int8).view(np.uint8) & 15
    else:
        codes = np.clip(np.rint(q) + zeros, 0, 15).astype(np.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4
