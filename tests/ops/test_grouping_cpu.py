"""Grouping in the native engine: every field is that of plain torch, on hostile ids and on several threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moestro
from moestro.errors import InvalidInputError
from moestro.ops import grouping
from moestro.ops.grouping import cpu, plain

from .engines import needs_engine, output

pytestmark = needs_engine


def same(found, expected):
    assert all(value.dtype == torch.int64 for value in vars(found).values())
    assert all(torch.equal(value, vars(expected)[name]) for name, value in vars(found).items())


def check(expert_ids, num_experts, block_size=4):
    with moestro.use(implementation="cpu-native"):
        same(moestro.group_by_expert(expert_ids, num_experts), plain.group_by_expert(expert_ids, num_experts))
        found = moestro.block_schedule(expert_ids, num_experts, block_size)
    same(found, plain.block_schedule(expert_ids, num_experts, block_size))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_shapes_and_fillings(dtype):
    for num_tokens, top_k, num_experts in ((0, 2, 3), (3, 0, 3), (1, 1, 1), (1, 8, 64), (50, 3, 7), (200, 2, 300)):
        shape = (num_tokens, top_k)
        for ids in (
            torch.randint(-1, num_experts, shape),
            torch.full(shape, -1),
            torch.full(shape, num_experts - 1),
            torch.zeros(shape, dtype=torch.int64),
        ):
            for block_size in (1, 5, 64):
                check(ids.to(dtype), num_experts, block_size)


@given(data=st.data(), num_experts=st.integers(1, 9), top_k=st.integers(1, 4), block_size=st.integers(1, 6))
def test_any_ids(data, num_experts, top_k, block_size):
    rows = data.draw(st.lists(st.lists(st.integers(-1, num_experts - 1), min_size=top_k, max_size=top_k), max_size=12))
    dtype = data.draw(st.sampled_from((torch.int64, torch.int32)))
    check(torch.tensor(rows, dtype=dtype).reshape(len(rows), top_k), num_experts, block_size)


def test_ids_that_are_not_contiguous_or_lie_at_an_odd_address():
    ids = torch.randint(-1, 9, (40, 6))
    odd = torch.frombuffer(bytearray(1) + bytearray(ids.numpy().tobytes()), dtype=torch.int64, offset=1).view(40, 6)
    for view in (odd, ids.t(), ids[::2, 1:4], ids[:1].expand(5, -1), ids.int().t()):
        check(view, 9)


def test_fields_share_no_memory():
    order = moestro.group_by_expert(torch.randint(0, 9, (40, 6)), 9)
    assert len({value.untyped_storage().data_ptr() for value in vars(order).values()}) == 4


@pytest.mark.parametrize("num_experts", [2, 60, 40_000])
def test_many_slots_on_several_threads(num_experts):
    torch.set_num_threads(3)
    ids = torch.randint(-1, num_experts, (30_000, 4))
    same(cpu.group_by_expert(ids, num_experts), plain.group_by_expert(ids, num_experts))
    if num_experts < 100:
        check(ids[:8000], num_experts, 1024)


@pytest.mark.parametrize("bad", [-2, 7, 1 << 31, -(1 << 62)])
def test_ids_out_of_range(bad):
    for num_tokens in (5, 30_000):
        ids = torch.randint(-1, 7, (num_tokens, 3))
        ids[-1, -1] = bad
        for call in (
            lambda ids=ids: moestro.group_by_expert(ids, 7),
            lambda ids=ids: moestro.block_schedule(ids, 7, 4),
        ):
            with pytest.raises(InvalidInputError, match=rf"{bad}.*needs ids in -1\.\.6"):
                call()
        empty = ids.masked_fill((ids < 0) | (ids >= 7), -1)  # below the edge
        same(grouping.run(ids, 7), plain.group_by_expert(empty, 7))
        same(grouping.run_blocks(ids, 7, 4), plain.block_schedule(empty, 7, 4))


class Other(torch.Tensor):
    """An ordinary tensor's memory under another name."""


def test_what_it_leaves_to_torch():
    ids = torch.randint(0, 5, (4, 2))
    for argument, num_experts, sentence in (
        (ids.as_subclass(Other), 5, "subclass"),
        (ids, (1 << 20) + 1, "at most 1048576 experts"),
        (ids.to("meta"), 5, "is on meta"),
    ):
        assert sentence in cpu.prepare(argument, num_experts)
    assert moestro.explain(moestro.group_by_expert, ids, 5).chosen == "cpu-native"
    assert moestro.explain(moestro.group_by_expert, ids.as_subclass(Other), 5).chosen == "torch"
    with moestro.use(implementation="torch"):
        same(moestro.group_by_expert(ids, 5), plain.group_by_expert(ids, 5))


def test_wrong_arguments_of_the_bindings_are_refused_and_never_followed():
    counts = {}
    for line in output("-m", "ops.fuzz_routing").splitlines():
        count, _, name = line.strip().partition(" ")
        counts[name] = int(count)
    for function in ("topk", "route", "group", "schedule", "fits"):
        assert counts[f"{function}: computed"] >= 30
        assert sum(n for name, n in counts.items() if name.startswith(f"{function}: ") and "Error" in name) >= 30
