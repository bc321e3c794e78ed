"""Properties of `route` and of the router modules, against the reference and against their definitions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moestro
from moestro import reference
from moestro.errors import InvalidInputError
from moestro.routing import PRESETS, GroupLimit, GroupLimitedRouter, Scoring, TopKRouter, route, weigh
from routing.families import dense

INF = float("inf")
quick = settings(max_examples=40, deadline=None, derandomize=True)


def logits_of(seed: int, T: int, E: int, ties: bool = False) -> torch.Tensor:
    z = torch.randn(T, E, generator=torch.Generator().manual_seed(seed)) * 3
    return z.round() if ties else z


shapes = st.tuples(st.integers(0, 40), st.integers(1, 33)).flatmap(
    lambda te: st.tuples(st.just(te[0]), st.just(te[1]), st.integers(1, te[1]), st.integers(0, 10**6), st.booleans())
)


def softmax_topk(logits: torch.Tensor, top_k: int, renormalize: bool) -> moestro.Routing:
    """The most common router: softmax over all experts, then the top k, optionally renormalised over them."""
    scores = torch.softmax(logits.float(), dim=-1)
    ids = reference.topk(scores, top_k)
    weights = scores.gather(-1, ids)
    return moestro.Routing(ids, weights / weights.sum(-1, keepdim=True) if renormalize else weights)


def group_limited_topk(
    logits: torch.Tensor, correction: torch.Tensor, *, top_k: int, num_groups: int, top_groups: int, scale: float
) -> moestro.Routing:
    """DeepSeek-V3: sigmoid scores; `correction` [E] decides who is selected and never reaches the weights."""
    scores = torch.sigmoid(logits.float())
    biased = scores + correction
    by_group = biased.reshape(biased.shape[0], num_groups, biased.shape[1] // num_groups)
    group_score = by_group.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(group_score, dtype=torch.bool).scatter(-1, reference.topk(group_score, top_groups), True)
    ids = reference.topk(by_group.masked_fill(~kept[..., None], -torch.inf).flatten(-2), top_k)
    weights = scores.gather(-1, ids)
    return moestro.Routing(ids, weights / weights.sum(-1, keepdim=True) * scale)


@quick
@given(shapes, st.booleans())
def test_softmax_is_the_reference(shape, renormalize):
    T, E, K, seed, ties = shape
    z = logits_of(seed, T, E, ties)
    ours = route(z, K, "softmax-renormalized" if renormalize else "softmax")
    expected = softmax_topk(z, K, renormalize)
    assert torch.equal(ours.expert_ids, expected.expert_ids)
    torch.testing.assert_close(ours.routing_weights, expected.routing_weights, rtol=1e-6, atol=0)


@quick
@given(st.integers(1, 6), st.integers(2, 6), st.integers(0, 30), st.integers(0, 10**6), st.booleans(), st.data())
def test_group_limited_is_the_reference(G, size, T, seed, ties, data):
    top_groups = data.draw(st.integers(1, G))
    K = data.draw(st.integers(1, top_groups * size))
    z = logits_of(seed, T, G * size, ties)
    correction = logits_of(seed + 1, 1, G * size, ties)[0]
    scoring = replace(Scoring.of("sigmoid-renormalized"), scale=2.5)
    ours = route(z, K, scoring, correction, GroupLimit(G, top_groups))
    expected = group_limited_topk(z, correction, top_k=K, num_groups=G, top_groups=top_groups, scale=2.5)
    assert torch.equal(ours.expert_ids, expected.expert_ids)
    torch.testing.assert_close(ours.routing_weights, expected.routing_weights, rtol=1e-6, atol=0)
    groups_used = [len(set((row // size).tolist())) for row in ours.expert_ids]
    assert all(g <= top_groups for g in groups_used)


in_plain_torch = moestro.use(implementation="torch")
"""For the same bits on two ways; the native engine's are equal up to rounding (test_routing_cpu.py)."""


