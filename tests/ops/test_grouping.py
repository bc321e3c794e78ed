"""Rows in expert order and block schedules: the published examples, the reference, and what must always hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moestro
from moestro import reference
from moestro.errors import InvalidInputError
from moestro.ops.grouping import (
    block_bound,
    choose_block_size,
    largest_first,
    load_report,
    makespan,
    padding_report,
)
from moestro.ops.grouping.tuning import BLOCK_SIZES


@st.composite
def ids(draw):
    """expert_ids [T, K] with empty slots, duplicates and unused experts, and E."""
    num_experts = draw(st.integers(1, 9))
    num_tokens, top_k = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    rows = draw(
        st.lists(
            st.lists(st.integers(-1, num_experts - 1), min_size=top_k, max_size=top_k),
            min_size=num_tokens,
            max_size=num_tokens,
        )
    )
    dtype = draw(st.sampled_from((torch.int64, torch.int32)))
    return torch.tensor(rows, dtype=dtype).reshape(num_tokens, top_k), num_experts


def test_published_grouping():
    grouping = moestro.group_by_expert(torch.tensor([[2, 0], [1, 2], [0, 1]]), 3)
    assert grouping.token_ids.tolist() == [0, 2, 1, 2, 0, 1]
    assert grouping.slots.tolist() == [1, 0, 0, 1, 0, 1]
    assert grouping.offsets.tolist() == [0, 2, 4, 6]
    assert grouping.inverse.tolist() == [4, 0, 2, 5, 1, 3]
    assert grouping.counts.tolist() == [2, 2, 2]


@given(ids())
def test_grouping_is_the_reference(case):
    expert_ids, num_experts = case
    grouping = moestro.group_by_expert(expert_ids, num_experts)
    tokens, slots, offsets = reference.group_by_expert(expert_ids, num_experts)
    rows = offsets[-1]
    assert grouping.token_ids.tolist()[:rows] == tokens
    assert grouping.slots.tolist()[:rows] == slots
    assert grouping.offsets.tolist() == offsets
    pairs = grouping.token_ids * expert_ids.shape[1] + grouping.slots
    assert grouping.inverse[pairs].tolist() == list(range(expert_ids.numel()))
    assert (expert_ids.reshape(-1)[pairs[rows:]] == -1).all()


def test_published_block_schedule():
    schedule = moestro.block_schedule(torch.tensor([[0], [1], [0], [2], [1], [0]]), 3, 4)
    assert schedule.token_ids.tolist()[:3] == [[0, 2, 5, -1], [1, 4, -1, -1], [3, -1, -1, -1]]
    assert schedule.block_experts.tolist() == [0, 1, 2, -1]


def test_published_expert_ids_of_blocks():
    """Experts 0, 1 and 3 with 2, 3 and 3 blocks."""
    expert_ids = torch.tensor([0] * 5 + [1] * 9 + [3] * 12)[:, None]
    schedule = moestro.block_schedule(expert_ids, 4, 4)
    used = schedule.block_experts[schedule.block_experts >= 0]
    assert used.tolist() == [0, 0, 1, 1, 1, 3, 3, 3]


@given(ids(), st.sampled_from((1, 2, 3, 4, 16)))
def test_block_schedule_is_the_reference(case, block_size):
    expert_ids, num_experts = case
    schedule = moestro.block_schedule(expert_ids, num_experts, block_size)
    blocks = reference.block_schedule(expert_ids, num_experts, block_size)
    assert schedule.num_blocks == block_bound(expert_ids.numel(), num_experts, block_size)
    assert schedule.block_experts.tolist() == [e for e, _ in blocks] + [-1] * (schedule.num_blocks - len(blocks))
    assert schedule.pair_ids.tolist()[: len(blocks)] == [cells for _, cells in blocks]
    assert (schedule.pair_ids[len(blocks) :] == -1).all()
    cells = schedule.pair_ids.reshape(-1)
    for pair, cell in enumerate(schedule.scatter_index.reshape(-1).tolist()):
        assert cell == -1 if expert_ids.reshape(-1)[pair] < 0 else cells[cell] == pair
    assert schedule.counts.sum() == (expert_ids >= 0).sum()


@given(ids(), st.integers(1, 5))
def test_the_block_bound_holds_for_any_routing(case, block_size):
    expert_ids, num_experts = case
    counts = torch.bincount(expert_ids[expert_ids >= 0].long(), minlength=num_experts)
    needed = int(((counts + block_size - 1) // block_size).sum())
    assert needed <= block_bound(expert_ids.numel(), num_experts, block_size)


def test_published_block_bound():
    assert block_bound(1000 * 2, 8, 256) == 15


@pytest.mark.parametrize("what", ["rows", "blocks"])
def test_compiles_whole_and_exports_with_any_number_of_tokens(what):
    class Group(torch.nn.Module):
        def forward(self, expert_ids):
            if what == "rows":
                return moestro.group_by_expert(expert_ids, 7)
            return moestro.block_schedule(expert_ids, 7, 4)

    def some_ids(num_tokens):
        return torch.randint(-1, 7, (num_tokens, 3))

    tokens = {0: torch.export.Dim("num_tokens")}
    exported = torch.export.export(Group(), (some_ids(5),), dynamic_shapes=(tokens,)).module()
    compiled = torch.compile(Group(), fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (2, 29):
        expert_ids = some_ids(num_tokens)
        expected = vars(Group()(expert_ids))
        for run in (exported, compiled):
            assert all(torch.equal(value, expected[name]) for name, value in vars(run(expert_ids)).items())


def test_published_padding():
    balanced = padding_report([250] * 8, 256)
    assert (balanced.needed_blocks, balanced.provisioned_blocks) == (8, 15)
    assert balanced.provisioned_overhead == pytest.approx(0.875)
    assert balanced.algorithmic_overhead == pytest.approx(0.024)
    hot = padding_report([1750, 36, 36, 36, 36, 36, 35, 35], 256)
    assert hot.provisioned_overhead == pytest.approx(0.0714, abs=5e-5)
    assert hot.algorithmic_overhead == pytest.approx(0.792)
    assert "2000 rows in 8 blocks (2.4% padding)" in str(balanced)
    assert padding_report([0, 0], 4).algorithmic_overhead == 0


def test_published_weight_skipping():
    """Blocks of experts 0 0 1 2 2 load three experts, not five."""
    expert_ids = torch.tensor([0] * 3 + [1] + [2] * 4)[:, None]
    report = load_report(moestro.block_schedule(expert_ids, 3, 2))
    assert (report.weight_loads, report.weight_loads_saved) == (3, 2)
    assert (report.row_loads, report.row_loads_saved) == (8, 2)
    assert report.blocks_skipped == block_bound(8, 3, 2) - 5
    assert "3 weight loads (2 saved)" in str(report)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 6))
def test_largest_first(counts, num_workers):
    order = largest_first(counts)
    assert sorted(order) == [e for e, n in enumerate(counts) if n]
    rows = [counts[e] for e in order]
    assert rows == sorted(rows, reverse=True)
    chosen = largest_first(counts, num_workers)
    assert sorted(chosen) == sorted(order)
    took = makespan([counts[e] for e in chosen], num_workers)
    assert took <= makespan(counts, num_workers)
    assert took <= makespan(rows, num_workers)


def test_arrival_order_can_beat_largest_first():
    counts = [3, 2, 2, 3, 2]
    assert makespan([counts[e] for e in largest_first(counts)], 2) == 7
    assert makespan([counts[e] for e in largest_first(counts, 2)], 2) == 6


def test_largest_first_beats_arrival_on_a_late_hot_expert():
    counts = [10, 10, 10, 10, 40]
    assert makespan(counts, 2) == 60
    assert makespan([counts[e] for e in largest_first(counts)], 2) == 40


def test_block_size_by_arithmetic_intensity():
    """The smallest B whose B * G / E reaches the balance, recomputed here from the formula."""
    for rows, experts, balance in [(4096, 64, 8.0), (4096, 64, 100.0), (65536, 8, 450.0), (8, 128, 20.0)]:
        chosen = choose_block_size(rows, experts, balance)
        reaching = [b for b in BLOCK_SIZES if b * (-(-rows // b) + experts - 1) / experts >= balance]
        assert chosen == (reaching[0] if reaching else BLOCK_SIZES[-1])
    assert choose_block_size(8, 128, 1e9) == BLOCK_SIZES[-1]
    assert choose_block_size(4096, 64, 50.0, bytes_per_weight=4) == choose_block_size(4096, 64, 100.0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: moestro.group_by_expert(torch.tensor([[3]]), 3), r"from 3 to 3; needs ids in -1\.\.2"),
        (lambda: moestro.group_by_expert(torch.tensor([[-2]]), 3), "from -2"),
        (lambda: moestro.group_by_expert(torch.tensor([3]), 3), r"\[1\]"),
        (lambda: moestro.group_by_expert(torch.tensor([[0.5]]), 3), "float32"),
        (lambda: moestro.group_by_expert(torch.tensor([[0]]), 0), "num_experts=0"),
        (lambda: moestro.block_schedule(torch.tensor([[0]]), 3, 0), "block_size=0"),
        (lambda: moestro.block_schedule(torch.zeros(4, 1, dtype=torch.int32), 4, 2**30), "2147483647"),
        (lambda: padding_report([], 4), "0 counts"),
        (lambda: padding_report([1], 0), "block_size=0"),
        (lambda: makespan([1], 0), "num_workers=0"),
        (lambda: choose_block_size(1, 0, 1.0), "num_experts=0"),
        (lambda: choose_block_size(1, 1, 0.0), "balance=0.0"),
    ],
)
def test_bad_input(call, text):
    with pytest.raises(InvalidInputError, match=text):
        call()


def test_forty_thousand_tokens_take_blocks():
    torch.manual_seed(0)
    expert_ids = torch.randint(-1, 16, (40_000, 2))
    schedule = moestro.block_schedule(expert_ids, 16, 64)
    cells = schedule.pair_ids.reshape(-1)
    used = cells[cells >= 0]
    assert used.sort().values.tolist() == (expert_ids.reshape(-1) >= 0).nonzero()[:, 0].tolist()
    owner = schedule.block_experts[:, None].expand_as(schedule.pair_ids).reshape(-1)[cells >= 0]
    assert torch.equal(owner, expert_ids.reshape(-1)[used].long())
