"""`route` in Triton's kernel: the same choice and, up to rounding, the same weights as in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moestro
from moestro.errors import InvalidInputError
from moestro.routing import PRESETS, GroupLimit, GroupLimitedRouter, Scoring, TopKRouter, route, triton
from routing.refused import REFUSED
from tolerances import assert_close

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = (None, GroupLimit(4, 2), GroupLimit(4, 2, best=1, excluded=0.0), GroupLimit(4, 3, best=9), GroupLimit(1, 1))


def in_kernel(logits, top_k, scoring, correction=None, groups=None):
    """The kernel's routing, or None where it computes none or leaves values to plain PyTorch."""
    given = (logits, top_k, Scoring.of(scoring), correction, groups)
    with moestro.use(implementation="triton"):
        prepared = triton.prepare(lambda *given: None, *given)
        return None if isinstance(prepared, str) else prepared(*given)


def check(logits, top_k, scoring, correction=None, groups=None):
    """The kernel's routing is what `route` returns, and that of plain PyTorch."""
    logits = logits.to(DEVICE)
    correction = None if correction is None else correction.to(DEVICE)
    found = in_kernel(logits, top_k, scoring, correction, groups)
    assert found is not None
    with moestro.use(implementation="triton"):
        routing = route(logits, top_k, scoring, correction, groups)
    with moestro.use(implementation="torch"):
        expected = route(logits, top_k, scoring, correction, groups)
    for mine in (found, routing):
        assert torch.equal(mine.expert_ids, expected.expert_ids)
        assert_close(mine.routing_weights, expected.routing_weights)
        assert (mine.expert_ids.dtype, mine.routing_weights.dtype) == (torch.int64, torch.float32)
        assert mine.weight_on == expected.weight_on


def logits_like(source: str, shape: tuple[int, int]) -> torch.Tensor:
    logits = torch.randn(shape) * (60 if source == "far" else 2)
    if source == "ties":
        return logits.round()
    if source == "masked":
        logits[torch.rand(shape) < 0.6] = -torch.inf
    return logits


@settings(max_examples=40)
@given(
    preset=st.sampled_from(sorted(PRESETS)),
    num_tokens=st.integers(0, 6),
    size=st.integers(1, 16),
    groups=st.sampled_from(LIMITS),
    source=st.sampled_from(("normal", "ties", "far", "masked")),
    corrected=st.booleans(),
    renormalize=st.sampled_from((False, True, 1.0, 2.0, 3.5)),
    scale=st.sampled_from((1.0, 2.5, -0.3)),
    softcap=st.sampled_from((None, 30.0, 2.0)),
    data=st.data(),
)
def test_any_router(preset, num_tokens, size, groups, source, corrected, renormalize, scale, softcap, data):
    num_experts = 4 * size
    most = num_experts if groups is None else groups.top_groups * num_experts // groups.num_groups
    top_k = data.draw(st.integers(1, min(most, 12)))
    torch.manual_seed(data.draw(st.integers(0, 999)))
    logits = logits_like(source, (num_tokens, num_experts))
    scoring = replace(
        Scoring.of(preset), renormalize=renormalize, scale=scale, logit_scale=scale, logit_softcap=softcap
    )
    check(logits, top_k, scoring, torch.randn(num_experts).round() if corrected else None, groups)


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"sparsemixer"}))
@pytest.mark.parametrize("shared", [1, 3])
def test_shared_experts_have_slots_of_their_own(preset, shared):
    for source in ("normal", "masked"):
        logits = logits_like(source, (5, 9 + shared))
        logits[:, 9:] = torch.randn(5, shared)
        check(logits, 4, replace(Scoring.of(preset), shared_experts=shared, renormalize=True), torch.randn(9))


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (60, 4), (160, 6), (257, 3), (2048, 10)])
def test_sizes_that_are_no_powers_of_two(num_experts, top_k):
    for preset in ("softmax-renormalized", "softmax-topk", "sqrtsoftplus"):
        check(torch.randn(7, num_experts), top_k, preset)


