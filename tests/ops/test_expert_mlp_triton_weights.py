"""Stored weights in Triton's kernels: every code of every format, sizes off every tile, and what is refused."""

from __future__ import annotations

import pytest
import torch

from moestro.formats import FORMATS, PackedTensor, dense, dequantize, quantize
from moestro.ops import triton_bytes
from moestro.ops.expert_mlp import triton
from moestro.ops.triton_nibbles import ASSEMBLY
from tolerances import assert_close

from . import ptx
from .stored import PACKED
from .triton_products import times

NIBBLES = [name for name in PACKED if FORMATS[name].per_item == 2]
DENSE = ["float32", "bfloat16", "float16"]
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAN = {"fp8": 0x7F, "mxfp4": 0xFF, "nvfp4": 0x7F}


@pytest.fixture(autouse=True)
def _forced(triton_device: torch.device) -> None:
    torch.set_default_device(triton_device)
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize(("element", "half"), ASSEMBLY, ids=str)
def test_the_assembly_makes_of_every_word_what_its_nibbles_stand_for(element, half):
    dtype = HALVES[half]
    unit = {"bf16": 2.0**-126, "fp16": 2.0**-14}[half] if element == "e2m1" else 1.0
    # -0.0 where nothing is added: it leaves the sign of a zero
    offset = {"e2m1": -0.0, "int4": 8.0, "uint4": 0.0}[element]
    offset += -0.0 if element == "e2m1" else {"bf16": 128.0, "fp16": 1024.0}[half]
    name = {"e2m1": "fp4-g32", "int4": "int4-g32", "uint4": "int4-g32-zp"}[element]
    codes = torch.arange(16, dtype=torch.uint8)
    zeros = torch.zeros(16, 1, dtype=torch.uint8) if element == "uint4" else None
    bytes_ = (codes | codes << 4)[:, None].expand(16, 16).contiguous()
    one = PackedTensor(bytes_, FORMATS[name], torch.ones(16, 1, dtype=torch.float16), zeros)
    expected = (dequantize(one)[:, 0].double() * unit + offset).to(dtype)
    assert torch.equal(expected.double(), dequantize(one)[:, 0].double() * unit + offset)
    bits = [int(b) & 0xFFFF for b in expected.view(torch.int16).tolist()]
    names = ["a", "b", "c", "d", "word"]
    for low in range(0, 0x10000, 7):
        high = (low * 40503 + 12345) & 0xFFFF
        found = ptx.run(ASSEMBLY[element, half], names, word=high << 16 | low)
        for i, name in enumerate(names[:4]):
            assert found[name] == bits[high >> 4 * i & 15] << 16 | bits[low >> 4 * i & 15]


@pytest.mark.parametrize(("element", "half"), triton_bytes.ASSEMBLY, ids=str)
def test_the_assembly_makes_of_every_byte_what_it_stands_for(element, half):
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.int8).float() if element == "int8" else codes.view(torch.float8_e4m3fn).float()
    expected = values.to(HALVES[half])
    assert torch.equal(expected.float().nan_to_num(nan=1e3), values.nan_to_num(nan=1e3))
    for i in range(256):
        four = (i, (i * 7 + 3) % 256, (i * 31 + 100) % 256, 255 - i)
        word = sum(byte << 8 * place for place, byte in enumerate(four))
        found = ptx.run(triton_bytes.ASSEMBLY[element, half], ["low", "high", "word"], word=word)
        for place, byte in enumerate(four):
            bits = found["high" if place > 1 else "low"] >> 16 * (place % 2) & 0xFFFF
            value = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(HALVES[half])
            assert torch.equal(value, expected[byte]) or (value.isnan() and values[byte].isnan())


