"""dequantize against a reader written from the reference page; how it walks, and that walking leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from formats import spec
from moestro.errors import InvalidInputError
from moestro.formats import FORMATS, PackedTensor, dequantize, quantize
from moestro.formats import decode as module
from tolerances import bit_equal

SHAPES = {"b128": (300, 200), "other": (37, 256)}


def shape_of(name: str) -> tuple[int, int]:
    return SHAPES["b128" if name.endswith("b128") else "other"]


def random_bytes(name: str, lead: tuple[int, ...] = ()) -> PackedTensor:
    """Every code, and scales of every size that float32 can multiply by every code."""
    form = FORMATS[name]
    assert form.scaling is not None
    n, k = shape_of(name)
    grid = (*lead, *form.scaling.blocks(n, k))
    data = torch.randint(0, 256, (*lead, n, k // form.per_item), dtype=torch.uint8)
    if form.element == "e4m3":
        data[(data & 127) == 127] = 0
    dtype = form.scaling.dtypes[0]
    scales = torch.exp2(torch.rand(grid) * 200 - 100)
    if dtype == torch.uint8:
        scales = torch.randint(0, 252, grid, dtype=torch.uint8)
    elif dtype != torch.float32:
        scales = torch.exp2(torch.rand(grid) * 12 - 6).to(dtype)
    zeros = torch.randint(0, 16, grid, dtype=torch.uint8) if form.scaling.zeros else None
    global_scales = torch.exp2(torch.rand(lead) * 40 - 20) if form.scaling.global_scales else None
    return PackedTensor(data.view(form.storage), form, scales, zeros, global_scales)


@pytest.mark.parametrize("name", spec.PACKED)
def test_every_byte_as_specified(name: str) -> None:
    packed = random_bytes(name)
    expected = torch.from_numpy(spec.decode(packed))
    assert expected.isfinite().all()
    assert bit_equal(dequantize(packed), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", spec.PACKED)
def test_other_dtypes_are_float32_rounded_once(name: str, dtype: torch.dtype) -> None:
    packed = random_bytes(name, (2,))
    assert bit_equal(dequantize(packed, dtype), dequantize(packed).to(dtype))


@pytest.mark.parametrize("name", spec.PACKED)
def test_a_stack_is_its_matrices(name: str) -> None:
    packed = random_bytes(name, (3,))
    assert bit_equal(dequantize(packed), torch.stack([dequantize(packed[e]) for e in range(3)]))


@pytest.mark.parametrize("panel", [1, 3000])
@pytest.mark.parametrize("name", spec.PACKED)
def test_panels_leave_no_trace(name: str, panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = random_bytes(name)
    whole = dequantize(packed, torch.bfloat16)
    monkeypatch.setattr(module, "_PANEL", panel)
    assert bit_equal(dequantize(packed, torch.bfloat16), whole)


@pytest.mark.parametrize("name", spec.PACKED)
def test_rows_of_a_matrix(name: str) -> None:
    packed = random_bytes(name)
    whole = dequantize(packed)
    for start, stop in ((0, 5), (0, len(whole)), (128, 300), (128, 200), (256, 300)):
        if stop <= len(whole):
            assert bit_equal(dequantize(packed.rows(start, stop)), whole[start:stop])


@pytest.mark.parametrize("name", spec.PACKED)
def test_strided_tensors_are_read_as_they_lie(name: str) -> None:
    packed = random_bytes(name, (4,))
    every_other = PackedTensor(
        packed.data[::2],
        packed.format,
        None if packed.scales is None else packed.scales.mT.contiguous().mT[::2],
        None if packed.zeros is None else packed.zeros[::2],
        None if packed.global_scales is None else packed.global_scales[::2],
    )
    assert bit_equal(dequantize(every_other), dequantize(packed)[::2])
    column_major = PackedTensor(packed.data.mT.contiguous().mT, packed.format, *every_other_parts(packed))
    assert bit_equal(dequantize(column_major), dequantize(packed))


def every_other_parts(packed: PackedTensor) -> tuple[torch.Tensor | None, ...]:
    return packed.scales, packed.zeros, packed.global_scales


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8-e4m3-b128", torch.bfloat16),
        ("fp8-e4m3-b128", torch.float8_e8m0fnu),
        ("fp8-e4m3-channel", torch.bfloat16),
        ("int8", torch.float16),
        ("int4-g32", torch.bfloat16),
        ("int4-g64-zp", torch.float32),
        ("mxfp4", torch.float8_e8m0fnu),
        ("fp4-g128", torch.bfloat16),
    ],
)
def test_scales_of_other_dtypes(name: str, dtype: torch.dtype) -> None:
    packed = random_bytes(name)
    assert packed.scales is not None
    assert dtype in packed.format.scaling.dtypes  # type: ignore[union-attr]
    scales = torch.randint(100, 140, packed.scales.shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    if dtype != torch.float8_e8m0fnu:
        scales = (scales.float() * 1.5).to(dtype)
    other = PackedTensor(packed.data, packed.format, scales, packed.zeros)
    assert bit_equal(dequantize(other), torch.from_numpy(spec.decode(other)))


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-126, 2.0**119, 2.0**120, 2.0**127])
@pytest.mark.parametrize("name", ["fp8-e4m3-tensor", "int8"])
def test_extreme_float32_scales(name: str, scale: float) -> None:
    data = torch.tensor([[0, 1, 8, 0x38, 0x81]], dtype=torch.uint8).view(FORMATS[name].storage)
    packed = PackedTensor(data, FORMATS[name], torch.full((1, 1), scale))
    assert bit_equal(dequantize(packed), torch.from_numpy(spec.decode(packed)))


def test_nan_that_is_stored_is_read() -> None:
    data = torch.tensor([[0x7F, 0xFF, 0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    packed = PackedTensor(data, FORMATS["fp8-e4m3-tensor"], torch.ones(1, 1))
    assert dequantize(packed).isnan().tolist() == [[True, True, False]]
    scales = torch.tensor([[255, 127]], dtype=torch.uint8)
    packed = PackedTensor(torch.full((1, 32), 0x22, dtype=torch.uint8), FORMATS["mxfp4"], scales)
    assert dequantize(packed).isnan()[0].tolist() == [True] * 32 + [False] * 32
    packed = PackedTensor(data.clone(), FORMATS["fp8-e4m3-tensor"], torch.tensor([[float("nan")]]))
    assert dequantize(packed).isnan().all()


def test_the_published_reader_of_gpt_oss_agrees() -> None:
    """Transformers' own, on `_blocks` [E, N, K / 32, 16] and `_scales` [E, N, K / 32] as the checkpoints have them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), dtype=torch.uint8)
    packed = PackedTensor(blocks.view(2, 6, 48), FORMATS["mxfp4"], scales)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert bit_equal(dequantize(packed, torch.bfloat16), expected.mT.contiguous())


@pytest.mark.parametrize("name", spec.DENSE)
def test_dense_is_a_cast(name: str) -> None:
    data = torch.randn(2, 3, 4).to(FORMATS[name].storage)
    packed = PackedTensor(data, FORMATS[name])
    assert dequantize(packed, data.dtype) is data
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert bit_equal(dequantize(packed, dtype), data.to(dtype))


@pytest.mark.parametrize("name", [*spec.PACKED, *spec.DENSE])
def test_meta_and_empty(name: str) -> None:
    for shape in ((0, 256), (0, 128, 256), (2, 0, 256), (2, 128, 256)):
        packed = quantize(torch.zeros(shape, device="meta"), name)
        assert packed.shape == shape
        assert packed.device.type == "meta"
        found = dequantize(packed, torch.bfloat16)
        assert found.shape == shape
        assert found.is_meta


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_dtypes_that_are_none(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidInputError, match=str(dtype)):
        dequantize(random_bytes("mxfp4"), dtype)


def test_the_reader_of_this_test_can_fail() -> None:
    packed = random_bytes("int4-g32-zp")
    assert packed.zeros is not None
    before = spec.decode(packed)
    packed.zeros[0, 0] ^= 1
    assert not np.array_equal(before, spec.decode(packed))
