"""The comparison that every other test trusts can fail, in each of the ways it claims to."""

from __future__ import annotations

import pytest
import torch

from moestro.tolerances import disagreement, relative_error, too_far
from tolerances import assert_close, bit_equal, tolerance

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_are_tied_to_the_dtype(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    bound = tolerance(dtype)
    assert eps <= bound.rms <= bound.worst <= 100 * eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_one_entry_too_far_fails_at_any_scale(dtype: torch.dtype, scale: float) -> None:
    expected = torch.randn(1000, dtype=torch.float64) * scale
    worst = expected.abs().max() * tolerance(dtype).worst
    actual = expected.clone()
    actual[17] += 0.9 * worst
    assert_close(actual, expected, dtype)
    actual[17] += 0.2 * worst
    assert "worst error" in str(disagreement(actual, expected, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_entry_a_little_off_fails_by_rms(dtype: torch.dtype) -> None:
    expected = torch.ones(1000, dtype=torch.float64)
    expected[0] = 10.0
    actual = expected + 3 * tolerance(dtype).rms
    assert "rms error" in str(disagreement(actual, expected, dtype))


def test_shapes_and_non_finite_values_must_match() -> None:
    a = torch.tensor([1.0, float("nan"), float("inf")])
    assert_close(a, a.clone())
    for other in (a[:2], torch.tensor([1.0, 1.0, float("inf")]), torch.tensor([1.0, float("nan"), -float("inf")])):
        assert disagreement(a, other) is not None
        with pytest.raises(AssertionError):
            assert_close(a, other)


def test_zero_must_be_zero() -> None:
    assert_close(torch.zeros(3), torch.zeros(3))
    assert disagreement(torch.full((3,), 1e-30), torch.zeros(3)) is not None


def test_each_row_is_within_its_own_bound() -> None:
    expected = torch.randn(4, 100) * torch.tensor([[1e-3], [1.0], [1e3], [1.0]])
    off = torch.randn(4, 100)
    off *= expected.norm(dim=-1, keepdim=True) / off.norm(dim=-1, keepdim=True)
    assert too_far(expected + 0.099 * off, expected, 0.1) is None
    for row in range(4):
        actual = expected.clone()
        actual[row] += 0.101 * off[row]
        assert f"in row {row}, over 0.1" in str(too_far(actual, expected, 0.1))
        actual[row, 3] = float("nan")
        assert f"in row {row}, over 0.1" in str(too_far(actual, expected, 0.1))
    assert "shape" in str(too_far(expected[:3], expected, 0.1))
    assert relative_error(expected * 1.25, expected) == pytest.approx(0.25)


def test_empty_tensors_are_equal() -> None:
    assert_close(torch.zeros(0, 4), torch.zeros(0, 4))
    assert disagreement(torch.zeros(0, 4), torch.zeros(0, 5)) is not None


def test_bit_equal_sees_signs_and_nan() -> None:
    assert bit_equal(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]))
    assert not bit_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not bit_equal(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))