def test_groups_of_odd_sizes():
    for groups, num_experts in ((GroupLimit(3, 2), 15), (GroupLimit(8, 4), 256), (GroupLimit(5, 1), 60)):
        check(
            torch.randn(6, num_experts).round(decimals=1), 5, "sigmoid-renormalized", torch.randn(num_experts), groups
        )


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"sqrtsoftplus", "sparsemixer"}))
def test_where_scores_end(preset):
    """Scores that vanish or saturate tie, and then the larger index wins; nothing overflows."""
    ends = torch.tensor([0.0, -0.0, 80.0, -80.0, 87.4, 88.8, -95.0, -103.9, -104.1, 120.0, -3e38, 3e38])
    for row in (ends, ends[:6], ends[6:], -ends, torch.full((40,), -torch.inf), torch.zeros(17)):
        for k in (1, 3, len(row)):
            check(row.repeat(3, 1), k, preset)
    if Scoring.of(preset).takes_infinity:
        check(torch.tensor([[torch.inf, 1.0, -torch.inf, torch.inf]]), 3, preset)


def test_small_scores_keep_their_digits():
    """Where exp(z) vanishes beside 1, and where the soft-cap's tanh is nearly its argument."""
    logits = torch.linspace(-40, 3, 64)[None].repeat(2, 1)
    check(logits, 64, replace(Scoring("sqrtsoftplus"), renormalize=False))
    check(logits / 1000, 9, replace(Scoring(), logit_softcap=30.0))


def test_rows_apart():
    wide = torch.randn(30, 40)
    for logits in (wide[:, 10:34], wide.t(), wide[:1].expand(9, -1)):
        check(logits, 7, "softmax-renormalized")
        check(logits, 7, "sigmoid", torch.randn(logits.shape[1], dtype=torch.float64))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="an assertion on the device ends its use in this process")
@pytest.mark.parametrize(("logits", "scoring", "correction", "text"), REFUSED)
def test_what_no_router_takes_is_an_error(logits, scoring, correction, text):
    assert in_kernel(logits, 1, scoring, correction) is None
    with moestro.use(implementation="triton"), pytest.raises(InvalidInputError, match=text):
        route(logits, 1, scoring, correction)


class Other(torch.Tensor):
    """An ordinary tensor's memory under another name."""


def test_what_it_leaves_to_plain_torch():
    logits = torch.randn(3, 8, device=DEVICE)
    assert in_kernel(logits.double(), 2, "softmax") is None
    assert in_kernel(logits, 2, replace(Scoring(), shared_experts=1), groups=GroupLimit(7, 2)) is None
    assert in_kernel(torch.randn(3, 100, device=DEVICE), 64, Scoring(shared_experts=1)) is None
    assert in_kernel(logits.clone().requires_grad_(), 2, "softmax") is None
    with torch.no_grad():
        assert in_kernel(logits.clone().requires_grad_(), 2, "softmax") is not None
    assert in_kernel(logits.as_subclass(Other), 2, "softmax") is None
    found = triton.prepare(lambda *given: None, torch.randn(3, 8), 2, Scoring(), None, None)
    assert found == "it computes on NVIDIA GPUs, and its argument is on cpu"


def test_every_run_has_the_same_bits_and_a_token_the_same_in_any_batch():
    logits = torch.randn(9, 50, device=DEVICE)
    first = in_kernel(logits, 6, "softmax-renormalized")
    for rows in (slice(None), slice(3, 4), slice(5, 9)):
        again = in_kernel(logits[rows], 6, "softmax-renormalized")
        assert torch.equal(again.routing_weights, first.routing_weights[rows])
        assert torch.equal(again.expert_ids, first.expert_ids[rows])


def test_modules_of_routers(triton_device):
    for router in (TopKRouter(16, 8, 2), GroupLimitedRouter(16, 8, 2, GroupLimit(4, 2))):
        router = router.to(triton_device)
        x = torch.randn(5, 16, device=triton_device)
        with torch.no_grad():
            routing = router(x)
        with moestro.use(implementation="torch"):
            expected = router(x)
        assert torch.equal(routing.expert_ids, expected.expert_ids)
        assert_close(routing.routing_weights, expected.routing_weights.detach())


def test_numbers_are_floats_however_they_are_written():
    """An integer would be a constant of the kernel that is compiled first, and of those that reuse it."""
    numbers = triton._numbers(Scoring(scale=2, logit_scale=1, epsilon=0), 0.0)
    assert [type(n) for n in numbers] == [float] * len(numbers)
