"""Properties of the rewrites: each against its definition written as loops over tokens and slots."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro import reference
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.formats import PackedTensor, WeightFormat
from moestro.routing import (
    DropReport,
    GroupLimit,
    GroupLimitedRouter,
    Scoring,
    TopKRouter,
    TwoStageRouter,
    drop_over_capacity,
    expert_counts,
    keep_confident,
    keep_local,
    merge_experts,
    most_used,
    prune_experts,
    remap,
    rescale,
    route,
    routing_change,
    scale_experts,
    similar_groups,
    token_weight,
)
from moestro.types import Routing
from moestro.weights import ExpertWeights
from routing.families import dense

quick = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def routings(draw) -> tuple[Routing, int]:
    """Any routing: empty slots, an expert named twice by one token, experts unused, no tokens."""
    T, K, E = draw(st.integers(0, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    ids = draw(st.lists(st.lists(st.integers(-1, E - 1), min_size=K, max_size=K), min_size=T, max_size=T))
    seed = draw(st.integers(0, 10**6))
    weights = torch.rand(T, K, generator=torch.Generator().manual_seed(seed))
    return Routing(torch.tensor(ids, dtype=torch.int64).reshape(T, K), weights), E


def layer(E: int, seed: int = 0) -> ExpertWeights:
    g = torch.Generator().manual_seed(seed)
    return ExpertWeights.from_dense(torch.randn(E, 6, 4, generator=g), torch.randn(E, 4, 3, generator=g))


@quick
@given(routings(), st.sampled_from([0.1, 0.5, 0.9, 1.0, 1.1, 1.25, 2.0, 100.0]))
def test_drop_over_capacity(case, factor):
    routing, E = case
    T, K = routing.expert_ids.shape
    capacity = math.ceil(Fraction(str(factor)) * T * K / E)
    room, expected, dropped = [capacity] * E, routing.expert_ids.clone(), [0] * E
    for k in range(K):
        for t in range(T):
            e = int(routing.expert_ids[t, k])
            if e >= 0 and room[e] == 0:
                expected[t, k] = -1
                dropped[e] += 1
            elif e >= 0:
                room[e] -= 1
    after, report = drop_over_capacity(routing, E, factor)
    assert torch.equal(after.expert_ids, expected)
    assert torch.equal(after.routing_weights, routing.routing_weights)
    assert report.dropped.tolist() == dropped
    assert (report.capacity, report.total) == (capacity, sum(dropped))
    assert report.routed.tolist() == expert_counts(routing, E).tolist()
    assert (expert_counts(after, E) <= capacity).all()
    twice, again = drop_over_capacity(after, E, factor)
    assert torch.equal(twice.expert_ids, after.expert_ids)
    assert again.total == 0


def test_capacity_is_exact_and_the_report_reads_well():
    routing = Routing(torch.zeros(10, 1, dtype=torch.int64), torch.ones(10, 1))
    assert drop_over_capacity(routing, 1, 1.1)[1].capacity == 11  # 1.1 * 10 is 11.000000000000002 in binary
    _, report = drop_over_capacity(routing, 2, 1.0)
    assert str(report) == "dropped 5 of 10 rows (50.0%) at 1 of 2 experts, capacity 5"
    assert report.share == 0.5
    assert drop_over_capacity(routing, 2, 2.0)[0].expert_ids.tolist() == routing.expert_ids.tolist()
    nothing = Routing(torch.full((2, 1), -1), torch.ones(2, 1))
    assert drop_over_capacity(nothing, 2, 1.0)[1].share == 0.0


def test_drop_and_keep_export_with_dynamic_tokens():
    class Rewrites(torch.nn.Module):
        def forward(self, routing: Routing) -> tuple[Routing, DropReport]:
            kept, report = drop_over_capacity(routing, 8, 1.25)
            kept = keep_confident(rescale(kept, token_weight(routing)), 0.1, 0.9)
            return keep_local(prune_experts(remap(kept, torch.arange(8)), torch.arange(8) != 3), 0, 8), report

    def sample(T: int) -> Routing:
        return route(torch.randn(T, 8, generator=torch.Generator().manual_seed(T)) * 2, 3)

    tokens = torch.export.Dim("tokens")
    shapes = ([{0: tokens}, {0: tokens}],)
    exported = torch.export.export(Rewrites(), (sample(5),), dynamic_shapes=shapes).module()
    compiled = torch.compile(Rewrites(), fullgraph=True, dynamic=True, backend="eager")
    for T in (2, 40):
        expected, report = Rewrites()(sample(T))
        for other, their_report in (exported(sample(T)), compiled(sample(T))):
            assert torch.equal(other.expert_ids, expected.expert_ids)
            torch.testing.assert_close(other.routing_weights, expected.routing_weights)
            assert torch.equal(their_report.dropped, report.dropped)
            assert int(their_report.capacity) == report.capacity


@quick
@given(routings(), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.sampled_from([0.3, 0.7, 0.9, 1.0]))
def test_keep_confident(case, min_share, mass):
    routing, _ = case
    after = keep_confident(routing, min_share, mass)
    assert torch.equal(after.routing_weights, routing.routing_weights)
    for ids, weights, kept in zip(routing.expert_ids, routing.routing_weights, after.expert_ids, strict=True):
        used = [(float(w), -k) for k, (e, w) in enumerate(zip(ids, weights, strict=True)) if e >= 0]
        used.sort(reverse=True)
        total, so_far, expected = sum(w for w, _ in used), 0.0, set()
        for w, minus_k in used:
            near_edge = abs(so_far - mass * total) < 1e-6 * total or abs(w - min_share * used[0][0]) < 1e-6
            if near_edge and expected:
                break
            if not expected or (w >= min_share * used[0][0] and (mass == 1.0 or so_far < mass * total)):
                expected.add(-minus_k)
            so_far += w
        else:
            assert {k for k, e in enumerate(kept) if e >= 0} == expected
        assert all(int(e) in (-1, int(i)) for e, i in zip(kept, ids, strict=True))


def test_keep_confident_by_hand():
    routing = Routing(torch.tensor([[0, 1, 2, 3]] * 2), torch.tensor([[0.1, 0.6, 0.25, 0.05], [0.0, 0.0, 0.0, 0.0]]))
    assert keep_confident(routing).expert_ids.tolist() == routing.expert_ids.tolist()
    assert keep_confident(routing, min_share=0.2).expert_ids[0].tolist() == [-1, 1, 2, -1]
    assert keep_confident(routing, mass=0.9).expert_ids[0].tolist() == [0, 1, 2, -1]
    assert keep_confident(routing, mass=0.5).expert_ids.tolist() == [[-1, 1, -1, -1], [0, -1, -1, -1]]
    kept = keep_confident(routing, mass=0.5)
    torch.testing.assert_close(token_weight(rescale(kept, token_weight(routing))), token_weight(routing))


@quick
@given(routings())
def test_rescale(case):
    routing, _ = case
    after = rescale(routing, 2.0)
    has = token_weight(routing) > 0
    torch.testing.assert_close(token_weight(after)[has], torch.full((int(has.sum()),), 2.0))
    assert (token_weight(after)[~has] == 0).all()
    assert torch.isfinite(after.routing_weights).all()
    assert torch.equal(after.expert_ids, routing.expert_ids)


@quick
@given(routings(), st.data())
def test_remap_prune_and_scale(case, data):
    routing, E = case
    mapping = torch.tensor(data.draw(st.lists(st.integers(-1, 9), min_size=E, max_size=E)))
    mapped = remap(routing, mapping)
    expected = [[int(mapping[e]) if e >= 0 else -1 for e in row] for row in routing.expert_ids.tolist()]
    assert mapped.expert_ids.tolist() == expected
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=E, max_size=E)))
    keep[data.draw(st.integers(0, E - 1))] = True
    pruned = prune_experts(routing, keep)
    torch.testing.assert_close(dense(pruned, E), dense(routing, E) * keep)
    factor = torch.rand(E)
    torch.testing.assert_close(dense(scale_experts(routing, factor), E), dense(routing, E) * factor)


@quick
@given(routings(), st.integers(1, 4))
def test_ranks_add_up(case, ranks):
    """keep_local on every rank, computed with the rank's own weights, sums to the whole layer."""
    routing, E = case
    weights = layer(E)
    x = torch.randn(routing.num_tokens, 4, generator=torch.Generator().manual_seed(1))
    total = torch.zeros_like(x)
    edges = [E * r // ranks for r in range(ranks + 1)]
    for first, last in itertools.pairwise(edges):
        local = keep_local(routing, first, last - first)
        assert ((local.expert_ids >= -1) & (local.expert_ids < max(last - first, 1))).all()
        if last > first:
            part = ExpertWeights.from_dense(weights.gate_up.data[first:last], weights.down.data[first:last])
            total += reference.expert_mlp(x, local, part)
    torch.testing.assert_close(total, reference.expert_mlp(x, routing, weights), rtol=1e-4, atol=1e-5)


def test_most_used():
    counts = torch.tensor([3, 9, 3, 0, 9])
    assert most_used(counts, 3).tolist() == [True, True, False, False, True]
    routing = Routing(torch.tensor([[0, 1], [1, -1], [4, 1]]), torch.ones(3, 2))
    assert expert_counts(routing, 5).tolist() == [1, 3, 0, 0, 1]
    assert prune_experts(routing, most_used(expert_counts(routing, 5), 1)).expert_ids.tolist() == [
        [-1, 1],
        [1, -1],
        [-1, 1],
    ]


def test_merge_exact_copies_keeps_the_layer():
    weights = layer(3)
    order = torch.tensor([0, 1, 0, 2, 1, 0])
    doubled = ExpertWeights.from_dense(weights.gate_up.data[order], weights.down.data[order])
    smaller, mapping = merge_experts(doubled)
    assert mapping.tolist() == [0, 1, 0, 2, 1, 0]
    assert torch.equal(smaller.gate_up.data, weights.gate_up.data)
    x, routing = torch.randn(20, 4), route(torch.randn(20, 6), 3)
    torch.testing.assert_close(
        reference.expert_mlp(x, remap(routing, mapping), smaller), reference.expert_mlp(x, routing, doubled)
    )


def test_merge_near_copies_within_the_threshold_only():
    base = layer(1).gate_up.data[0]
    step = torch.randn(base.shape, generator=torch.Generator().manual_seed(9))
    step *= base.norm() / step.norm()
    gate_up = torch.stack([base, base + 0.01 * step, base + 0.03 * step, -base])
    down = torch.zeros(4, 4, 3)
    bias = torch.zeros(4, 6)
    weights = ExpertWeights.from_dense(gate_up, down, bias, torch.zeros(4, 4))
    assert merge_experts(weights, 0.02)[1].tolist() == [0, 0, 1, 2]  # not chained through the middle one
    assert merge_experts(weights, 0.05)[1].tolist() == [0, 0, 0, 1]
    assert merge_experts(weights, 0.001)[1].tolist() == [0, 1, 2, 3]
    bias[1] = 1.0
    assert merge_experts(weights, 0.02)[1].tolist() == [0, 1, 2, 3]
    assert merge_experts(weights, 0.05)[0].gate_up_bias.shape == (3, 6)


@pytest.mark.parametrize("num_groups", [1, 2, 3, 6, 12])
def test_two_stages_with_all_groups_are_the_plain_router(num_groups):
    torch.manual_seed(num_groups)
    router = TopKRouter(16, 12, 3, "softmax", bias=True, correction_bias=True)
    torch.nn.init.normal_(router.bias)
    router.correction_bias.uniform_()
    x = torch.randn(2, 40, 16)
    two = TwoStageRouter(router, similar_groups(router.weight, num_groups), num_groups)
    expected, actual = router(x), two(x)
    assert torch.equal(actual.expert_ids, expected.expert_ids)
    torch.testing.assert_close(actual.routing_weights, expected.routing_weights)
    assert two(torch.randn(0, 16)).num_tokens == 0


def test_two_stages_stay_in_the_best_groups_and_learn():
    torch.manual_seed(0)
    router = TopKRouter(16, 12, 3)
    groups = similar_groups(router.weight, 4)
    two = TwoStageRouter(router, groups, 2)
    x = torch.randn(50, 16)
    centroid = x @ router.weight[groups].mean(1).T
    owner = torch.empty(12, dtype=torch.int64).scatter(0, groups.flatten(), torch.arange(4).repeat_interleave(3))
    routing = two(x)
    best = centroid.topk(2).indices
    assert (owner[routing.expert_ids][:, :, None] == best[:, None, :]).any(-1).all()
    torch.testing.assert_close(
        token_weight(routing), torch.ones(50), msg="a softmax over the kept groups, renormalised"
    )
    routing.routing_weights[:, 0].sum().backward()
    assert router.weight.grad.abs().sum() > 0
    assert (two.cost.coarse, two.cost.fine, two.cost.plain) == (64, 96, 192)
    assert str(two.cost) == "160 multiply-adds a token (64 coarse + 96 fine), 83.3% of the plain router's 192"


def test_similar_groups_find_the_clusters():
    centres = torch.eye(4, 32)
    weight = centres.repeat_interleave(3, 0) + 0.01 * torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    groups = similar_groups(weight[shuffled], 4)
    assert sorted(sorted(g) for g in (shuffled[groups] // 3).tolist()) == [[c] * 3 for c in range(4)]
    assert groups.flatten().sort().values.tolist() == list(range(12))


@quick
@given(routings())
def test_no_change_is_no_change(case):
    routing, E = case
    report = routing_change(routing, routing)
    assert (report.tokens_changed, report.slots_lost, report.mass_lost) == (0, 0, 0.0)
    reversed_slots = Routing(routing.expert_ids.flip(1), routing.routing_weights.flip(1))
    assert routing_change(routing, reversed_slots).tokens_changed == 0
    assert report.slots == int(
        (dense(Routing(routing.expert_ids, torch.ones_like(routing.routing_weights)), E) > 0).sum()
    )


@quick
@given(routings(), st.integers(0, 10**6))
def test_routing_change_is_its_definition(case, seed):
    before, E = case
    keep = torch.rand(before.expert_ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    after = before.with_ids(before.expert_ids.masked_fill(~keep, -1))
    report = routing_change(before, after)
    ones = torch.ones_like(before.routing_weights)
    had = dense(Routing(before.expert_ids, ones), E) > 0
    has = dense(Routing(after.expert_ids, ones), E) > 0
    assert report.slots_lost == int((had & ~has).sum())
    assert report.slots_after == int(has.sum())
    assert report.tokens_changed == int((had != has).any(-1).sum())
    old, new = dense(before, E).double(), dense(after, E).double()
    expected = float((old - new).clamp(min=0).sum() / old.sum()) if old.sum() else 0.0
    assert report.mass_lost == pytest.approx(expected, abs=1e-6)


def test_a_gained_expert_is_a_change():
    before = Routing(torch.tensor([[0, -1], [2, 3]]), torch.ones(2, 2))
    report = routing_change(before, before.with_ids(torch.tensor([[0, 1], [2, 3]])))
    assert (report.tokens_changed, report.slots_lost, report.slots_after, report.mass_lost) == (1, 0, 4, 0.0)


def test_the_change_reads_well():
    before = Routing(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    report = routing_change(before, keep_confident(before, min_share=0.5))
    assert str(report) == (
        "1 of 4 slots lost (25.0%), 12.5% of the routing weight; 1 of 2 tokens changed; 75.0% of the rows computed"
    )


def test_rewrites_are_differentiable_in_the_weights():
    ids = torch.tensor([[0, 1, 2], [2, 1, 0], [0, -1, 2]])
    weights = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def chain(w: torch.Tensor) -> torch.Tensor:
        routing = keep_confident(drop_over_capacity(Routing(ids, w), 3, 0.7)[0], 0.2, 0.9)
        routing = scale_experts(rescale(routing, token_weight(Routing(ids, w))), torch.tensor([1.0, 2.0, 3.0]))
        return keep_local(prune_experts(routing, torch.tensor([True, True, False])), 0, 2).routing_weights

    assert torch.autograd.gradcheck(chain, (weights,))


def _routing() -> Routing:
    return Routing(torch.tensor([[0, 1]]), torch.ones(1, 2))


BAD = {
    "capacity 0": (
        lambda: drop_over_capacity(_routing(), 2, 0.0),
        r"\[drop_over_capacity\] got capacity_factor=0\.0; ",
    ),
    "capacity < 0": (lambda: drop_over_capacity(_routing(), 2, -1.0), r"needs a finite factor above 0\. 1\.0 fits"),
    "capacity inf": (lambda: drop_over_capacity(_routing(), 2, math.inf), r"\[drop_over_capacity\] got .*=inf"),
    "capacity nan": (lambda: drop_over_capacity(_routing(), 2, math.nan), r"\[drop_over_capacity\] got .*=nan"),
    "ids": (lambda: drop_over_capacity(_routing(), 1, 1.0), r"\[drop_over_capacity\] got expert_ids from 0 to 1"),
    "share": (lambda: keep_confident(_routing(), 1.5), r"\[keep_confident\] got min_share=1\.5"),
    "mass": (
        lambda: keep_confident(_routing(), mass=0.0),
        r"\[keep_confident\] got .*mass=0\.0; needs .*0 < mass <= 1",
    ),
    "keep": (lambda: prune_experts(_routing(), torch.ones(2)), r"\[prune_experts\] got keep \[2\] of torch\.float32"),
    "keep none": (lambda: prune_experts(_routing(), torch.zeros(2, dtype=torch.bool)), r"\[prune_experts\] got a mask"),
    "mapping": (lambda: remap(_routing(), torch.ones(2)), r"\[remap\] got mapping \[2\] of torch\.float32"),
    "factor": (lambda: scale_experts(_routing(), torch.ones(2, 2)), r"\[scale_experts\] got scale \[2, 2\]"),
    "num_kept": (lambda: most_used(torch.ones(3), 4), r"\[most_used\] got num_kept=4"),
    "first": (lambda: keep_local(_routing(), -1, 2), r"\[keep_local\] got first=-1"),
    "threshold": (lambda: merge_experts(layer(2), 1.0), r"\[merge_experts\] got threshold=1\.0"),
    "tokens": (
        lambda: routing_change(_routing(), Routing(torch.zeros(2, 2).long(), torch.ones(2, 2))),
        r"\[routing_change\] got 1 and 2 tokens",
    ),
    "groups": (
        lambda: TwoStageRouter(TopKRouter(4, 4, 1), torch.tensor([[0, 1], [1, 2]]), 1),
        r"\[TwoStageRouter\] got groups \[2, 2\] of 4 experts",
    ),
    "room": (
        lambda: TwoStageRouter(TopKRouter(4, 4, 3), torch.tensor([[0, 1], [2, 3]]), 1),
        r"\[TwoStageRouter\] .*room for top_k=3",
    ),
    "divisor": (lambda: similar_groups(torch.ones(5, 2), 2), r"\[similar_groups\] got weight \[5, 2\], num_groups=2"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_errors_name_the_way_out(case):
    call, text = BAD[case]
    with pytest.raises(InvalidInputError, match=text):
        call()


def test_what_is_not_supported_says_so():
    packed = PackedTensor(torch.zeros(2, 6, 4, dtype=torch.uint8), WeightFormat("int8", "int8", 8, torch.uint8))
    down = PackedTensor(torch.zeros(2, 4, 3, dtype=torch.uint8), WeightFormat("int8", "int8", 8, torch.uint8))
    with pytest.raises(
        UnsupportedError, match=r"\[merge_experts\] got weights in format int8.*Merge before quantising"
    ):
        merge_experts(ExpertWeights(packed, down))
    limited = GroupLimitedRouter(4, 4, 1, GroupLimit(2, 1))
    with pytest.raises(UnsupportedError, match=r"\[TwoStageRouter\] got a router with .*GroupLimit"):
        TwoStageRouter(limited, torch.tensor([[0, 1], [2, 3]]), 1)
    shared = TopKRouter(4, 4, 1, Scoring("sigmoid", shared_experts=1))
    with pytest.raises(UnsupportedError, match="without GroupLimit and shared experts"):
        TwoStageRouter(shared, torch.tensor([[0, 1], [2, 3]]), 1)
