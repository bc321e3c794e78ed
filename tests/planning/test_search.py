"""Ways to run a model: none that the loader refuses or memory does not hold, each once, and what ranks really have."""

from __future__ import annotations

import gc
import json
import math
import shutil
import weakref
from dataclasses import replace

import pytest
import torch

import moestro
from moestro.errors import InvalidInputError
from moestro.memory import total_bytes
from moestro.memory.prompts import MOST_DECODED
from moestro.memory.sizes import least_budget
from moestro.planning import Choice, Load, Machine
from moestro.planning.model import read_model
from moestro.planning.predict import Spread, communication, expert_seconds, logits_seconds, missed_bytes
from moestro.planning.search import FURTHER, PROCESS, Asked, Search

BUNDLED = read_model(None)
BOX = Machine("box", 10**9, 1e10, {"default": 1e12}, devices=64, link_bytes_per_second=1e9, link_seconds=1e-5)
LAYERS, EXPERTS, TOP_K = 6, 16, 4
EXPERT_BYTES = 98304
LOAD = Load(1, 64, 8)


def ways(machine=BOX, form=None, **asked):
    search = Search(BUNDLED, machine, Asked(**{"devices": 1} | asked), lambda *_: None)
    return search, list(search._choices(form, LOAD))


def test_a_budget_leaves_room_for_the_embedding_that_it_reads_whole():
    """Without a budget its pages are mapped, and only those of the tokens count; with one all of it is in memory."""
    model = replace(BUNDLED, looked_up_bytes=2**20)
    here = replace(BOX, is_here=True, disk_bytes_per_second=1e9)
    search = Search(model, here, Asked(), lambda *_: None)
    mapped = search.need(Choice(), LOAD)
    search.machine = replace(here, memory=mapped.device - 10 * EXPERT_BYTES)
    (choice,) = search._choices(None, LOAD)
    assert choice.memory is not None
    assert search.need(choice, LOAD).device <= search.machine.memory
    assert search.need(choice, LOAD).rest == mapped.rest + 2**20


def test_processes_here_share_experts_and_pages():
    """Each expert is in one of them, files' pages are there once, and all else in each."""
    model = replace(BUNDLED, copied_bytes=1000)
    search = Search(model, replace(BOX, is_here=True), Asked(devices=4), lambda *_: None)
    alone, four = search.need(Choice(), LOAD), search.need(Choice(ep=4), LOAD)
    assert four.experts == alone.experts == total_bytes(BUNDLED.sizes)
    assert four.rest == alone.rest + 3 * 1000
    assert four.cache == 4 * alone.cache
    assert four.workspace == 4 * (alone.workspace - PROCESS) + PROCESS + 3 * FURTHER
    assert {(each.ep, each.tp) for each in search._choices(None, LOAD)} == {(1, 1), (2, 1), (4, 1)}
    short = replace(search.machine, memory=alone.device)
    assert [each.ranks for each in Search(model, short, search.asked, lambda *_: None)._choices(None, LOAD)] == [1]


def test_what_files_do_not_have_as_the_model_holds_it(tmp_path):
    """Buffers, and all weights of another dtype or format."""
    assert 0 < BUNDLED.copied_bytes < BUNDLED.rest_bytes / 100
    stored = read_model(None, "int8")
    assert stored.copied_bytes > stored.rest_bytes / 2
    wide = tmp_path / "wide"
    shutil.copytree(BUNDLED.folder, wide)
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    found = read_model(wide)
    assert found.copied_bytes == found.rest_bytes


def test_what_is_missing_with_a_disk_is_what_the_fewest_slots_need():
    search, _ = ways()
    beside, least = search.need(Choice(), LOAD).beside, least_budget(BUNDLED.sizes)
    short = replace(BOX, memory=beside + least - 7, disk_bytes_per_second=1e9)
    search, found = ways(short)
    assert (found, search.lacking) == ([], {"as stored, batch 1": 7})


def test_a_cache_that_does_not_fit_is_refused_whatever_the_experts():
    with pytest.raises(InvalidInputError, match="lacks"):
        moestro.plan(machine=BOX, batches=[10**5], disk=1e9)


def test_slices_are_those_of_a_mesh():
    """Groups are not cut: 64 columns are two groups of mxfp4, and more slices than groups are no way to run it."""
    _, found = ways(form="mxfp4", devices=4)
    assert {choice.tp for choice in found} == {1, 2}
    search, found = ways(form=None, devices=64)
    assert max(choice.tp for choice in found) == 64
    search, _ = ways(form="mxfp4", devices=4)
    assert "mxfp4 is not cut into 4 slices: it has fewer groups of weights" in search.notes


