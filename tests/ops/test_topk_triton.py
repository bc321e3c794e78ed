"""Top-k in Triton's kernels: against the definition, bit for bit, on hostile input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moestro
from moestro import reference
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.ops.topk import triton, tuning
from tolerances import bit_equal

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (0.0, -0.0, torch.inf, -torch.inf, 1.0, -1.0, 2.0**-24, -(2.0**-24), 6e4, -6e4)


def scores_like(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    if kind == "special":
        return torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape)].to(dtype)
    scores = torch.randn(shape)
    return (scores.round() if kind == "ties" else scores).to(dtype)


def check(scores: torch.Tensor, k: int) -> None:
    expected = reference.topk(scores.double(), k)
    with moestro.use(implementation="triton"):
        values, indices = moestro.topk(scores.to(DEVICE), k)
    assert torch.equal(indices.cpu(), expected)
    assert bit_equal(values.cpu(), scores.gather(-1, expected))


@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_around_powers_of_two(dtype: torch.dtype, kind: str) -> None:
    for num_experts in (1, 2, 3, 31, 32, 33, 160):
        scores = scores_like(kind, (9, num_experts), dtype)
        for k in {1, 3, 8, min(num_experts, tuning.MOST_TAKEN)}:
            if k <= num_experts:
                check(scores, k)


@given(
    num_tokens=st.integers(0, 9),
    num_experts=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(("normal", "ties", "special")),
    data=st.data(),
)
@settings(max_examples=30)
def test_any_scores(num_tokens: int, num_experts: int, dtype: torch.dtype, kind: str, data) -> None:
    torch.manual_seed(data.draw(st.integers(0, 999)))
    k = data.draw(st.integers(1, min(num_experts, 10)))
    check(scores_like(kind, (num_tokens, num_experts), dtype), k)


def test_every_finite_number_of_sixteen_bits() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        every = bits.view(dtype)
        every = every[~torch.isnan(every)]
        every = every[torch.randperm(len(every))]
        check(every[: len(every) // 2048 * 2048].view(-1, 2048), 5)


def test_many_experts() -> None:
    for num_experts in (1025, 2047, tuning.MOST_EXPERTS):
        check(scores_like("ties", (3, num_experts), torch.float32), 9)


def test_rows_that_lie_apart() -> None:
    wide = torch.randn(6, 100)
    for scores in (wide[::2, 7:50], wide.t(), wide[:1].expand(4, -1), wide[:, :1].expand(-1, 40), wide.t()[:, :1]):
        check(scores, min(9, scores.shape[1]))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="an assertion on the device ends its use in this process")
def test_nan_is_an_error_before_anything_is_ranked() -> None:
    with moestro.use(implementation="triton"), pytest.raises(InvalidInputError, match="NaN among scores"):
        moestro.topk(torch.tensor([[0.0, torch.nan]]), 1)


def test_values_are_differentiable(triton_device: torch.device) -> None:
    scores = torch.randn(3, 20, requires_grad=True, device=triton_device)
    assert moestro.explain(moestro.topk, scores, 4).chosen == "triton"
    values, indices = moestro.topk(scores, 4)
    factors = torch.arange(4.0, device=triton_device)
    (values * factors).sum().backward()
    assert torch.equal(scores.grad, torch.zeros_like(scores).scatter(1, indices, factors.expand(3, -1)))


def test_what_it_leaves_to_others(triton_device: torch.device) -> None:
    row = torch.zeros(1, 1, device=triton_device)
    assert "float64" in str(triton.why_unsupported(row.double(), 1))
    assert f"at most {tuning.MOST_EXPERTS} scores" in str(
        triton.why_unsupported(row.expand(1, tuning.MOST_EXPERTS + 1), 1)
    )
    assert "one score after another" in str(triton.why_unsupported(row.expand(1, 100), tuning.MOST_TAKEN + 1))
    with pytest.raises(UnsupportedError, match="float64"):
        moestro.topk(row.double(), 1)


def test_tensors_on_the_cpu_are_nothing_for_it_unless_forced() -> None:
    assert "is on cpu" in str(triton.why_unsupported(torch.zeros(4, 2), 1))
    assert moestro.explain(moestro.topk, torch.zeros(4, 2), 1).chosen != "triton"
