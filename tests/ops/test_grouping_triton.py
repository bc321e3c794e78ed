"""Grouping in Triton's kernels: rows and blocks are those of the reference, on hostile ids, in whatever tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moestro
from moestro import reference
from moestro.ops.grouping import plain, triton, tuning

from . import ordered

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(expert_ids: torch.Tensor, num_experts: int, block_size: int) -> None:
    rows = ordered.rows(expert_ids.to(DEVICE), num_experts, block_size)
    assert all(value.dtype == torch.int32 for value in rows)
    clean = torch.where((expert_ids < 0) | (expert_ids >= num_experts), -1, expert_ids)
    tokens, slots, offsets = reference.group_by_expert(clean, num_experts)
    assert rows.offsets.tolist() == offsets
    pairs = rows.pairs.tolist()
    assert pairs[: offsets[-1]] == [t * clean.shape[1] + k for t, k in zip(tokens, slots, strict=True)]
    blocks = reference.block_schedule(clean, num_experts, block_size)
    count = int(rows.num_blocks)
    assert count == len(blocks)
    assert rows.block_expert.tolist() == [e for e, _ in blocks] + [-1] * (len(rows.block_expert) - count)
    check_public(clean.to(DEVICE), num_experts, block_size)
    assert len(rows.block_expert) == triton.most_blocks(expert_ids.numel(), num_experts, block_size)
    for (expert, cells), start in zip(blocks, rows.block_start.tolist()[:count], strict=True):
        end = min(start + block_size, offsets[expert + 1])
        assert pairs[start:end] == [cell for cell in cells if cell >= 0]


def check_public(expert_ids: torch.Tensor, num_experts: int, block_size: int) -> None:
    with moestro.use(implementation="triton"):
        grouping = moestro.group_by_expert(expert_ids, num_experts)
        schedule = moestro.block_schedule(expert_ids, num_experts, block_size)
    for found, expected in (
        (grouping, plain.group_by_expert(expert_ids, num_experts)),
        (schedule, plain.block_schedule(expert_ids, num_experts, block_size)),
    ):
        assert all(torch.equal(value, vars(expected)[name]) for name, value in vars(found).items())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_shapes_and_fillings(dtype: torch.dtype) -> None:
    for num_tokens, top_k, num_experts in ((0, 2, 3), (3, 0, 3), (1, 1, 1), (1, 8, 17), (20, 3, 7)):
        shape = (num_tokens, top_k)
        check(torch.randint(-1, num_experts, shape).to(dtype), num_experts, 64)
        for ids in (
            torch.randint(-1, num_experts, shape),
            torch.full(shape, -1),
            torch.full(shape, num_experts - 1),
            torch.zeros(shape, dtype=torch.int64),
        ):
            check(ids.to(dtype), num_experts, 5)


@given(data=st.data(), num_experts=st.integers(1, 9), top_k=st.integers(1, 4), block_size=st.integers(1, 6))
@settings(max_examples=15)
def test_any_ids_also_those_of_other_ranks(data, num_experts: int, top_k: int, block_size: int) -> None:
    """Transformers names experts of other ranks by ids of num_experts and above."""
    id_of = st.integers(-1, num_experts + 1)
    rows = data.draw(st.lists(st.lists(id_of, min_size=top_k, max_size=top_k), max_size=12))
    check(torch.tensor(rows, dtype=torch.int64).reshape(len(rows), top_k), num_experts, block_size)


def test_ids_that_are_an_expert_in_their_lower_bits_only() -> None:
    ids = torch.tensor([[0, 1 << 32], [(1 << 32) + 2, 1], [-(1 << 32), -(1 << 31)], [2, (1 << 31) + 1]])
    check(ids, 3, 4)


def test_many_pairs_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one tile and of several, fewer and more than experts, and a last one that is not full."""
    for name, value in (("MANY_PAIRS", 0), ("CHUNK_TILE", 32), ("CHUNK_CELLS", 64)):
        monkeypatch.setattr(tuning, name, value)
    for most_chunks, num_tokens, num_experts in ((2, 11, 7), (2, 64, 33), (64, 1, 1), (64, 40, 7)):
        monkeypatch.setattr(tuning, "MOST_CHUNKS", most_chunks)
        check(torch.randint(-1, num_experts + 2, (num_tokens, 3)), num_experts, 5)
        check(torch.full((num_tokens, 3), num_experts - 1, dtype=torch.int32), num_experts, 5)
    check(torch.full((40, 3), -1), 7, 5)


def test_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MOST_TILE", 128)
    for num_experts in (7, 32):
        check(torch.randint(-1, num_experts, (100, 5)), num_experts, 16)


def test_many_experts_of_which_most_are_empty() -> None:
    check(torch.tensor([[128, 0], [3, -1], [3, 64]]), 129, 2)


def test_ids_that_are_not_contiguous() -> None:
    ids = torch.randint(-1, 9, (40, 6))
    for view in (ids.t(), ids[::2, 1:4], ids[:1].expand(5, -1)):
        check(view, 9, 4)


def test_every_run_has_the_same_bits() -> None:
    ids = torch.randint(-1, 9, (40, 6), device=DEVICE)
    first, second = (ordered.rows(ids, 9, 16) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_the_launch_is_a_function_of_shape() -> None:
    for num_pairs in (1, 16_385, 131_072, 10_000_000):
        chunk, count, bins, warps = tuning.chunks(num_pairs, 128)
        assert (count - 1) * chunk < num_pairs <= count * chunk
        assert (chunk % tuning.CHUNK_TILE, bins, warps) == (0, 256, 4)
        assert count <= tuning.MOST_CHUNKS
    for num_pairs in (0, 1, 8, 129, 4096, 131_072):
        for num_experts in (1, 31, 32, 128, 2048, tuning.MOST_EXPERTS):
            bins, tile, warps = tuning.launch(num_pairs, num_experts)
            assert bins > num_experts
            assert {n & (n - 1) for n in (bins, tile, warps)} == {0}
            assert 1 <= warps <= 16
            assert tile >= min(num_pairs, 128)


def test_what_it_leaves_to_others(triton_device: torch.device) -> None:
    ids = torch.zeros(4, 2, dtype=torch.int64, device=triton_device)
    assert triton.why_unsupported(ids, 5) is None
    assert "at most 4096 experts" in str(triton.why_unsupported(ids, tuning.MOST_EXPERTS + 1))
    assert "is on meta" in str(triton.why_unsupported(ids.to("meta"), 5))
    many = torch.zeros(1, 1, dtype=torch.int64, device=triton_device).expand(1 << 20, 1)
    assert "looks at every slot" in str(triton.why_unsupported(many, 65))
    assert triton.why_unsupported(many, 64) is None


def test_tensors_on_the_cpu_are_nothing_for_it_unless_forced() -> None:
    assert "is on cpu" in str(triton.why_unsupported(torch.zeros(4, 2, dtype=torch.int64), 5))
    assert moestro.explain(moestro.group_by_expert, torch.zeros(4, 2, dtype=torch.int64), 5).chosen != "triton"