@quick
@given(shapes, st.sampled_from(sorted(PRESETS)))
@in_plain_torch
def test_correction_never_reaches_the_weights(shape, preset):
    """Whatever the correction selects, the weights are those that the same experts have without any correction."""
    T, E, K, seed, _ = shape
    z = logits_of(seed, T, E)
    correction = logits_of(seed + 1, 1, E)[0] * 10
    ours = route(z, K, preset, correction)
    plain = weigh(z, ours.expert_ids, preset)
    assert torch.equal(ours.routing_weights, plain.routing_weights)
    assert torch.equal(route(z, K, preset, torch.full((E,), 0.25)).routing_weights.isnan().any(), torch.tensor(False))


def test_correction_gets_no_gradient_and_logits_do():
    z = logits_of(0, 6, 8).requires_grad_()
    correction = torch.randn(8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    route(z, 3, "sigmoid", correction).routing_weights.sum().backward()
    assert correction.grad is None
    assert (z.grad != 0).sum() == 6 * 3


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_gradients_are_right(preset):
    z = logits_of(3, 4, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: route(v, 3, preset).routing_weights, (z,))


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_gradients_stay_finite_with_masked_and_extreme_logits(preset):
    z = torch.tensor([[-INF, 2.0, -300.0, 1.0], [-INF, -INF, -INF, -INF], [1e4, -1e4, 0.0, -INF]]).requires_grad_()
    routing = route(z, 2, preset)
    assert torch.isfinite(routing.routing_weights).all()
    routing.routing_weights.sum().backward()
    assert torch.isfinite(z.grad).all()


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("correction", [None, torch.tensor([9.0, 0.0, 0.0, 9.0, 0.0, 0.0])])
@pytest.mark.parametrize("groups", [None, GroupLimit(3, 2), GroupLimit(3, 2, best=1, excluded=0.0)])
def test_masked_experts_are_never_selected(preset, correction, groups):
    z = logits_of(5, 30, 6)
    z[:, 0] = -INF
    z[::3, 3] = -INF
    routing = route(z, 4, preset, correction, groups)
    ids, used = routing.expert_ids, routing.expert_ids >= 0
    assert not (z.gather(1, ids.clamp(min=0))[used] == -INF).any()
    assert (routing.routing_weights[~used] == 0).all()
    if groups is None:
        assert used.all()


def test_a_group_with_one_live_expert_beats_masked_groups():
    z = torch.tensor([[-INF, 0.0, -INF, -INF, -INF, -INF]])
    assert route(z, 1, "sigmoid", groups=GroupLimit(3, 1)).expert_ids.tolist() == [[1]]


def test_fewer_experts_than_slots_leave_empty_slots():
    z = torch.tensor([[1.0, -INF, 2.0], [-INF, -INF, -INF]])
    for preset in PRESETS:
        routing = route(z, 3, preset)
        assert routing.expert_ids.tolist() == [[2, 0, -1], [-1, -1, -1]]
        assert routing.routing_weights[1].tolist() == [0, 0, 0]
    renormalized = route(z, 3, "softmax-topk").routing_weights[0]
    torch.testing.assert_close(renormalized[:2], torch.softmax(torch.tensor([2.0, 1.0]), 0))


def test_a_mask_under_a_softcap_still_masks():
    scoring = Scoring("softmax", logit_softcap=1.0)
    z = torch.tensor([[-INF, 0.0, 1.0]])
    routing = route(z, 3, scoring)
    assert routing.expert_ids.tolist() == [[2, 1, -1]]
    torch.testing.assert_close(routing.routing_weights[0, :2], torch.softmax(torch.tanh(torch.tensor([1.0, 0.0])), 0))


def test_definitions_by_hand():
    z = torch.tensor([[2.0, -1.0, 0.5, 3.0]])
    p = torch.softmax(z, -1)[0]
    top = p[[3, 0]]
    s = torch.sigmoid(z)[0]
    q = torch.log1p(torch.exp(z)).sqrt()[0]
    cap = 1.5 * torch.tanh(z * 0.5 / 1.5)[0]
    expected = {
        "softmax": top,
        "softmax-renormalized": top / top.sum(),
        "softmax-topk": torch.softmax(z[0, [3, 0]], -1),
        "sigmoid": s[[3, 0]],
        "sigmoid-renormalized": s[[3, 0]] / s[[3, 0]].sum(),
        "sqrtsoftplus": q[[3, 0]] / q[[3, 0]].sum(),
        "llama4": s[[3, 0]],
        Scoring(renormalize=2.0, scale=3.0): 3 * top / top.norm(),
        Scoring(renormalize=True, epsilon=0.5): top / (top.sum() + 0.5),
        Scoring(renormalize=True, floor=2.0): top / 2,
        Scoring("sigmoid", logit_scale=0.5, logit_softcap=1.5): torch.sigmoid(cap)[[3, 0]],
    }
    for scoring, weights in expected.items():
        routing = route(z, 2, scoring)
        assert routing.expert_ids.tolist() == [[3, 0]]
        torch.testing.assert_close(routing.routing_weights[0], weights, rtol=1e-6, atol=0)
    assert route(z, 2, "llama4").weight_on == "input"


def test_two_orders_of_softmax_are_two_models():
    z = logits_of(0, 20, 8)
    before, after = route(z, 3, "softmax"), route(z, 3, "softmax-topk")
    assert torch.equal(before.expert_ids, after.expert_ids)
    assert (before.routing_weights < after.routing_weights).all()
    assert (before.routing_weights.sum(-1) < 1).all()


def test_sigmoid_saturates_but_logits_do_not():
    z = torch.tensor([[30.0, 40.0, 20.0]])
    assert route(z, 1, Scoring("sigmoid", select_on="logits")).expert_ids.tolist() == [[1]]
    assert route(z, 1, Scoring("sigmoid")).expert_ids.tolist() == [[2]]  # three scores of 1.0: the larger index


def test_shared_experts_get_slots_and_count_in_the_sum():
    z = logits_of(0, 10, 6)
    scoring = Scoring("sigmoid", renormalize=True, shared_experts=2)
    correction = torch.zeros(4)
    assert TopKRouter(3, 4, 2, scoring).num_experts == 6
    routing = route(z, 2, scoring, correction)
    assert (routing.expert_ids[:, 2:] == torch.tensor([4, 5])).all()
    assert (routing.expert_ids[:, :2] < 4).all()
    torch.testing.assert_close(routing.routing_weights.sum(-1), torch.ones(10))


def test_excluded_zero_beats_a_negative_choice():
    """Groups of two; the best group's second expert has a negative score plus correction."""
    z = torch.tensor([[4.0, 0.0, 0.0, 0.0]])
    correction = torch.tensor([1.0, -0.9, -3.0, -0.45])
    inside = route(z, 2, "sigmoid", correction, GroupLimit(2, 1))
    outside = route(z, 2, "sigmoid", correction, GroupLimit(2, 1, excluded=0.0))
    assert inside.expert_ids.tolist() == [[0, 1]]
    assert outside.expert_ids.tolist() == [[0, 3]]


@quick
@given(shapes, st.sampled_from(sorted(PRESETS)))
@in_plain_torch
def test_compiled_path_and_eager_agree(shape, preset):
    """The path without control flow on data (what compile and accelerators run) and the CPU's shortcut."""
    T, E, K, seed, ties = shape
    z = logits_of(seed, T, E, ties)
    z[::2, 0] = -INF
    eager = route(z, K, preset)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        branchless = route(z, K, preset)
    assert torch.equal(eager.expert_ids, branchless.expert_ids)
    assert torch.equal(eager.routing_weights, branchless.routing_weights)


@pytest.mark.parametrize("preset", ["softmax-topk", "sqrtsoftplus", "sparsemixer"])
def test_compile_and_export_with_dynamic_tokens(preset):
    torch.manual_seed(0)
    plain = TopKRouter(12, 8, 2, preset, bias=True, correction_bias=True)
    limited = GroupLimitedRouter(12, 8, 2, GroupLimit(4, 2))
    for router in (plain, limited):
        compiled = torch.compile(router, fullgraph=True, dynamic=True, backend="eager")
        tokens = torch.export.Dim("tokens")
        exported = torch.export.export(router, (torch.randn(5, 12),), dynamic_shapes=({0: tokens},)).module()
        for T in (2, 9, 33):
            x = torch.randn(T, 12)
            expected = router(x)
            for other in (compiled(x), exported(x)):
                assert torch.equal(other.expert_ids, expected.expert_ids)
                torch.testing.assert_close(other.routing_weights, expected.routing_weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    torch.manual_seed(0)
    router = TopKRouter(12, 8, 2).to(dtype)
    x = torch.randn(2, 3, 12).to(dtype)
    routing = router(x)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert routing.routing_weights.dtype == wide
    expected = route(x.reshape(6, 12).to(wide) @ router.weight.to(wide).T, 2)
    assert torch.equal(routing.expert_ids, expected.expert_ids)
    torch.testing.assert_close(routing.routing_weights, expected.routing_weights)


def test_autocast_leaves_the_router_in_float32():
    torch.manual_seed(0)
    router, x = TopKRouter(64, 32, 4, bias=True), torch.randn(50, 64)
    expected = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(x)
    assert torch.equal(routing.expert_ids, expected.expert_ids)
    assert torch.equal(routing.routing_weights, expected.routing_weights)


def test_parameters_and_state():
    torch.manual_seed(0)
    router = GroupLimitedRouter(12, 8, 2, GroupLimit(4, 2), bias=True)
    assert {k: list(v.shape) for k, v in router.state_dict().items()} == {
        "weight": [8, 12],
        "bias": [8],
        "correction_bias": [8],
    }
    assert [n for n, _ in router.named_parameters()] == ["weight", "bias"]
    router.correction_bias[3] = 100.0
    assert (router(torch.randn(9, 12)).expert_ids == 3).any(-1).all()
    assert "num_experts=8" in repr(router)
    assert "Scoring(score='sigmoid', renormalize=True, epsilon=1e-20)" in repr(router)


def test_edges():
    torch.manual_seed(0)
    router = TopKRouter(4, 1, 1)
    assert router(torch.randn(3, 4)).routing_weights.tolist() == [[1.0]] * 3
    everyone = TopKRouter(4, 5, 5)(torch.randn(3, 4))
    assert everyone.expert_ids.sort(-1).values.tolist() == [[0, 1, 2, 3, 4]] * 3
    for preset in PRESETS:
        empty = TopKRouter(4, 5, 2, preset)(torch.randn(0, 4))
        assert list(empty.expert_ids.shape) == [0, 2]
    assert list(GroupLimitedRouter(4, 6, 2, GroupLimit(3, 1))(torch.randn(0, 4)).expert_ids.shape) == [0, 2]
    assert GroupLimitedRouter(4, 3, 1, GroupLimit(3, 1))(torch.randn(2, 4)).top_k == 1  # groups of one


def test_infinite_logits():
    z = torch.tensor([[0.0, INF, 1.0]])
    assert route(z, 1, "sigmoid").routing_weights.tolist() == [[1.0]]
    assert route(z, 1, Scoring("softmax", logit_softcap=30.0)).expert_ids.tolist() == [[1]]
    with pytest.raises(InvalidInputError, match=r"\[route\] got a logit of inf \(token 0, expert 1\)"):
        route(z, 1, "softmax")


def _nan(preset):
    return lambda: route(torch.tensor([[0.0, 1.0], [float("nan"), 0.0]]), 1, preset)


BAD = {
    "nan": (_nan("softmax"), r"\[route\] got a logit of nan \(token 1, expert 0\); needs logits that are not NaN"),
    "nan sigmoid": (_nan("sigmoid"), r"\[route\] got a logit of nan .* needs logits that are not NaN \("),
    "nan correction": (
        lambda: route(torch.zeros(2, 3), 1, "sigmoid", torch.tensor([0.0, float("nan"), 0.0])),
        r"\[route\] got NaN or infinity in the correction bias",
    ),
    "k > e": (lambda: TopKRouter(4, 2, 3), r"\[TopKRouter\] got .*top_k=3; needs .*top_k <= num_experts\. Lower top_k"),
    "k > e, function": (lambda: route(torch.zeros(1, 2), 3), r"\[route\] got top_k=3 with 2 experts"),
    "k = 0": (lambda: route(torch.zeros(1, 2), 0), r"\[route\] got top_k=0"),
    "shape": (
        lambda: route(torch.zeros(2), 1),
        r"\[route\] got logits \[2\].*needs floating-point logits \[num_tokens",
    ),
    "integer": (lambda: route(torch.zeros(2, 2).long(), 1), r"\[route\] got logits .*int64"),
    "x": (lambda: TopKRouter(4, 2, 1)(torch.zeros(3, 5)), r"\[TopKRouter\] got x \[3, 5\].*needs .*\[\.\.\., 4\]"),
    "correction": (
        lambda: route(torch.zeros(2, 3), 1, "sigmoid", torch.zeros(2)),
        r"\[route\] got correction \[2\]; needs \[3\]",
    ),
    "groups": (
        lambda: GroupLimitedRouter(4, 10, 2, GroupLimit(4, 2)),
        r"\[GroupLimit\] got num_experts=10 .*needs num_experts divisible by num_groups",
    ),
    "room": (lambda: GroupLimitedRouter(4, 8, 3, GroupLimit(4, 1)), r"\[GroupLimit\] got .*top_k=3"),
    "top_groups": (lambda: GroupLimit(4, 5), r"\[GroupLimit\] got .*top_groups=5.*needs 1 <= top_groups"),
    "preset": (
        lambda: TopKRouter(4, 2, 1, "softmaxx"),
        r"\[Scoring\] got 'softmaxx'; needs a Scoring or one of softmax",
    ),
    "score": (lambda: Scoring("tanh"), r"\[Scoring\] got score='tanh'; needs 'softmax' or 'sigmoid'"),
    "cap": (
        lambda: Scoring(logit_softcap=0.0),
        r"\[Scoring\] got logit_softcap=0\.0; needs None or a finite cap above",
    ),
    "order": (lambda: Scoring(renormalize=0.5), r"\[Scoring\] got renormalize=0\.5"),
    "scale": (lambda: Scoring(scale=INF), r"\[Scoring\] got scale=inf"),
    "sparsemixer": (lambda: Scoring("sparsemixer"), r"\[Scoring\] got select_on='scores'; needs \"logits\""),
    "weigh": (lambda: weigh(torch.zeros(1, 2), torch.tensor([[2]])), r"\[weigh\] got expert_ids from 2 to 2"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_errors_name_the_way_out(case):
    call, text = BAD[case]
    with pytest.raises(InvalidInputError, match=text):
        call()


def test_compiled_code_asserts_on_nan():
    router = TopKRouter(4, 3, 1)
    compiled = torch.compile(router, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match=r"\[route\] logits must not be NaN"):
        compiled(torch.full((2, 4), float("nan")))


@in_plain_torch
def test_weigh_takes_empty_slots():
    z = logits_of(0, 3, 5)
    ids = torch.tensor([[0, -1], [4, 2], [-1, -1]])
    routing = weigh(z, ids, "softmax-renormalized")
    assert torch.equal(routing.expert_ids, ids)
    assert routing.routing_weights[0].tolist() == [1.0, 0.0]
    assert routing.routing_weights[2].tolist() == [0.0, 0.0]
    chosen = route(z, 2, "sigmoid")
    assert torch.equal(dense(weigh(z, chosen.expert_ids, "sigmoid"), 5), dense(chosen, 5))
