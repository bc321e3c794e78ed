"""The values that weights are stored in: what they check, what they cost, and their parts."""

from __future__ import annotations

import pytest
import torch

from formats import spec
from moestro.errors import InvalidInputError
from moestro.formats import FORMATS, PackedTensor, SplitTensor, dense, find_format, quantize
from tolerances import bit_equal


def packed(name: str, *shape: int) -> PackedTensor:
    return quantize(torch.randn(shape), name)


def test_every_format_has_its_name() -> None:
    assert set(FORMATS) == {*spec.PACKED, *spec.DENSE}
    assert all(form.name == name and find_format(name) is form for name, form in FORMATS.items())


@pytest.mark.parametrize(("alias", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_aliases(alias: str, name: str) -> None:
    assert find_format(alias) is FORMATS[name]


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="'int3'") as caught:
        find_format("int3")
    assert all(name in str(caught.value) for name in FORMATS)


@pytest.mark.parametrize("name", spec.PACKED)
def test_bits_are_the_bytes(name: str) -> None:
    form = FORMATS[name]
    found = packed(name, 2, 256, 512)
    rest = {"fp8-e4m3-tensor": 1 / 256 / 512, "fp8-e4m3-channel": 1 / 512, "int8": 1 / 512}.get(name, 0.0)
    shared = 1 / 256 / 512 if name == "nvfp4" else rest
    assert found.nbytes * 8 / (2 * 256 * 512) == form.bits + 32 * shared


@pytest.mark.parametrize("name", [*spec.PACKED, *spec.DENSE])
def test_parts_are_views(name: str) -> None:
    whole = packed(name, 3, 256, 256)
    expert = whole[1]
    assert whole.blocks(1)[0].shape == expert.shape == (256, 256)
    for part in (expert, expert.rows(128, 256)):
        assert part.format is whole.format
        for tensor, of_whole in zip(part.tensors, whole.tensors, strict=True):
            assert tensor.untyped_storage().data_ptr() == of_whole.untyped_storage().data_ptr()
        # What a part takes from its whole would pass the checks that it skips.
        PackedTensor(part.data, part.format, part.scales, part.zeros, part.global_scales)
    assert expert.rows(128, 200).shape == (72, 256)
    assert bit_equal(whole[-1].data.contiguous().view(torch.uint8), whole[2].data.contiguous().view(torch.uint8))


@pytest.mark.parametrize("expert", [3, -4])
def test_experts_that_are_not_there(expert: int) -> None:
    with pytest.raises(IndexError):
        packed("mxfp4", 3, 4, 32)[expert]


@pytest.mark.parametrize("name", spec.PACKED)
def test_wrong_parts_are_refused(name: str) -> None:
    good = packed(name, 2, 256, 256)
    assert good.scales is not None
    data, form, scales, zeros, unit = good.data, good.format, good.scales, good.zeros, good.global_scales
    wrong = [
        (data.to(torch.float32), form, scales, zeros, unit),
        (data, form, None, zeros, unit),
        (data, form, scales[..., None], zeros, unit),
        (data, form, scales[:1], zeros, unit),
        (data, form, scales.to(torch.float64), zeros, unit),
        (data, form, scales, torch.zeros_like(scales, dtype=torch.int8), unit),
        (data, form, scales, zeros, torch.ones(3)),
        (data, form, scales, None if zeros is not None else torch.zeros(scales.shape, dtype=torch.uint8), unit),
        (data, form, scales, zeros, None if unit is not None else torch.ones(2)),
        (data[0, 0], form, scales, zeros, unit),
    ]
    for parts in wrong:
        with pytest.raises(InvalidInputError, match=r"\[PackedTensor\] got .*; needs"):
            PackedTensor(*parts)  # type: ignore[arg-type]


def test_split_tensors_add_up() -> None:
    experts = tuple((packed("mxfp4", 6, 64), packed("mxfp4", 10, 64)) for _ in range(3))
    split = SplitTensor(experts)
    assert split.shape == (3, 16, 64)
    assert split.format is FORMATS["mxfp4"]
    assert split.nbytes == 3 * 16 * (32 + 2)
    assert len(split.tensors) == 3 * 2 * 2
    assert split.blocks(2) is experts[2]
    assert split.device.type == "cpu"


def test_split_tensors_of_one_kind_only() -> None:
    a, wide, tall = packed("mxfp4", 6, 64), packed("mxfp4", 6, 128), packed("mxfp4", 8, 64)
    other, stack = packed("int4-g32", 6, 64), packed("mxfp4", 2, 6, 64)
    meta = quantize(torch.zeros(6, 64, device="meta"), "mxfp4")
    for matrices in ((), ((),), ((a,), (wide,)), ((a, wide),), ((a,), (tall,)), ((a, other),), ((a,), (other,))):
        with pytest.raises(InvalidInputError, match=r"\[SplitTensor\]"):
            SplitTensor(matrices)
    for matrices in (((stack,),), ((a,), (a, a)), ((a,), (meta,)), ((dense(torch.zeros(1, 6, 64)),),)):
        with pytest.raises(InvalidInputError, match=r"\[SplitTensor\]"):
            SplitTensor(matrices)
    assert SplitTensor(((a, tall), (a, tall))).shape == (2, 14, 64)