@pytest.mark.parametrize(("form", "parts"), [("bfloat16", 3), ("mxfp4", 2), ("int4-g32", 2), ("int8", 5)])
def test_bytes_of_a_slice(form, parts):
    """Those of the first slice as `take_slice` cuts it, which is the widest."""
    from moestro.formats import quantize
    from moestro.parallel.shard import take_slice
    from moestro.weights import ExpertWeights

    layer = BUNDLED.layers[0].stored_as(form)
    gate_up, down = (quantize(torch.randn(1, *shape), form) for shape in (layer.gate_up, layer.down))
    kept = take_slice(ExpertWeights(gate_up, down), 0, parts, "test")
    nbytes = sum(t.nbytes for stored in (kept.gate_up, kept.down) for t in stored.tensors)
    assert layer.cut(parts).size.expert_bytes == nbytes


def test_every_way_is_there_once():
    found = moestro.plan(machine=BOX, formats=[None, "int8", "bfloat16", "int8"], batches=[2, 1, 2])
    assert sorted((str(c.choice.format), c.load.batch) for c in found.candidates) == [
        ("None", 1),
        ("None", 2),
        ("int8", 1),
        ("int8", 2),
    ]


def test_a_search_ends_with_its_plan():
    search, _ = ways(form="int8")
    gone = weakref.ref(search)
    del search
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("given", "about"),
    [
        ({"format": ["int8"]}, "format="),
        ({"memory": 0}, "memory=0"),
        ({"memory": -1}, "memory=-1"),
        ({"memory": 1e9}, "memory=1000000000.0"),
        ({"disk": -1}, "disk=-1"),
        ({"disk": math.inf}, "disk=inf"),
        ({"disk": math.nan}, "disk=nan"),
        ({"disk": "2GB/s"}, "disk='2GB/s'"),
        ({"formats": []}, "no format"),
        ({"batches": [1.5]}, "whole numbers"),
        ({"projections": "int3"}, "int3"),
        ({"prompt_tokens": 1000, "new_tokens": 25}, "at most 1,024 together"),
        ({"machine": replace(BOX, link_bytes_per_second=0.0), "devices": 2}, "links have no rate"),
        ({"machine": Machine("bare", 10**9, 1e10)}, "flops_per_second"),
        ({"machine": replace(BOX, bytes_per_second=-1.0)}, "bytes_per_second = -1.0"),
    ],
)
def test_what_is_refused(given, about):
    with pytest.raises(InvalidInputError, match=r"^\[plan\] got .+; needs .+\. .+") as error:
        moestro.plan(**{"machine": BOX} | given)
    assert about in str(error.value)


@pytest.mark.parametrize(
    "ids", [torch.zeros(5), torch.zeros(0, TOP_K, dtype=torch.int64), torch.zeros(5, TOP_K), torch.full((5, TOP_K), -2)]
)
def test_recorded_ids_that_are_none(ids):
    with pytest.raises(InvalidInputError, match="recorded ids"):
        moestro.plan(machine=BOX, spread=Spread(recorded=(ids,) * LAYERS))


def test_no_disk_where_nobody_wants_one():
    machine = replace(BOX, disk_bytes_per_second=1e9, memory=12 * 10**6)
    assert moestro.plan(machine=machine, formats=[None], prompt_tokens=8).best.choice.memory is not None
    with pytest.raises(InvalidInputError, match="lacks"):
        moestro.plan(machine=machine, formats=[None], prompt_tokens=8, disk=0)


