"""Triton's interpreter as these tests run it: quicker, and what it computes and refuses is the same."""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest
import torch

from moestro.ops import gpu

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.runtime import interpreter

import interpreted

pytestmark = pytest.mark.skipif(not gpu.interpreted(), reason="kernels run on a GPU")
N = 16


@triton.jit
def of_largest(row, scale: tl.constexpr):
    return tl.exp(row - tl.max(row, axis=0)) * scale


@triton.jit
def shares_kernel(x, y, ROWS: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    for step in tl.static_range(ROWS):
        row = of_largest(tl.load(x + at + step * 2 * N), 2.0)
        tl.store(y + at + step * 2 * N, tl.cumsum(row / tl.sum(row, axis=0), axis=0))


@triton.jit
def broken_kernel(x):
    tl.static_assert(of_largest(tl.load(x + tl.arange(0, 16)), 1.0).shape == (7,))


@triton.jit
def double_kernel(x):
    tl.store(x, tl.load(x) + tl.load(x))


def launch(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    shares_kernel[(2,)](x, y, len(x) // 2, N)
    return y


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[FunctionType]:
    """For whom Triton goes through its language, from now on."""
    met: list[FunctionType] = []
    whole = interpreted._replace_all
    monkeypatch.setattr(interpreted, "_replace_all", lambda function: met.append(function) or whole(function))
    return met


def test_bits_are_those_of_triton_as_it_is(walks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, N)
    once, few = [launch(x) for _ in range(3)][2], len(walks)
    monkeypatch.setattr(interpreter, "_patch_lang", interpreted._replace_all)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=True))
    walks.clear()
    assert torch.equal(launch(x), once)
    assert torch.allclose(once[:, -1], torch.ones(6))
    assert few < len(walks)


def test_a_launch_goes_through_the_language_once_and_puts_it_back(walks: list[FunctionType]) -> None:
    x, load, total, cast = torch.randn(6, N), tl.load, tl.reduce, tl.tensor.to
    launch(x)  # a core that Triton never puts back is replaced here at the latest
    for _ in range(3):
        walks.clear()
        launch(x)
        assert len(walks) == 1
        assert (tl.load, tl.reduce, tl.tensor.to) == (load, total, cast)
        assert not interpreted.is_replaced(tl)


SCALARS = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float8e4nv]


def test_types_and_tensors_are_those_that_triton_makes() -> None:
    """The second of each is a copy; types of one name may differ otherwise."""
    plain = interpreted.ORIGINAL
    for element in (*SCALARS, *(tl.pointer_type(each) for each in SCALARS)):
        assert interpreter._get_np_dtype(element) == plain.numpy_type(element)
        for shape in ([4], [4, 16], [1, 1, 8], tl.tuple([tl.constexpr(2), tl.constexpr(32)])):
            for _ in range(2):
                block, own = tl.block_type(element, shape), object.__new__(tl.block_type)
                plain.block(own, element, shape)
                assert vars(block).keys() == vars(own).keys()
                assert (block.element_ty, block.name, block.numel) == (element, own.name, own.numel)
                assert list(block.shape) == list(own.shape)
                assert interpreter._get_np_dtype(block) == plain.numpy_type(block)
                made, as_made = tl.tensor("handle", block), object.__new__(tl.tensor)
                plain.tensor(as_made, "handle", block)
                assert vars(made).keys() == vars(as_made).keys()
                assert (made.handle, made.type, made.dtype) == ("handle", block, element)
                assert (str(made.shape), made.numel.value) == (str(as_made.shape), as_made.numel.value)
    other = tl.pointer_type(tl.float32, address_space=3)
    assert tl.block_type(other, [4]).element_ty is other
    assert tl.tensor("handle", other).dtype is other


@pytest.mark.parametrize("shape", [[3], [4, 0.5], [1 << 21], []])
def test_shapes_that_triton_refuses(shape: list[Any]) -> None:
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            tl.block_type(tl.float32, shape)


def test_what_a_kernel_raises_leaves_the_language_as_it_was() -> None:
    x, load = torch.randn(6, N), tl.load
    expected = launch(x)
    for _ in range(2):
        with pytest.raises(Exception, match="AssertionError"):
            broken_kernel[(1,)](x)
        assert tl.load is load
        assert torch.equal(launch(x), expected)


def test_an_overflow_is_asserted_where_assertions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    builder, most = interpreter.interpreter_builder, torch.iinfo(torch.int32).max
    assert not builder.options.debug
    assert not builder.options.sanitize_overflow
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True, sanitize_overflow=True))
    double_kernel[(1,)](torch.tensor([most // 2], dtype=torch.int32))
    with pytest.raises(Exception, match="overflow detected"):
        double_kernel[(1,)](torch.tensor([most], dtype=torch.int32))
