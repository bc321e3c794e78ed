"""Plans of described machines: formulas by hand, and what follows from them whatever the figures."""

from __future__ import annotations

import json
from dataclasses import astuple, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moestro
from moestro.errors import InvalidInputError
from moestro.memory import total_bytes
from moestro.parallel.simulate_traces import zipf_ids
from moestro.planning import Choice, Load, Machine, read_machine
from moestro.planning.model import count, read_model
from moestro.planning.plot import AXES
from moestro.planning.predict import Spread, communication, expert_seconds, missed_bytes

BUNDLED = read_model(None)
BOX = Machine("box", 10**9, 1e10, {"default": 1e12}, devices=8, link_bytes_per_second=1e9, link_seconds=1e-5)
LAYERS, EXPERTS, TOP_K = 6, 16, 4
EXPERT_BYTES = 98304


def test_the_bundled_model_by_hand():
    """One sequence, one token: four experts a layer are read; all weights are; keys and values are."""
    found = moestro.plan(machine=BOX, formats=[None], prompt_tokens=32, new_tokens=8).best
    assert found.decode.experts == pytest.approx(LAYERS * TOP_K * EXPERT_BYTES / 1e10)
    prompt, step, cache_bytes = count(BUNDLED, 1, 32, 8)
    assert found.decode.dense == pytest.approx(max(step.weight_bytes / 1e10, step.flops / 1e12))
    assert found.decode.attention == pytest.approx((prompt.cache_bytes + cache_bytes) / 2 / 1e10)
    touched = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** 32)
    reading = touched * EXPERT_BYTES / 1e10
    computing = 2 * 32 * TOP_K * (EXPERT_BYTES / 2) / 1e12
    assert found.prompt.experts == pytest.approx(LAYERS * max(reading, computing))
    need = found.need
    assert (need.experts, need.rest) == (total_bytes(BUNDLED.sizes), BUNDLED.rest_bytes)
    assert need.cache == cache_bytes
    assert found.decode_rate == pytest.approx(1 / sum(astuple(found.decode)))
    assert found.rate == pytest.approx(8 / (found.prompt.total + 7 * found.decode.total))


def test_it_fits_to_the_byte_or_says_what_is_missing():
    whole = moestro.plan(machine=BOX, formats=[None]).best.need.device
    assert moestro.plan(machine=BOX, formats=[None], memory=whole).best.choice == Choice()
    with pytest.raises(InvalidInputError, match="lacks 1 bytes"):
        moestro.plan(machine=BOX, formats=[None], memory=whole - 1)


def test_with_a_disk_what_is_missing_is_read():
    whole = moestro.plan(machine=BOX, formats=[None]).best.need
    short = EXPERT_BYTES * 20
    found = moestro.plan(machine=BOX, formats=[None], memory=whole.device - short, disk=1e9).best
    assert found.choice.memory == whole.experts - short
    assert found.need.device <= whole.device - short
    prompt, step = missed_bytes(BUNDLED, Spread(), found.load, found.choice.memory)
    assert (found.prompt.misses, found.decode.misses) == (prompt / 1e9, step / 1e9)
    assert 0 < step < LAYERS * TOP_K * EXPERT_BYTES


def test_nothing_is_missed_where_all_fits():
    prompt, step = missed_bytes(BUNDLED, Spread(), Load(1, 64, 8), total_bytes(BUNDLED.sizes))
    assert step == 0
    assert 0 < prompt <= total_bytes(BUNDLED.sizes)


def test_an_all_reduce_by_hand():
    """2 (R - 1) / R of T x H numbers in float32 leave each rank, in 2 (R - 1) messages."""
    name, seconds = communication(BUNDLED, BOX, Spread(), 64, Choice(tp=4))
    assert name == "all-reduce"
    assert seconds == pytest.approx(LAYERS * 2 * 3 * (64 * 256 * 4 / 4 / 1e9 + 1e-5))
    assert communication(BUNDLED, BOX, Spread(), 64, Choice()) == ("none", 0.0)


@settings(max_examples=20)
@given(st.integers(1, 400), st.floats(0, 1.5))
def test_experts_that_a_batch_reaches(num_tokens, exponent):
    """As many as drawn batches reach, within what their number allows."""
    layer, spread = BUNDLED.layers[0], Spread(exponent)
    drawn = [len(spread.ids(0, layer, num_tokens, seed).unique()) for seed in range(1, 40)]
    mean = sum(drawn) / len(drawn)
    assert spread.touched(0, layer, num_tokens) == pytest.approx(mean, abs=0.6)


