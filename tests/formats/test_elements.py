"""Single weights, bit for bit as ml_dtypes has them: every code, and what lies between two codes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moestro.formats.elements import (
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    round_e2m1,
    round_e4m3,
    write_e4m3,
    write_nibbles,
)
from tolerances import bit_equal

FLOATS = {"e2m1": (ml_dtypes.float4_e2m1fn, 6.0), "e4m3": (ml_dtypes.float8_e4m3fn, 448.0)}
BYTES = np.arange(256, dtype=np.uint8)


def unpacked(data: torch.Tensor, element: str) -> torch.Tensor:
    out = torch.empty((*data.shape[:-1], data.shape[-1] * 2))
    write_nibbles(data, element, out)
    return out


def every_value(dtype: Any) -> NDArray[np.float32]:
    """Every finite value of a float type as float32, positive and negative."""
    bits = np.arange(2**16, dtype=np.uint16).view(dtype) if np.dtype(dtype).itemsize == 2 else BYTES.view(dtype)
    found: NDArray[np.float32] = bits.astype(np.float32)
    return found[np.isfinite(found)]


def hostile_values() -> NDArray[np.float32]:
    """All of float16 and bfloat16, what lies half-way between two values of an element, and both neighbours of each."""
    halves = []
    for dtype, _ in FLOATS.values():
        codes = 16 if dtype is ml_dtypes.float4_e2m1fn else 256
        values = np.unique(np.arange(codes, dtype=np.uint8).view(dtype).astype(np.float32))
        values = values[np.isfinite(values)]
        halves.append((values[1:] + values[:-1]) / 2)
    x = np.concatenate([every_value(np.float16), every_value(ml_dtypes.bfloat16), *halves]).astype(np.float32)
    x = np.concatenate([x, -x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    return x[np.isfinite(x)]


VALUES = hostile_values()


def of_ml_dtypes(element: str) -> NDArray[np.uint8]:
    dtype, largest = FLOATS[element]
    return np.clip(VALUES, -largest, largest).astype(dtype).view(np.uint8)


def test_the_values_are_hostile() -> None:
    assert len(VALUES) > 4 * (2**16 - 2**11)
    assert {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 464.0 / 2, 2.0**-10} <= set(VALUES.tolist())
    assert np.signbit(VALUES[VALUES == 0]).any()


def test_encode_e2m1() -> None:
    x = torch.from_numpy(VALUES)
    assert np.array_equal(encode_e2m1(x).numpy(), of_ml_dtypes("e2m1"))
    assert torch.equal(x, torch.from_numpy(hostile_values()))  # nothing is written to the source


def test_encode_e4m3() -> None:
    assert np.array_equal(encode_e4m3(torch.from_numpy(VALUES)).view(torch.uint8).numpy(), of_ml_dtypes("e4m3"))


@pytest.mark.parametrize("element", FLOATS)
def test_round_is_the_value_of_the_code(element: str) -> None:
    rounded = {"e2m1": round_e2m1, "e4m3": round_e4m3}[element](torch.from_numpy(VALUES)).numpy()
    assert np.array_equal(rounded, of_ml_dtypes(element).view(FLOATS[element][0]).astype(np.float32))


def test_decode_e4m3_every_code() -> None:
    expected = BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found = decode_e4m3(torch.from_numpy(BYTES).view(torch.float8_e4m3fn))
    assert np.array_equal(found.numpy(), expected, equal_nan=True)
    assert np.array_equal(np.signbit(found.numpy()), np.signbit(expected))


def test_write_e4m3_every_finite_code() -> None:
    codes = BYTES[(BYTES & 127) != 127]
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    out = torch.empty(len(codes))
    assert write_e4m3(torch.from_numpy(codes).view(torch.float8_e4m3fn), out)
    assert bit_equal(out * 256, torch.from_numpy(expected))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_write_e4m3_leaves_nan_to_others(code: int) -> None:
    data = torch.tensor([1, code, 2], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert not write_e4m3(data, torch.empty(3))
    assert torch.isnan(decode_e4m3(data)[1])


def test_decode_e8m0_every_code() -> None:
    expected = BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    for codes in (torch.from_numpy(BYTES), torch.from_numpy(BYTES).view(torch.float8_e8m0fnu)):
        assert np.array_equal(decode_e8m0(codes).numpy(), expected, equal_nan=True)
    assert expected[0] == 2.0**-127
    assert np.isnan(expected[255])


NIBBLES = {"e2m1": ml_dtypes.float4_e2m1fn, "int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4}


@pytest.mark.parametrize("element", NIBBLES)
def test_unpack_every_byte(element: str) -> None:
    codes = np.stack([BYTES & 15, BYTES >> 4], axis=1)
    expected = torch.from_numpy(codes.view(NIBBLES[element]).astype(np.float32))
    assert bit_equal(unpacked(torch.from_numpy(BYTES)[:, None], element), expected)


def test_pack_puts_even_columns_low() -> None:
    assert pack_nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    assert pack_nibbles(torch.tensor([[-8, 7, -1, 0]], dtype=torch.int8)).tolist() == [[0x78, 0x0F]]


@pytest.mark.parametrize("element", NIBBLES)
def test_nibbles_round_trip(element: str) -> None:
    codes = torch.randint(0, 16, (3, 5, 64), dtype=torch.uint8)
    values = torch.from_numpy(codes.numpy().view(NIBBLES[element]).astype(np.float32))
    assert bit_equal(unpacked(pack_nibbles(codes), element), values)
