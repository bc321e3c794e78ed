"""`route` in the native engine: the same choice and, up to rounding, the same weights as in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moestro
from moestro.errors import InvalidInputError
from moestro.ops import native
from moestro.routing import PRESETS, GroupLimit, GroupLimitedRouter, Scoring, TopKRouter, cpu, route
from routing.refused import REFUSED
from tolerances import assert_close

pytestmark = pytest.mark.skipif(native.module is None, reason=str(native.problem))

NATIVE = sorted(name for name, scoring in PRESETS.items() if scoring.score in ("softmax", "sigmoid"))
LIMITS = (None, GroupLimit(4, 2), GroupLimit(4, 2, best=1, excluded=0.0), GroupLimit(4, 3, best=9), GroupLimit(1, 1))


def in_engine(logits, top_k, scoring, correction=None, groups=None):
    """The engine's routing, or None where it computes none."""
    given = (logits, top_k, Scoring.of(scoring), correction, groups)
    prepared = cpu.prepare(lambda *given: None, *given)
    return None if isinstance(prepared, str) else prepared(*given)


def check(logits, top_k, scoring, correction=None, groups=None):
    """The engine's routing is what `route` returns, and that of plain PyTorch."""
    found = in_engine(logits, top_k, scoring, correction, groups)
    assert found is not None
    routing = route(logits, top_k, scoring, correction, groups)
    with moestro.use(implementation="torch"):
        expected = route(logits, top_k, scoring, correction, groups)
    for mine in (found, routing):
        assert torch.equal(mine.expert_ids, expected.expert_ids)
        assert_close(mine.routing_weights, expected.routing_weights)
        assert (mine.expert_ids.dtype, mine.routing_weights.dtype) == (torch.int64, torch.float32)
        assert mine.weight_on == expected.weight_on


@settings(max_examples=300)
@given(
    preset=st.sampled_from(NATIVE),
    num_tokens=st.integers(0, 6),
    size=st.integers(1, 40),
    groups=st.sampled_from(LIMITS),
    source=st.sampled_from(("normal", "ties", "far", "masked")),
    corrected=st.booleans(),
    renormalize=st.booleans(),
    scale=st.sampled_from((1.0, 2.5, -0.3)),
    data=st.data(),
)
def test_any_router(preset, num_tokens, size, groups, source, corrected, renormalize, scale, data):
    num_experts = 4 * size
    most = num_experts if groups is None else groups.top_groups * num_experts // groups.num_groups
    top_k = data.draw(st.integers(1, most))
    torch.manual_seed(data.draw(st.integers(0, 999)))
    logits = torch.randn(num_tokens, num_experts) * (60 if source == "far" else 2)
    if source == "ties":
        logits = logits.round()
    elif source == "masked":
        logits[torch.rand(logits.shape) < 0.6] = -torch.inf
    scoring = replace(Scoring.of(preset), renormalize=renormalize, scale=scale, logit_scale=scale)
    check(logits, top_k, scoring, torch.randn(num_experts).round() if corrected else None, groups)


@pytest.mark.parametrize("preset", NATIVE)
def test_where_scores_end(preset):
    """Scores that vanish or saturate tie, and then the larger index wins; nothing overflows."""
    ends = torch.tensor([0.0, -0.0, 80.0, -80.0, 87.4, 88.8, -95.0, -103.9, -104.1, 120.0, -3e38, 3e38])
    for row in (ends, ends[:6], ends[6:], -ends, torch.full((40,), -torch.inf), torch.zeros(17)):
        logits = row.repeat(3, 1)
        for k in (1, 3, len(row)):
            check(logits, k, preset)
    if Scoring.of(preset).takes_infinity:
        check(torch.tensor([[torch.inf, 1.0, -torch.inf, torch.inf]]), 3, preset)


def test_many_tokens_on_several_threads_and_rows_apart():
    wide = torch.randn(3000, 100)
    torch.set_num_threads(3)
    for logits in (wide, wide[:, 10:74], wide.t(), wide[:1].expand(9, -1)):
        check(logits, 7, "softmax-renormalized")
        check(logits, 7, "sigmoid", torch.randn(logits.shape[1], dtype=torch.float64))
    odd = torch.frombuffer(bytearray(1) + bytearray(wide.numpy().tobytes()), dtype=torch.float32, offset=1)
    check(odd[100:].view(-1, 100), 7, "softmax", odd[:100])


@pytest.mark.parametrize(("logits", "scoring", "correction", "text"), REFUSED)
def test_what_no_router_takes_is_the_same_error(logits, scoring, correction, text):
    assert in_engine(logits, 1, scoring, correction) is None
    with pytest.raises(InvalidInputError, match=text):
        route(logits, 1, scoring, correction)


class Other(torch.Tensor):
    """An ordinary tensor's memory under another name."""


def test_what_it_leaves_to_plain_torch():
    logits = torch.randn(3, 8)
    for scoring in ("sqrtsoftplus", "sparsemixer", Scoring(logit_softcap=5.0), Scoring(renormalize=2.0)):
        assert in_engine(logits, 2, scoring) is None
    assert in_engine(logits, 2, Scoring(shared_experts=1)) is None
    assert in_engine(logits.double(), 2, "softmax") is None
    assert in_engine(logits.as_subclass(Other), 2, "softmax") is None
    assert in_engine(logits.clone().requires_grad_(), 2, "softmax") is None
    with torch.no_grad():
        assert in_engine(logits.clone().requires_grad_(), 2, "softmax") is not None
    for name in ("torch", "branchless", "reference"):
        with moestro.use(implementation=name):
            assert moestro.explain(route, logits, 2, "softmax").chosen == name
    for name in ("cpu-native", "cpu-portable"):
        with moestro.use(implementation=name):
            assert moestro.explain(route, logits, 2, "softmax").chosen == "cpu-native"


def test_weights_are_trained_as_before():
    for router in (TopKRouter(16, 8, 2), GroupLimitedRouter(16, 8, 2, GroupLimit(4, 2))):
        x = torch.randn(5, 16)
        routing = router(x)
        assert routing.routing_weights.requires_grad
        with torch.no_grad():
            again = router(x)
        assert torch.equal(again.expert_ids, routing.expert_ids)
        assert_close(again.routing_weights, routing.routing_weights.detach())
