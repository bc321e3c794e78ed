"""A layer over several ranks is the layer on one device: every rank is asked, in every way of sending tokens."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from moestro.ops import native
from moestro.parallel import Placement, simulate
from moestro.parallel.simulate_links import Mesh
from parallel import cases
from parallel.cases import DISPATCHERS, Layer

FORMATS = ["mxfp4", "int8", "int4-g32", "fp8-e4m3-b128", "fp8-e4m3-channel", "nvfp4", "float16"]
WORLDS = [2, 3, 4, 8]


def equal(found):
    assert [said for said, _ in found] == [None] * len(found)


def exactly(found):
    assert found == [(None, True)] * len(found)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_every_dispatcher_at_every_size(group, world, dispatcher):
    for num_experts, top_k in ((8, 1), (9, 2), (10, 6), (16, 8)):
        case = Layer((1, world, 1), num_experts, top_k, 32, 32, dispatcher=dispatcher)
        found = group(world).run(cases.compare, case)
        exactly(found) if dispatcher == "exact" else equal(found)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_exact_mode_is_one_device_bit_for_bit(group, world, dtype, weight_on):
    case = Layer((1, world, 1), 10, 6, dispatcher="exact", dtype=dtype, weight_on=weight_on, route="holes", bias=True)
    found = group(world).run(cases.compare, case, 3)
    running = [isa for isa in native.ISAS if isa.runs_here]
    if dtype == torch.bfloat16 and any(isa.multiplies_bfloat16 for isa in running):
        equal(found)  # such a set rounds rows, and float32 ones it does not
        best = next(isa for isa in running if isa.multiplies_floats and not isa.multiplies_bfloat16)
        found = group(world).run(cases.compare_by, f"cpu-{best.name}", case, 3)
    exactly(found)


@pytest.mark.parametrize("route", ["first", "last", "none", "holes"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_skew(group, route, dispatcher):
    case = Layer((1, 3, 1), 7, 3, 32, 32, route=route, dispatcher=dispatcher)
    found = group(3).run(cases.compare, case)
    exactly(found) if dispatcher == "exact" else equal(found)


@pytest.mark.parametrize("tokens", [(0, 9, 4), (0, 0, 5), (0, 0, 0), (0, 1, 0), (1, 0, 0)], ids=str)
@pytest.mark.parametrize("dispatcher", [name for name in DISPATCHERS if name != "all-reduce"])
def test_ranks_without_tokens(group, tokens, dispatcher):
    case = Layer((1, 3, 1), 7, 2, 32, 32, tokens=tokens, dispatcher=dispatcher)
    found = group(3).run(cases.compare, case)
    exactly(found) if dispatcher == "exact" else equal(found)


@pytest.mark.parametrize("dispatcher", ["all-to-all", "exact", "all-gather"])
def test_buffers_grow_and_shrink(group, dispatcher):
    found = group(4).run(cases.growing, Layer((1, 4, 1), 9, 2, 32, 32, dispatcher=dispatcher), [1, 60, 3, 0, 17])
    assert found == [[None] * 5] * 4


@pytest.mark.parametrize(
    ("mesh", "dispatcher"),
    [
        *(((1, 1, 2), name) for name in ("all-to-all", "all-reduce")),
        *(((1, 2, 2), name) for name in ("all-to-all", "all-gather", "all-reduce")),
        *(((2, 2, 1), name) for name in ("all-to-all", "exact", "all-gather", "all-reduce")),
        *(((2, 2, 2), name) for name in ("all-to-all", "all-gather", "all-reduce")),
        ((1, 1, 3), "all-to-all"),
    ],
    ids=str,
)
@pytest.mark.parametrize("interleaved", [False, True], ids=["gate then up", "interleaved"])
def test_meshes(group, mesh, dispatcher, interleaved):
    world = mesh[0] * mesh[1] * mesh[2]
    case = Layer(mesh, 7, 3, 32, 40, dispatcher=dispatcher, interleaved=interleaved, bias=True)
    found = group(world).run(cases.compare, case)
    exactly(found) if dispatcher == "exact" else equal(found)


@pytest.mark.parametrize("ranks", [[[[0, 2], [1, 3]]], [[[2], [3]], [[0], [1]]], [[[1], [3]], [[0], [2]]]], ids=str)
@pytest.mark.parametrize("dispatcher", ["all-to-all", "all-gather", "all-reduce"])
def test_meshes_of_other_numbers(group, ranks, dispatcher):
    """Numbers that rise along ep and tp, if not from one to the next."""
    sizes = (len(ranks), len(ranks[0]), len(ranks[0][0]))
    equal(group(4).run(cases.compare, Layer(sizes, 7, 3, 32, 40, dispatcher=dispatcher), 1, ranks))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("mesh", [(1, 2, 1), (1, 1, 2), (1, 2, 2)], ids=["ep", "tp", "ep and tp"])
def test_formats(group, form, mesh):
    world = mesh[0] * mesh[1] * mesh[2]
    case = Layer(mesh, 5, 2, 128, 256, (6, 5), format=form, bias=True)
    equal(group(world).run(cases.compare, case))


@pytest.mark.parametrize("form", [None, *FORMATS])
@pytest.mark.parametrize("mesh", [(1, 2, 1), (1, 1, 2), (1, 2, 2)], ids=["ep", "tp", "ep and tp"])
def test_a_rank_keeps_its_share(group, form, mesh):
    case = Layer(mesh, 5, 2, 128, 256, format=form)
    for kept, share, one in group(mesh[1] * mesh[2]).run(cases.resident, case):
        assert kept <= share + one


def test_replicas(group):
    case = Layer((1, 2, 1), 4, 2, 32, 32, placement=((0, 1, 2), (3, 1, 0)), dispatcher="exact")
    exactly(group(2).run(cases.compare, case))


@pytest.mark.parametrize("dispatcher", ["all-to-all", "all-gather", "all-gather of 40"])
@pytest.mark.parametrize("tokens", [(5, 5, 5), (1, 1, 1)], ids=str)
def test_replicas_share_as_the_simulator_says(group, dispatcher, tokens):
    """Three replicas of expert 0, which every token wants: of ranks with one token each, too."""
    placement = ((0, 1), (0, 2), (0, 3))
    case = Layer((1, 3, 1), 4, 2, 32, 32, tokens, "first", dispatcher, placement=placement)
    ids = torch.cat([routing.expert_ids for routing in cases.build(case)[2]])
    expected = simulate(ids, Mesh(3), Placement(4, placement)).pairs.tolist()
    assert group(3).run(cases.kept_pairs, case) == expected == [sum(tokens) // 3] * 3


@pytest.mark.parametrize("dispatcher", ["all-to-all", "exact", "all-gather"])
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_gradients(group, dispatcher, weight_on):
    case = Layer((1, 3, 1), 7, 3, 32, 32, tokens=(5, 0, 9), dispatcher=dispatcher, weight_on=weight_on, route="holes")
    assert group(3).run(cases.gradients, case) == [[None] * 3] * 3


def test_gradients_of_a_shared_batch(group):
    assert group(3).run(cases.gradients, Layer((1, 3, 1), 7, 3, 32, 32, dispatcher="all-reduce")) == [[None] * 3] * 3


@pytest.mark.parametrize("exact", [False, True])
def test_slices_of_a_shared_batch(group, exact):
    found = group(4).run(cases.sliced, Layer((1, 4, 1), 9, 3, 32, 32), exact)
    exactly(found) if exact else equal(found)


def least_rows(case, rank):
    """By the definition: tokens of this rank that name experts of another, for each other rank."""
    _, _, routings = cases.build(case)
    owner = {}
    each, more = divmod(case.num_experts, case.mesh[1])
    for number in range(case.mesh[1]):
        for _ in range(each + (number < more)):
            owner[len(owner)] = number
    counts = Counter()
    for ids in routings[rank].expert_ids.tolist():
        counts.update({owner[e] for e in ids if e >= 0} - {rank})
    return counts


@pytest.mark.parametrize("route", ["random", "holes", "first"])
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_on_the_wire_are_the_fewest(group, world, route):
    case = Layer((1, world, 1), 10, 4, 32, 32, route=route)
    sent = group(world).run(cases.traffic, case)
    least = [least_rows(case, rank) for rank in range(world)]
    row = 32 * 4
    for rank, other in itertools.permutations(range(world), 2):
        out, back = least[rank][other], least[other][rank]
        assert sent[rank].get("rows", {}).get(other, 0) == (out + back) * row
        assert sent[rank].get("routing", {}).get(other, 0) == out * case.top_k * 8
        assert sent[rank]["counts"][other] == 5 * 8


def test_exact_mode_sends_a_token_once_and_has_each_slot_back(group):
    case = Layer((1, 2, 1), 10, 4, 32, 32, dispatcher="exact")
    sent = group(2).run(cases.traffic, case)
    _, _, routings = cases.build(case)
    slots = [int((routings[rank].expert_ids // 5 == 1 - rank).sum()) for rank in range(2)]
    for rank in range(2):
        out, back = least_rows(case, rank)[1 - rank], slots[1 - rank]
        assert sent[rank]["rows"][1 - rank] == (out + back) * 32 * 4


def test_bytes_of_all_gather(group):
    case = Layer((1, 4, 1), 10, 4, 32, 32, dispatcher="all-gather of 40")
    for rank, sent in enumerate(group(4).run(cases.traffic, case)):
        assert sent["rows"] == dict.fromkeys(set(range(4)) - {rank}, 2 * 40 * 32 * 4)
        assert "counts" not in sent


def test_rows_of_8_bit_floats_travel(group):
    assert group(3).run(cases.fp8_rows) == [[2.0], [0.0], [1.0]]