def test_empty_slots_cost_nothing():
    """Of recorded ids half of the slots are empty, and of the first layer all."""
    ids = torch.arange(TOP_K).repeat(50, 1)
    half = ids.clone()
    half[:, TOP_K // 2 :] = -1
    slow = replace(BOX, flops_per_second={"default": 1e9})
    whole, halved = (
        expert_seconds(BUNDLED, slow, Spread(recorded=(each,) * LAYERS), 4096, Choice()) for each in (ids, half)
    )
    assert halved == pytest.approx(whole / 2)
    none = Spread(recorded=(torch.full_like(ids, -1), *[ids] * (LAYERS - 1)))
    for choice in (Choice(), Choice(ep=2)):
        assert expert_seconds(BUNDLED, slow, none, 64, choice) > 0


def test_the_busiest_rank_reads_its_own_experts():
    """One token whose four experts are all on the first of four ranks: that rank reads four, not their share."""
    ids = torch.arange(TOP_K).repeat(50, 1)
    alone, four = (
        expert_seconds(BUNDLED, BOX, Spread(recorded=(ids,) * LAYERS), 1, choice) for choice in (Choice(), Choice(ep=4))
    )
    assert alone == four == pytest.approx(LAYERS * TOP_K * EXPERT_BYTES / BOX.bytes_per_second)
    drawn = expert_seconds(BUNDLED, BOX, Spread(), 1, Choice(ep=4))
    assert 1.5 < drawn / (LAYERS * EXPERT_BYTES / BOX.bytes_per_second) < 2.5


def test_an_all_to_all_by_hand():
    """Of 8 tokens two are on each of 4 ranks, and all go to the first: six rows out, six back, then a gather."""
    ids = torch.arange(TOP_K).repeat(8, 1)
    fast = replace(BOX, link_seconds=1e-9)
    name, seconds = communication(BUNDLED, fast, Spread(recorded=(ids,) * LAYERS), 8, Choice(ep=4))
    row = 256 * 2 / 1e9
    swapped = LAYERS * (12 * row + 2e-9 + 3 * (2 * row + 1e-9))
    reduced = LAYERS * 2 * 3 * (8 * 256 * 4 / 4 / 1e9 + 1e-9)
    assert seconds == pytest.approx(min(swapped, reduced))
    assert name == ("all-to-all" if swapped < reduced else "all-reduce")


def test_processes_of_this_machine_add_up_and_take_the_logits_of_the_first():
    here = replace(BOX, is_here=True)
    name, seconds = communication(BUNDLED, here, Spread(), 8, Choice(ep=4))
    assert name == "all-reduce"
    assert seconds == pytest.approx(LAYERS * 2 * 3 * (8 * 256 * 4 / 4 / 1e9 + 1e-5))
    words = BUNDLED.config.vocab_size
    assert logits_seconds(BUNDLED, here, 8, 4) == pytest.approx(2 * (8 * words * 4 / 1e9 + 1e-5))
    assert logits_seconds(BUNDLED, here, 8, 1) == logits_seconds(BUNDLED, BOX, 8, 4) == 0


def test_messages_do_not_grow_with_tokens():
    slow = replace(BOX, link_bytes_per_second=1e15, link_seconds=1.0)
    few, many = (communication(BUNDLED, slow, Spread(), tokens, Choice(ep=4))[1] for tokens in (4096, 65536))
    assert few == pytest.approx(many, rel=1e-3)


def test_every_layer_sends_what_it_sends():
    """Of recorded ids the layers differ: all on one rank, or none anywhere."""
    ids, fast = torch.arange(TOP_K).repeat(64, 1), replace(BOX, link_seconds=0.0)
    none = torch.full_like(ids, -1)
    spreads = (Spread(recorded=(ids, *[none] * 5)), Spread(recorded=(*[none] * 5, ids)), Spread(recorded=(ids,) * 6))
    first, last, every = (communication(BUNDLED, fast, spread, 64, Choice(ep=2))[1] for spread in spreads)
    assert first == last < every


@pytest.mark.parametrize("tokens", [1, MOST_DECODED, MOST_DECODED + 1])
def test_misses_of_short_prompts(tokens):
    """A prompt of few tokens is decoding to the slots, and is read from nothing all the same."""
    prompt, _ = missed_bytes(BUNDLED, Spread(), Load(1, tokens, 8), total_bytes(BUNDLED.sizes) // 2)
    assert prompt >= LAYERS * TOP_K * EXPERT_BYTES


def test_misses_of_large_batches():
    """A step of many sequences is a prompt to the slots, and misses all the same."""
    batch = MOST_DECODED + 1
    _, step = missed_bytes(BUNDLED, Spread(), Load(batch, 1, 8), total_bytes(BUNDLED.sizes) // 2)
    assert step > total_bytes(BUNDLED.sizes) / 4


def test_steps_go_on_where_a_recorded_prompt_ends():
    """After a prompt on experts 0 to 3, steps on 4 to 7 miss these once, and never again."""
    ids = torch.cat([torch.arange(TOP_K).repeat(8, 1), (TOP_K + torch.arange(TOP_K)).repeat(200, 1)])
    spread, seen = Spread(recorded=(ids,) * LAYERS), []
    draw = Spread.ids
    budget = total_bytes(BUNDLED.sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spread, "ids", lambda *given: seen.append(draw(*given)) or seen[-1])
        prompt, step = missed_bytes(BUNDLED, spread, Load(1, 8, 8), budget)
    assert (prompt, step) == (LAYERS * TOP_K * EXPERT_BYTES, 0)
    assert all(int(each.min()) == TOP_K for each in seen[LAYERS:])


def test_bits_are_those_of_all_layers():
    first, *others = BUNDLED.layers
    mixed = replace(BUNDLED, layers=(first.stored_as("mxfp4"), *others))
    assert mixed.bits == pytest.approx((4.25 + 5 * 16) / 6)
