"""A mesh of rows and columns is one device, and so is a layer that is cut along the sequence."""

from __future__ import annotations

import pytest
import torch

from moestro.tolerances import disagreement
from parallel import flows
from parallel.flows import Flow

MESHES = [(2, 2), (1, 4), (4, 1), (2, 4), (4, 2)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared too"])
def test_rows_and_columns(group, mesh, shared):
    for differs, same, sent in group(mesh[0] * mesh[1]).run(flows.flowing, Flow(mesh, shared=shared)):
        assert differs is None
        assert same
        assert len(sent) == mesh[1] - 1


@pytest.mark.parametrize(
    "case",
    [
        Flow((2, 2), top_k=1),
        Flow((2, 2), num_experts=4, top_k=4, dtype=torch.bfloat16, shared=True),
        Flow((2, 2), tokens=(0, 0)),
        Flow((2, 2), tokens=(0, 1)),
        Flow((2, 2), num_experts=5, placement=((0, 1, 4), (2, 4), (3, 4), (1, 0, 3))),
        Flow((4, 1), num_experts=5, placement=((0,), (1, 4), (2, 3), (4, 0))),
        Flow((2, 2), format="int8"),
    ],
    ids=str,
)
def test_kinds_of_batches(group, case):
    for differs, same, _ in group(4).run(flows.flowing, case):
        assert differs is None
        assert same


def test_bytes_along_a_row(group):
    """Each rank sends its part of 5 or 9 tokens, and gets sums of as many; with them the digest, a row."""
    for rank, (_, _, sent) in enumerate(group(4).run(flows.flowing, Flow((2, 2)))):
        assert [*sent.values()] == [(2 * (5, 9)[rank // 2] + 1) * 32 * 4]


@pytest.mark.parametrize(
    "case", [Flow((2, 2)), Flow((2, 2), num_experts=5, placement=((0, 1, 4), (2, 4), (3, 4), (1, 0, 3)))], ids=str
)
def test_the_metadata_says_what_is_computed_and_where_it_belongs(group, case):
    found = group(4).run(flows.from_metadata, case)
    rows = [torch.zeros(case.tokens[row], 64) for row in range(2)]
    for parts, _, rank in found:
        for source, position, y in parts:
            rows[source][position] += y
        assert all(source in (0, 1) for source, _, _ in parts)
        assert rank in range(4)
    for row in range(2):
        assert disagreement(rows[row], found[2 * row][1]) is None
    assert sum(len(parts) for parts, _, _ in found) == sum(case.tokens[:2]) * case.top_k


def test_a_layer_keeps_what_balances_it(group):
    assert group(2).run(flows.balanced, Flow((1, 2)), "flow") == [None] * 2
    assert group(2).run(flows.balanced, Flow((1, 2, 1)), "sequence") == [None] * 2


def test_gradients(group):
    assert group(4).run(flows.gradients, Flow((2, 2), shared=True)) == [None] * 4


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("names", "InvalidInputError: [MeshFlow] got a mesh with dimensions dp, ep, tp; needs the dimensions rows"),
        ("experts", "InvalidInputError: [MeshFlow] got 2 experts of hidden_size 64 on 1 rows and 3 columns"),
        ("hidden", "InvalidInputError: [MeshFlow] got 10 experts of hidden_size 64 on 1 rows and 3 columns"),
        ("falling", "UnsupportedError: [MeshFlow] got a mesh of ranks [[2, 1, 0]]"),
        ("shared", "UnsupportedError: [SharedSlice] got shared experts of the class Linear"),
        ("rows", "InvalidInputError: [MeshFlow] got x "),
    ],
)
def test_what_a_flow_refuses(group, what, said):
    for found in group(3).run(flows.refused_flow, what):
        assert found.startswith(said), found


def test_a_row_whose_ranks_choose_otherwise(fresh):
    for said in fresh(2).run(flows.routed_otherwise):
        assert said.startswith("CollectiveError: [MeshFlow] got different experts chosen for the same tokens"), said


SIZES = [1, 5, 47, 48, 77, 0]


@pytest.mark.parametrize("mesh", [(1, 2, 1), (1, 1, 2), (1, 3, 1), (1, 2, 2), (2, 2, 1)], ids=str)
def test_a_sequence_that_all_ranks_have(group, mesh):
    ranks = mesh[1] * mesh[2]
    for said in group(mesh[0] * ranks).run(flows.in_sequence, Flow(mesh, shared=True), SIZES):
        for size, (differs, mode, seen, sent) in zip(SIZES, said, strict=True):
            assert differs is None
            each = -(-size // ranks)
            assert mode == ("shards" if size >= 16 * ranks else "slices")
            if mode == "shards":
                assert seen["router"] == seen["shared"] <= each
                # K = 3 slots, not E = 10 logits; and a row for the digest
                assert [*sent.values()] == [(each + 1) * 3 * 8] * (ranks - 1)
            else:
                assert seen == {"router": size, "shared": 0}
                assert not any(sent.values())


def test_kinds_of_sequences(group):
    for case in (
        Flow((1, 3, 1)),
        Flow((1, 3, 1), shared=True, dtype=torch.bfloat16),
        Flow((1, 3, 1), num_experts=4, placement=((0, 1), (2, 0), (3, 0))),
    ):
        for said in group(3).run(flows.in_sequence, case, [2, 100]):
            assert [differs for differs, *_ in said] == [None, None]


def test_hidden_states_that_stay_cut(group):
    for said in group(3).run(flows.in_sequence, Flow((1, 3, 1), shared=True), [0, 1, 50], True):
        assert [differs for differs, *_ in said] == [None] * 3


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("experts", "InvalidInputError: [parallelize] got 2 experts of the layer for ep=3, with none on some ranks"),
        ("shared", "UnsupportedError: [SharedSlice] got shared experts of the class Linear"),
        ("tokens", "InvalidInputError: [SequenceParallel] got shard_tokens=0"),
        ("disagree", "CollectiveError: [parallelize] got different shard_tokens of the layer: 16 on ranks 0, 2, 5 on"),
    ],
)
def test_what_a_sequence_refuses(group, what, said):
    for found in group(3).run(flows.refused_sequence, what):
        assert found.startswith(said), found


def test_ranks_with_other_tokens(fresh):
    for said in fresh(2).run(flows.other_sequence):
        assert said.startswith("CollectiveError: [SequenceParallel] got different experts chosen"), said


@pytest.mark.parametrize("what", ["flow", "shards", "slices"])
def test_ranks_with_rows_of_another_dtype(fresh, what):
    for said in fresh(2).run(flows.other_dtype, what):
        assert said.startswith(f"CollectiveError: [{'MeshFlow' if what == 'flow' else 'SequenceParallel'} with "), said
        assert 'different dtype of tokens: "torch.float32" on rank 0, "torch.float64" on rank 1' in said


def test_ranks_with_another_prompt(fresh):
    for said in fresh(2).run(flows.other_prompt):
        assert said.startswith("CollectiveError: [SequenceParallel, layers.7] got different experts chosen"), said


@pytest.mark.parametrize("num_tokens", [3, 64])
def test_a_sequence_does_not_train(group, num_tokens):
    for said in group(2).run(flows.sequence_backward, num_tokens):
        assert said.startswith("UnsupportedError: [SequenceParallel] got a backward pass"), said


def test_ranks_with_other_shared_experts(group):
    for said in group(2).run(flows.other_shared):
        assert said.startswith("CollectiveError: [parallelize] got different shared experts of the layer: "), said


@pytest.mark.parametrize(
    ("what", "said"), [("flow", "[MeshFlow] got no value"), ("sequence", "[SequenceParallel] got a")]
)
def test_what_is_no_tensor(group, what, said):
    for found in group(2).run(flows.no_tensor, what):
        assert found.startswith(f"InvalidInputError: {said}"), found
