"""What quantize refuses, and how it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from formats import spec
from moestro.errors import InvalidInputError
from moestro.formats import FORMATS, check_shape, quantize

NAN, INF = float("nan"), float("inf")
ALL = [*spec.PACKED, *spec.DENSE]


def refusal(*arguments: Any, **named: Any) -> str:
    with pytest.raises(InvalidInputError) as caught:
        quantize(*arguments, **named)
    text = str(caught.value)
    assert text.startswith("[quantize] got ")
    return text


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ALL)
def test_not_finite_is_named_with_its_index(name: str, value: float) -> None:
    w = torch.randn(3, 300, 256)
    w[2, 257, 131] = value
    for search in ("nearest", "mse"):
        text = refusal(w, name, search, name="model.layers.0.mlp.experts.down_proj")
        assert f"got {value!r} at [2, 257, 131] of model.layers.0.mlp.experts.down_proj;" in text
        assert "needs finite weights" in text
    assert f"got {value!r} at [257, 131] of weight;" in refusal(w[2].to(torch.bfloat16), name)


def test_the_first_of_several_is_named() -> None:
    w = torch.zeros(4, 64)
    w[3, 1], w[1, 40], w[1, 50] = NAN, INF, NAN
    assert "got inf at [1, 40]" in refusal(w, "mxfp4")


@pytest.mark.parametrize("name", [name for name in ALL if name != "float64"])
def test_float64_beyond_float32(name: str) -> None:
    w = torch.ones(4, 256, dtype=torch.float64)
    w[2, 5] = -1e300
    text = refusal(w, name)
    assert "got -1e+300 at [2, 5]" in text
    assert "range of torch." in text


def test_float16_as_a_target_has_its_own_range() -> None:
    w = torch.ones(4, 8)
    w[1, 7] = 1e5
    assert "needs weights within the range of torch.float16 for float16" in refusal(w, "float16")
    assert quantize(w, "bfloat16").data.isfinite().all()


@pytest.mark.parametrize(
    ("name", "largest"), [("int4-g32", 7.0), ("int4-g64", 7.0), ("int4-g128-zp", 15.0), ("fp4-g32", 6.0)]
)
def test_scales_beyond_float16(name: str, largest: float) -> None:
    w = torch.zeros(2, 3, 256)
    w[1, 2, 200] = largest * 65504.0
    quantize(w, name)
    w[1, 2, 200] *= 1.001
    for search in ("nearest", "mse"):
        text = refusal(w, name, search)
        assert "at [1, 2, 200] of weight" in text
        assert f"needs weights whose scale in {name} is at most 65504" in text


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("mxfp4", 32),
        ("nvfp4", 16),
        *(
            (f"{kind}-g{g}{zp}", g)
            for g in (32, 64, 128)
            for kind, zp in (
                ("int4", ""),
                ("int4", "-zp"),
                ("fp4", ""),
            )
        ),
    ],
)
def test_groups_must_come_out_even(name: str, unit: int) -> None:
    check_shape(FORMATS[name], 7, 3 * unit, "load")
    for columns in (unit - 1, unit // 2, 3 * unit + 1):
        with pytest.raises(InvalidInputError, match=rf"\[load\] got a matrix of 7 x {columns} for format {name}; "):
            check_shape(FORMATS[name], 7, columns, "load")
        assert f"multiple of {unit}" in refusal(torch.zeros(7, columns), name)


@pytest.mark.parametrize("name", [*spec.DENSE, "fp8-e4m3-tensor", "fp8-e4m3-channel", "fp8-e4m3-b128", "int8"])
def test_the_others_take_any_shape(name: str) -> None:
    for n, k in ((1, 1), (129, 127), (3, 257)):
        check_shape(FORMATS[name], n, k, "load")
        assert quantize(torch.randn(n, k), name).shape == (n, k)


@pytest.mark.parametrize("shape", [(4,), (2, 2, 2, 32), ()])
def test_shapes_that_are_no_matrix(shape: tuple[int, ...]) -> None:
    assert f"weight {list(shape)} of torch.float32" in refusal(torch.zeros(shape), "mxfp4")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_dtypes_that_are_no_weights(dtype: torch.dtype) -> None:
    assert str(dtype) in refusal(torch.zeros(4, 32).to(dtype), "mxfp4")


def test_names() -> None:
    w = torch.zeros(4, 32)
    assert "search 'rmse'" in refusal(w, "mxfp4", "rmse")
    with pytest.raises(InvalidInputError, match="format 'mxfp5'; needs one of"):
        quantize(w, "mxfp5")