@settings(max_examples=4)
@given(st.integers(1, 64), st.sampled_from([1, 2, 8]), st.sampled_from(["bytes_per_second", "memory"]))
def test_a_better_machine_is_never_slower(batch, devices, what):
    before = moestro.plan(machine=BOX, batches=[batch], devices=devices, formats=[None])
    better = replace(BOX, **{what: getattr(BOX, what) * 2})
    after = moestro.plan(machine=better, batches=[batch], devices=devices, formats=[None])
    assert after.best.rate >= before.best.rate * (1 - 1e-9)


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (4, 2), (16, 1)])
def test_ranks_share_the_experts(ep, tp):
    alone = expert_seconds(BUNDLED, BOX, Spread(), 256, Choice())
    shared = expert_seconds(BUNDLED, BOX, Spread(), 256, Choice(ep=ep, tp=tp))
    assert alone / (ep * tp) <= shared * (1 + 1e-9)
    assert shared < alone


def test_recorded_ids_are_what_counts():
    """All tokens on the same experts: fewer are read, and one rank has all the work."""
    same = tuple(torch.arange(TOP_K).repeat(50, 1) for _ in range(LAYERS))
    spread = Spread(recorded=same)
    assert spread.touched(0, BUNDLED.layers[0], 300) == TOP_K
    even = moestro.plan(machine=BOX, batches=[8], formats=[None]).best
    uneven = moestro.plan(machine=BOX, batches=[8], formats=[None], spread=spread).best
    assert uneven.decode.experts < even.decode.experts
    two = expert_seconds(BUNDLED, BOX, spread, 4096, Choice(ep=2))
    assert two == pytest.approx(expert_seconds(BUNDLED, BOX, spread, 4096, Choice()), rel=0.01)
    with pytest.raises(InvalidInputError, match="recorded ids of 1 layers"):
        moestro.plan(machine=BOX, spread=Spread(recorded=same[:1]))


def test_assumptions_are_ordered_by_what_they_change():
    found = moestro.plan(machine="h200", batches=[4], devices=4)
    changes = [abs(change) for _, change in found.assumptions]
    assert changes == sorted(changes, reverse=True)
    assert changes[0] > 0
    assert any("links" in text for text, _ in found.assumptions) == (found.best.choice.ranks > 1)


def test_what_is_printed_and_written(tmp_path):
    found = moestro.plan(machine="h200", batches=[1, 8], devices=2)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith(("as stored", "int8", "mxfp4")) for line in lines) == min(12, len(found.candidates))
    plain = json.loads(json.dumps(found.as_json()))
    assert [each["rate"] for each in plain["candidates"]] == sorted((c.rate for c in found.candidates), reverse=True)
    assert plain["planned_machine"]["name"] == "h200"
    found.plot(tmp_path / "plan.svg")
    picture = (tmp_path / "plan.svg").read_text()
    assert all(f"<!-- over {name} -->" in picture for name in AXES)
    with pytest.raises(InvalidInputError):
        found.plot(tmp_path / "plan.txt")


@pytest.mark.parametrize(
    ("given_", "about"),
    [
        ({"batches": []}, "batches"),
        ({"batches": [0]}, "batches"),
        ({"prompt_tokens": 0}, "prompt"),
        ({"formats": []}, "no format"),
        ({"formats": ["int3"]}, "int3"),
        ({"devices": 9}, "9 devices"),
        ({"memory": "some"}, "memory"),
        ({"machine": "nothing"}, "machine"),
    ],
)
def test_what_is_refused(given_, about):
    with pytest.raises(InvalidInputError, match=r"^\[\w+\] got .+; needs .+\. .+") as error:
        moestro.plan(**{"machine": BOX} | given_)
    assert about in str(error.value)


def test_one_layer_is_drawn_as_the_simulator_draws():
    ids = Spread(0.8).ids(0, BUNDLED.layers[0], 100)
    assert torch.equal(ids, zipf_ids(100, EXPERTS, TOP_K, 0.8, 0))


def test_devices_are_those_of_the_machine():
    assert read_machine("h200").devices == 8


def test_it_says_how_far_it_is():
    """Each way that is predicted, which a deep model with many devices makes slow."""
    told = []
    plan = moestro.plan(machine="h200", devices=4, batches=(1, 2), say=lambda *each: told.append(each))
    ways = [each for each in told if each[0] == "predicting"]
    assert len(ways) > 1
    assert ways == [("predicting", number, len(ways)) for number in range(len(ways))]
    assert len(plan.candidates) == len(ways)
