"""Experts that move to another placement while a module is in use: outputs stay, and what stays is not sent."""

from __future__ import annotations

import pytest
import torch

from moestro.tolerances import disagreement
from parallel import cases, moving
from parallel.cases import Layer

SHIFTED = ((1, 2, 6, 7), (0, 3), (5, 4, 2))
"""Of eight experts on three ranks, which hold 0 1 2, 3 4 5 and 6 7: a replica, other orders, other numbers."""


@pytest.mark.parametrize("dispatcher", ["exact", "all-to-all", "all-gather", "all-reduce"])
def test_outputs_stay_and_only_what_moves_is_sent(group, dispatcher):
    case = Layer((1, 3, 1), 8, 3, 32, 48, dispatcher=dispatcher, bias=True)
    found = group(3).run(moving.moved, case, SHIFTED)
    one = cases.experts_of(case, torch.Generator()).weights.bytes_per_expert
    for same, differs, sent, count in found:
        assert differs is None
        assert same or dispatcher != "exact"
        assert count == [5]
        assert all(n % one == 0 for each in sent for n in each.values())
    first, back = ([sum(sent[step].values()) for _, _, sent, _ in found] for step in (0, 1))
    assert sum(first) == 6 * one  # 6 and 7 to rank 0, 0 to rank 1, 2, 4 and 5 to rank 2
    assert sum(back) == 5 * one  # 0; 4 and 5; 6 and 7


@pytest.mark.parametrize("form", ["mxfp4", "int4-g32", "fp8-e4m3-b128", "nvfp4", "int8", "bfloat16"])
def test_formats(group, form):
    case = Layer((1, 2, 1), 5, 2, 128, 256, (6, 5), dispatcher="exact", format=form, bias=True)
    for same, differs, sent, _ in group(2).run(moving.moved, case, ((4, 3, 0), (1, 2, 0))):
        assert same
        assert differs is None
        assert len(sent) == 2


@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 2, 1)], ids=["ep and tp", "dp and ep"])
@pytest.mark.parametrize("dispatcher", ["all-to-all", "all-reduce"])
def test_meshes(group, mesh, dispatcher):
    case = Layer(mesh, 7, 3, 32, 40, dispatcher=dispatcher, bias=True)
    for _, differs, sent, _ in group(4).run(moving.moved, case, ((0, 4, 5, 1), (6, 2, 3, 0))):
        assert differs is None
        assert sent[0]


def test_slices_of_a_shared_batch(group):
    for same, differs, _, _ in group(3).run(moving.moved, Layer((1, 3, 1), dispatcher="exact"), SHIFTED, True, True):
        assert same
        assert differs is None


def test_a_zipf_load_over_eight_processes(group):
    """The slowest of eight ranks computes 3 to 4 times the mean; an eighth more slots bring it to 1.05 at most."""
    found = group(8).run(moving.under_zipf, 4096, 72)
    before, after = ([each[i] for each in found] for i in (0, 1))
    assert sum(before) == sum(after) == 8 * 4096 * 2
    assert 3 <= max(before) / (sum(before) / 8) <= 4
    assert max(after) / (sum(after) / 8) <= 1.05
    for _, _, same, total, moves in found:
        assert same
        assert total == 8 * 4096 * 2
        assert moves > 8


def test_experts_that_move_while_they_are_counted(group):
    for same, counts, bare in group(3).run(moving.counted_and_moved, SHIFTED):
        assert all(same)
        assert counts == [4, 2]
        assert bare


def test_another_mesh_with_as_many_ranks(group):
    for said in group(4).run(moving.by_another_mesh):
        assert said.startswith("InvalidInputError: [move_experts] got the layer, cut over 2 ranks, of which this"), said


def test_what_has_its_placement_is_left_as_it_is(group):
    assert group(3).run(moving.stays) == [({"": ()}, True)] * 3


def test_a_move_takes_the_timeout_of_the_layer(group):
    assert group(2).run(moving.timeouts) == [{66.0}] * 2


@pytest.mark.parametrize("what", ["flow", "sequence"])
def test_flows_and_sequences_are_neither_counted_nor_moved(group, what):
    for said in group(2).run(moving.of_other_modules, what):
        assert said.startswith("InvalidInputError: [count_loads] got "), said
        assert "Experts of MeshFlow, of SequenceParallel" in said


@pytest.mark.parametrize("name", ["disagreeing", "misnamed", "too_few_ranks", "nothing_cut"])
def test_refusals(group, name):
    said = {
        "disagreeing": "CollectiveError: [move_experts] got different placements of the layer",
        "misnamed": "InvalidInputError: [move_experts] got a layer 'layers.0'; needs names among ''",
        "too_few_ranks": "InvalidInputError: [parallelize] got placement of 8 experts on 2 ranks; needs 8 experts on 3",
        "nothing_cut": "InvalidInputError: [move_experts] got Linear, without a layer whose experts are cut",
    }[name]
    for found in group(3).run(getattr(moving, name)):
        assert found.startswith(said), found


transformers = pytest.importorskip("transformers.distributed.expert_parallel")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    from hf.checkpoints import Checkpoints

    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(
    ("like", "form", "sizes", "step"),
    [
        ("gpt-oss-20b", None, (2, 1), "balanced"),
        ("gpt-oss-20b", "int4-g32", (2, 1), "reversed"),
        ("qwen3-30b-a3b", None, (2, 1), "reversed"),
        ("mixtral-8x7b", "int8", (2, 1), "balanced"),
        ("gpt-oss-20b", None, (2, 2), "reversed"),
    ],
)
def test_loaded_models(group, made, like, form, sizes, step):
    from parallel import models

    folder = made.folder(like)
    logits, _, calls = models.loaded(folder, 0, 0, form)
    for steps, counts, num_tokens in group(sizes[0] * sizes[1]).run(moving.of_a_model, folder, form, *sizes, step):
        for found, _, ran in steps:
            assert disagreement(found, logits) is None
            assert ran == calls == len(counts)
        assert steps[0][1] == steps[2][1]
        assert all(count % num_tokens == 0 and count > 0 for count in counts.values())
