"""quantize: the bytes that the reference page specifies, errors within half a step, and nothing infinite out of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from formats import spec
from moestro.formats import FORMATS, PackedTensor, dequantize, quantize
from moestro.formats import decode as decode_module
from moestro.formats.encode import row_sums
from tolerances import bit_equal, tolerance

FOUR_BITS = [name for name in spec.PACKED if FORMATS[name].bits < 5]
SEARCHES = ["nearest", "mse"]


def shape_of(name: str) -> tuple[int, int]:
    """Blocks cut off on both sides where they can be; groups of several sizes to a row where not."""
    return (300, 200) if name.endswith("b128") else (5, 256)


def bits(packed: PackedTensor) -> list[torch.Tensor]:
    return [t.reshape(-1).view(torch.uint8) for t in packed.tensors]


def same(a: PackedTensor, b: PackedTensor) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def hostile(seed: int, exponent: int, shape: tuple[int, int]) -> torch.Tensor:
    """Normal weights of some size; runs of rows that are zero, negative, tiny, equal, or hold one large weight."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator, dtype=torch.float64)
    kinds = torch.randint(0, 8, (shape[0], shape[1] // 8), generator=generator).repeat_interleave(8, dim=1)
    w[kinds == 0] = 0.0
    w[kinds == 1] = -w[kinds == 1].abs()
    w[kinds == 2] *= 2.0**-30
    w[kinds == 3] = 1.25
    w[kinds == 4] *= 2.0**-140
    w[int(torch.randint(0, shape[0], (), generator=generator)), 3] = 100.0
    if seed % 5 == 0:
        w = -w.abs()
    return (w * 2.0**exponent).to(torch.float32)


@pytest.mark.parametrize("name", spec.PACKED)
@pytest.mark.parametrize("exponent", [-140, -20, 0, 9])
def test_the_bytes_as_specified(name: str, exponent: int) -> None:
    w = hostile(7, exponent, shape_of(name))
    if exponent == -140:
        assert float(w.abs().max()) < 2.0**-126  # subnormal, all of it
    found, expected = quantize(w, name), spec.encode(w.numpy(), name)
    assert found.scales is not None
    assert np.array_equal(spec.to_numpy(found.scales).view(np.uint8), expected.scales.view(np.uint8))
    assert np.array_equal(spec.to_numpy(found.data).view(np.uint8), expected.data.view(np.uint8))
    if found.zeros is not None:
        assert np.array_equal(found.zeros.numpy(), expected.zeros)
    if found.global_scales is not None:
        assert found.global_scales.item() == expected.global_scale


def half_gaps(units: torch.Tensor, name: str) -> torch.Tensor:
    """The most that rounding may move a weight of so many units: half the distance of the values about it."""
    element = spec.element_of(name)
    if element in ("int8", "int4", "uint4"):
        return torch.full_like(units, 0.5)
    of = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn}[element]
    values = np.unique(
        np.abs(np.arange(256, dtype=np.uint8)[: 16 if element == "e2m1" else 256].view(of).astype(float))
    )
    magnitude = units.abs()
    gaps = torch.zeros_like(units)
    for low, high in pairwise(values):
        gaps[(magnitude >= low) & (magnitude <= high)] = (high - low) / 2
    return torch.where(magnitude > values[-1], magnitude - values[-1], gaps)


def saturation(name: str) -> float:
    """Units that a weight may have at most where scales are the nearest."""
    return {"e4m3": 448.0, "int8": 127.0, "int4": 7.0, "uint4": 15.0, "e2m1": 6.0}[spec.element_of(name)]


@pytest.mark.parametrize("name", spec.PACKED)
@given(seed=st.integers(0, 2**16), exponent=st.integers(-150, 10))
def test_errors_are_within_half_a_step(name: str, seed: int, exponent: int) -> None:
    w = hostile(seed, exponent, shape_of(name))
    packed = quantize(w, name)
    found = dequantize(packed).double()
    assert found.isfinite().all()
    steps = torch.from_numpy(steps_of(packed)).double()
    units = w.double() / steps
    slack = tolerance(torch.float32).worst * (w.double().abs() + steps)
    assert ((found - w.double()).abs() <= half_gaps(units, name) * steps + slack).all()
    if name == "mxfp4":  # the rule rounds the scale down to a power of two
        assert float(units.abs().max()) < 8
    elif name != "nvfp4":  # whose scales are rounded to four bits
        assert float(units.abs().max()) <= saturation(name) * (1 + tolerance(torch.float32).worst)


def steps_of(packed: PackedTensor) -> np.ndarray:
    """The step of every weight [N, K]."""
    assert packed.scales is not None
    scales = spec.to_numpy(packed.scales)
    steps = (scales.view(ml_dtypes.float8_e8m0fnu) if scales.dtype == np.uint8 else scales).astype(np.float32)
    if packed.global_scales is not None:
        steps = steps * np.float32(packed.global_scales.item())
    n, k = packed.shape
    return spec.spread(steps, spec.block_of(packed.format.name, n, k), n, k)


def block_errors(w: torch.Tensor, packed: PackedTensor) -> np.ndarray:
    """The squared error of each block."""
    errors = (dequantize(packed).double() - w.double()).square().numpy()
    rows, columns = spec.block_of(packed.format.name, *w.shape)
    down = np.add.reduceat(errors, range(0, w.shape[0], rows), axis=0)
    return np.add.reduceat(down, range(0, w.shape[1], columns), axis=1)


@pytest.mark.parametrize("name", spec.PACKED)
@given(seed=st.integers(0, 2**16), exponent=st.integers(-150, 10))
def test_error_search_is_never_worse(name: str, seed: int, exponent: int) -> None:
    w = hostile(seed, exponent, shape_of(name))
    found = quantize(w, name, "mse")
    assert dequantize(found).isfinite().all()
    nearest, searched = block_errors(w, quantize(w, name)), block_errors(w, found)
    assert (searched <= nearest * (1 + tolerance(torch.float64).worst)).all()


@pytest.mark.parametrize("name", spec.PACKED)
def test_error_search_is_better_on_weights_as_they_come(name: str) -> None:
    w = torch.randn(256, 1024) * 0.02
    nearest, searched = (float(block_errors(w, quantize(w, name, search)).sum()) for search in ("nearest", "mse"))
    if FORMATS[name].bits < 5:
        assert searched < 0.97 * nearest
    else:
        assert searched < nearest


def test_a_format_whose_scales_have_another_dtype() -> None:
    known = FORMATS["fp8-e4m3-b128"]
    assert known.scaling is not None
    w = hostile(3, 0, shape_of(known.name))
    found = quantize(w, replace(known, scaling=replace(known.scaling, dtypes=(torch.bfloat16,))))
    assert found.scales is not None
    assert found.scales.dtype == torch.bfloat16
    assert torch.equal(found.data.view(torch.uint8), quantize(w, known).data.view(torch.uint8))


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", spec.PACKED)
def test_what_is_stored_is_stored_again(name: str, search: str) -> None:
    """Values that a format holds come back: through blocks whose largest weight is the largest code."""
    n, k = shape_of(name)
    form = FORMATS[name]
    element = spec.element_of(name)
    if element == "e4m3":
        codes = torch.randint(0, 127, (n, k), dtype=torch.uint8) | torch.randint(0, 2, (n, k), dtype=torch.uint8) << 7
        values = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    else:
        low, high = {"int8": (-127, 127), "int4": (-7, 7), "uint4": (-6, 9), "e2m1": (-6, 6)}[element]
        values = torch.randint(low, high + 1, (n, k)).float()
        if element == "e2m1":
            values = values.sign() * (values.abs() + (values.abs() == 5))
    assert form.scaling is not None
    step = form.scaling.columns or k
    values[:, ::step] = {"e4m3": 448.0, "int8": 127.0, "int4": 7.0, "uint4": 9.0, "e2m1": 6.0}[element]
    if element == "uint4":
        values[:, 1::step] = -6.0
    assert torch.equal(dequantize(quantize(values * 0.25, name, search)), values * 0.25)  # type: ignore[arg-type]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", spec.PACKED)
def test_blocks_of_zeros(name: str, search: str) -> None:
    for zero in (0.0, -0.0):
        found = dequantize(quantize(torch.full(shape_of(name), zero), name, search))  # type: ignore[arg-type]
        assert (found == 0).all()


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", spec.PACKED)
def test_the_largest_floats(name: str, search: str) -> None:
    """Finite in, finite out, to within a step; float16 scales end earlier, with an error of their own."""
    most = torch.finfo(torch.float32).max
    if torch.float16 == FORMATS[name].scaling.dtypes[0]:  # type: ignore[union-attr]
        most = saturation(name) * 65504.0
    w = torch.randn(shape_of(name)).clamp(-1, 1) * most
    w[0, :2] = torch.tensor([most, -most / 3 if name.endswith("zp") else -most])
    if name.endswith("zp"):
        w = w.clamp(-most / 3, most / 3)
    found = dequantize(quantize(w, name, search))  # type: ignore[arg-type]
    assert found.isfinite().all()
    assert float((found.double() - w.double()).abs().max()) <= most / 3


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", spec.PACKED)
def test_neither_panels_nor_threads_leave_a_trace(name: str, search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(140, 250 if name.endswith("b128") else 256)  # above 32,768, from which PyTorch uses threads
    whole = quantize(w, name, search)  # type: ignore[arg-type]
    torch.set_num_threads(2)
    assert same(quantize(w, name, search), whole)  # type: ignore[arg-type]
    for panel in (1, 5000):
        monkeypatch.setattr(decode_module, "_PANEL", panel)
        part = w if panel > 1 else w[:3]
        found = quantize(part, name, search)  # type: ignore[arg-type]
        if panel > 1:
            assert same(found, whole)
        elif FORMATS[name].scaling.rows == 1 and found.global_scales is None:  # type: ignore[union-attr]
            assert all(torch.equal(a, b[: len(a)]) for a, b in zip(bits(found), bits(whole), strict=True))


def test_sums_do_not_depend_on_rows_or_threads() -> None:
    x = torch.rand(5, 100_000)
    one = row_sums(x)
    torch.set_num_threads(2)
    assert bit_equal(row_sums(x), one)
    assert bit_equal(torch.cat([row_sums(row[None]) for row in x]), one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", spec.PACKED)
def test_source_dtypes(name: str, dtype: torch.dtype) -> None:
    w = torch.randn(shape_of(name), dtype=torch.float64).to(dtype)
    assert same(quantize(w, name), quantize(w.float(), name))


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", spec.PACKED)
def test_a_stack_is_its_matrices(name: str, search: str) -> None:
    w = torch.stack([torch.randn(shape_of(name)) * 10.0**-e for e in range(3)])
    stack = quantize(w, name, search)  # type: ignore[arg-type]
    assert stack.shape == tuple(w.shape)
    assert all(same(stack[e], quantize(w[e], name, search)) for e in range(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", spec.PACKED)
def test_any_strides_and_the_source_stays_as_it_is(name: str) -> None:
    n, k = shape_of(name)
    w = torch.randn(2, n, k)
    expected, before = quantize(w, name), w.clone()
    assert same(quantize(w.mT.contiguous().mT, name), expected)
    wide = torch.zeros(2, 2 * n, 3 * k)
    wide[:, ::2, ::3] = w
    assert same(quantize(wide[:, ::2, ::3], name), expected)
    assert same(quantize(w[:1].expand(2, n, k), name)[1], expected[0])
    learned = torch.nn.Parameter(w)
    assert same(quantize(learned, name), expected)
    assert not any(t.requires_grad for t in quantize(learned, name).tensors)
    assert torch.equal(w, before)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", [*spec.PACKED, *spec.DENSE])
def test_nothing_in_nothing_out(name: str, search: str) -> None:
    for shape in ((0, 128), (0, 4, 128), (2, 0, 128), (3, 0), (2, 3, 0)):
        packed = quantize(torch.zeros(shape), name, search)  # type: ignore[arg-type]
        assert packed.shape == shape
        assert dequantize(packed).shape == shape
        assert packed.scales is None or packed.scales.float().isfinite().all()


@pytest.mark.parametrize("name", spec.DENSE)
def test_dense_is_a_cast(name: str) -> None:
    w = torch.randn(2, 3, 5, dtype=torch.float64)
    packed = quantize(w, name)
    assert packed.format is FORMATS[name]
    assert bit_equal(packed.data, w.to(FORMATS[name].storage))
