"""Top-k in the native engine: against the definition on hostile input, in threads, after a fork, at odd addresses."""

from __future__ import annotations

import os
import threading
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

import moestro
from moestro import reference
from moestro.errors import InvalidInputError
from moestro.ops import native
from moestro.ops.topk import cpu
from tolerances import bit_equal

from .engines import needs_engine, output

pytestmark = needs_engine
DTYPES = tuple(native.FLOATS)
SPECIAL = (0.0, -0.0, torch.inf, -torch.inf, 1.0, -1.0, 2.0**-24, -(2.0**-24), 6e4, -6e4)


def scores_like(kind, shape, dtype):
    if kind == "special":
        return torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape)].to(dtype)
    scores = torch.randn(shape, dtype=torch.float64)
    return (scores.round() if kind == "ties" else scores).to(dtype)


def check(scores, k):
    """The engine itself, and the public function forced to it, against the definition."""
    expected = reference.topk(scores.double(), k)
    assert torch.equal(cpu.find(scores, k), expected)
    with moestro.use(implementation="cpu-native"):
        values, indices = moestro.topk(scores, k)
    assert torch.equal(indices, expected)
    assert bit_equal(values, scores.gather(-1, expected))


@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_around_blocks_and_both_ways_to_rank(dtype, kind):
    """Rows around the blocks of 16, k up to and beyond where picking ends and sorting begins, k = E."""
    for num_experts in (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 127, 130, 513):
        scores = scores_like(kind, (3, num_experts), dtype)
        for k in {1, 2, 8, 31, 32, 33, 100, num_experts}:
            if k <= num_experts:
                check(scores, k)


@given(
    num_tokens=st.integers(0, 5),
    num_experts=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(("normal", "ties", "special")),
    data=st.data(),
)
def test_any_scores(num_tokens, num_experts, dtype, kind, data):
    torch.manual_seed(data.draw(st.integers(0, 999)))
    check(scores_like(kind, (num_tokens, num_experts), dtype), data.draw(st.integers(1, num_experts)))


def test_every_finite_number_of_sixteen_bits_and_the_largest_row():
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        every = bits.view(dtype)
        every = every[~torch.isnan(every)][torch.randperm(len(every[~torch.isnan(every)]))][None]
        check(every, every.shape[1])
        check(every, 9)
    check(torch.randn(2, 1 << 16), 16)


def test_rows_that_lie_apart():
    wide = torch.randn(6, 100)
    for scores in (wide[::2, 7:50], wide.t(), wide[:1].expand(4, -1), wide[:, :1].expand(-1, 40), wide.t()[:, :1]):
        check(scores, min(9, scores.shape[1]))
    odd = torch.frombuffer(bytearray(1) + bytearray(wide.numpy().tobytes()), dtype=torch.float32, offset=1)
    check(odd.view(6, 100), 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_anywhere_is_an_error_and_infinity_is_none(dtype, sign):
    for num_experts in (1, 16, 33):
        for place in (0, num_experts // 2, num_experts - 1):
            scores = torch.randn(2, num_experts).to(dtype)
            scores[1, place] = sign * torch.inf
            check(scores, num_experts)
            scores[1, place] = torch.nan * sign
            assert cpu.find(scores, 1) is None
            with pytest.raises(InvalidInputError, match=r"NaN in scores .* Look for NaN in the router's input\.$"):
                moestro.topk(scores, 1)
            with pytest.raises(InvalidInputError, match="weights or correction bias"):
                cpu.topk(scores, 1)


def test_values_are_differentiable():
    scores = torch.randn(3, 20, requires_grad=True)
    assert moestro.explain(moestro.topk, scores, 4).chosen == "cpu-native"
    values, indices = moestro.topk(scores, 4)
    (values * torch.arange(4.0)).sum().backward()
    assert torch.equal(scores.grad, torch.zeros(3, 20).scatter(1, indices, torch.arange(4.0).expand(3, -1)))
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")  # forward mode compiles a decomposition by a deprecated way of PyTorch's
        dual = forward_ad.make_dual(scores.detach(), torch.ones(3, 20))
        assert torch.equal(forward_ad.unpack_dual(moestro.topk(dual, 4)[0]).tangent, torch.ones(3, 4))


class Other(torch.Tensor):
    """An ordinary tensor's memory under another name."""


def test_what_it_leaves_to_torch():
    negative = torch.randn(2, 5, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    reasons = []
    for scores, sentence in (
        (torch.randn(2, 5).as_subclass(Other), "subclass"),
        (negative, "its negative"),
        (torch.empty(2, 5, device="meta"), "is on meta"),
    ):
        first, *_ = moestro.explain(moestro.topk, scores, 2).candidates
        assert first.name == "cpu-native"
        assert sentence in first.reason
    assert "at most 65536 scores" in cpu.supports(torch.empty(1, 65537), 2)
    torch.func.vmap(lambda s: reasons.append(cpu.supports(s, 3)) or s)(torch.randn(4, 2, 9))
    assert "a transform" in reasons.pop()


def test_many_rows_on_several_threads():
    scores = torch.randn(3000, 65).round()
    torch.set_num_threads(1)
    expected = cpu.find(scores, 7)
    torch.set_num_threads(3)
    assert torch.equal(cpu.find(scores, 7), expected)
    scores[2999, 64] = torch.nan
    assert cpu.find(scores, 7) is None


def test_several_python_threads_at_once():
    cases = [(torch.randn(n, 40).round(), k) for n, k in ((1, 3), (700, 8), (2000, 33), (5, 40))]
    expected = [reference.topk(scores, k) for scores, k in cases]
    wrong = []

    def repeat(i):
        torch.set_num_threads(2)
        for _ in range(30):
            if not torch.equal(cpu.find(*cases[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


FORK = """
import os, signal, warnings, torch
from moestro.ops import topk
from moestro.ops.grouping import cpu
warnings.simplefilter("ignore")
torch.set_num_threads(2)
scores, ids = torch.randn(3000, 64), torch.randint(-1, 64, (20000, 8))
def call():  # without operations of PyTorch that are parallel, which wait forever in a child
    order = cpu.group_by_expert(ids, 64)
    return [t.numpy().tobytes() for t in (topk.cpu.find(scores, 8), order.token_ids, order.inverse, order.offsets)]
expected = call()
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(0 if call() == expected else 1)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_children_of_a_fork_rank_and_group_too():
    assert output("-c", FORK).split() == ["0"]


def test_an_engine_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(native, "problem", "blocked for a test")
    scores = torch.randn(2, 5)
    explained = moestro.explain(moestro.topk, scores, 2)
    assert explained.chosen == "torch"
    assert "the native engine is not there (blocked for a test)" in explained.candidates[0].reason
    assert torch.equal(moestro.topk(scores, 2)[1], reference.topk(scores, 2))