def every_code(name: str, num_rows: int = 32, num_columns: int = 128) -> PackedTensor:
    """A stack of two matrices in which every byte of data and, in the second, many scales stand; nothing is NaN."""
    form = FORMATS[name]
    data = torch.arange(2 * num_rows * num_columns // form.per_item).reshape(2, num_rows, -1) * 37 % 256
    data = data.to(torch.uint8)
    if form.element == "e4m3":
        data = torch.where((data & 0x7F) == 0x7F, data - 1, data)
    scaling = form.scaling
    shape = (2, *scaling.blocks(num_rows, num_columns))
    steps = torch.arange(shape[0] * shape[1] * shape[2]).reshape(shape)
    if name == "mxfp4":
        scales = (127 - 100 + steps % 125).to(torch.uint8)
    elif name == "nvfp4":
        scales = (steps * 11 % 127).to(torch.uint8).view(torch.float8_e4m3fn)
    else:
        scales = (2.0 ** (steps % 9 - 4) * (-1.0) ** steps).to(scaling.dtypes[0])
    zeros = (steps * 91 % 256).to(torch.uint8) if scaling.zeros else None
    factors = torch.tensor([0.5, 3.0]) if scaling.global_scales else None
    return PackedTensor(data.view(form.storage), form, scales, zeros, factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_every_code_is_what_dequantize_says(name, dtype):
    """Rows of an identity matrix pick the weights themselves, and the scales here round nothing."""
    stored = every_code(name)
    expected = dequantize(stored)[1]
    steps = ((32, False), (128, True))
    for depth, swap in {torch.float32: steps[:1], torch.float16: steps[1:]}.get(dtype, steps):
        found = times(torch.eye(128, dtype=dtype), stored, 1, depth, swap).T
        if name == "mxfp4" and dtype == torch.float16:
            # Of scales in one tile 2 ** 24 and more apart, only the large ones are kept.
            assert_close(found, expected, torch.float16)
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("name", NAN)
def test_nan_codes_and_scales_are_nan(name):
    if name == "fp8":
        stored = every_code("fp8-e4m3-channel")
        stored.data.view(torch.uint8)[1, 3, 5] = NAN[name]
    else:
        stored = every_code(name)
        stored.scales.view(torch.uint8)[1, 3, 1] = NAN[name]
    for dtype in (torch.float32, torch.bfloat16):
        found = times(torch.eye(128, dtype=dtype), stored, 1, 64)
        assert found[:, 3].isnan().all()
        assert not found[:, :3].isnan().any()


@pytest.mark.parametrize("code", [0, 1, 30, 250])
def test_scales_of_mxfp4_at_both_ends(code):
    stored = every_code("mxfp4")
    stored.scales[:] = code
    found = times(torch.eye(128), stored, 0, 32).T
    assert torch.equal(found, dequantize(stored)[0])
    if code == 30:
        found = times(torch.full((1, 128), 2.0**100, dtype=torch.bfloat16), stored, 0, 64)
        assert_close(found[0], (dequantize(stored)[0] * 2.0**100).sum(1), torch.bfloat16)


SIZES = {
    "g32": (45, 96),
    "g64": (45, 192),
    "g128": (33, 256),
    "rows": (37, 83),
    "blocks": (150, 200),
    "nvfp4": (33, 80),
}


def size_of(name: str) -> tuple[int, int]:
    """Rows and columns off every tile, as far as the groups allow."""
    scaling = FORMATS[name].scaling
    if scaling is None or not scaling.columns:
        return SIZES["rows"]
    return SIZES["nvfp4"] if scaling.columns == 16 else SIZES["blocks" if scaling.rows > 1 else f"g{scaling.columns}"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*DENSE, *PACKED])
def test_products_of_sizes_off_every_tile(name, dtype):
    (n, k), form = size_of(name), FORMATS[name]
    weight = torch.randn(3, n, k) * 0.05
    stored = dense(weight.to(form.storage)) if form.is_dense else quantize(weight, form)
    x = torch.randn(5, k).to(dtype)
    expected = (x.double() @ dequantize(stored)[2].double().T).float()
    for depth, swap in ((64, False), (128, True)):
        assert_close(
            times(x, stored, 2, depth, swap),
            expected,
            dtype,
        )


def test_dense_weights_of_any_strides():
    weight = torch.randn(3, 40, 70)
    x = torch.randn(5, 70)
    expected = x @ weight[1].T
    for view in (
        weight.transpose(1, 2).contiguous().transpose(1, 2),
        torch.randn(3, 80, 140)[:, ::2, ::2].copy_(weight),
        weight.permute(1, 0, 2).contiguous().permute(1, 0, 2),
    ):
        assert not view.is_contiguous()
        for swap in (False, True):
            assert_close(times(x, dense(view), 1, 32, swap), expected)


@pytest.mark.parametrize("name", ["int4-g32", "int4-g64-zp", "fp8-e4m3-b128", "fp8-e4m3-channel", "int8", "fp4-g32"])
def test_every_dtype_of_scales(name):
    n, k = size_of(name)
    packed = quantize(torch.randn(2, n, k) * 0.1, name)
    x = torch.randn(3, k)
    for dtype in FORMATS[name].scaling.dtypes[1:]:
        scales = packed.scales.float().abs().to(dtype)
        stored = PackedTensor(packed.data, packed.format, scales, packed.zeros)
        expected = (x.double() @ dequantize(stored)[1].double().T).float()
        assert_close(times(x, stored, 1, 64), expected)
        low = x.to(torch.bfloat16)
        expected = (low.double() @ dequantize(stored)[1].double().T).float()
        assert_close(times(low, stored, 1, 64, True), expected, torch.bfloat16)


def test_rows_beyond_the_matrix_are_not_read():
    """The last tile of 32 rows has 5: a matrix whose memory ends there, behind it NaN."""
    whole = torch.full((2, 40, 64), torch.nan)
    whole[:, :37] = torch.randn(2, 37, 64)
    y = times(torch.randn(3, 64), dense(whole[:, :37]), 0, 64)
    assert y.isfinite().all()


@pytest.mark.parametrize("name", NIBBLES)
def test_bytes_at_odd_addresses_are_refused(name):
    stored = quantize(torch.randn(2, 4, 128), name)
    assert triton._unread("down", stored) is None
    raw = torch.zeros(stored.data.numel() + 1, dtype=torch.uint8)
    moved = raw[1:].view(stored.data.shape).copy_(stored.data)
    odd = PackedTensor(moved, stored.format, stored.scales, stored.zeros, stored.global_scales)
    assert "those of down are not in rows at even addresses" in triton._unread("down", odd)


def test_a_tensor_that_came_to_hold_another_dtype_is_refused():
    stored = dense(torch.randn(2, 4, 8))
    stored.data.data = stored.data.to(torch.bfloat16)
    assert "another dtype" in triton._unread("down", stored)
