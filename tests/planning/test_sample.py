"""What is timed in position of a model: its own shapes, every layer counted once, and all of the time somewhere."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from dataclasses import astuple, replace

import pytest
import torch

import moestro
from hf.checkpoints import Checkpoints
from moestro import machine
from moestro.errors import UnsupportedError
from moestro.hf.sources import empty_model
from moestro.ops import measured
from moestro.ops.expert_mlp import crossover
from moestro.ops.expert_mlp.costs import PLAIN, Costs
from moestro.planning import Choice, Load, predict, read_machine, sample
from moestro.planning.model import read_model

BUNDLED = read_model(None)
TWO = Choice(ep=2)


@pytest.fixture(autouse=True)
def kept_here(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "busy_seconds", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def test_every_second_belongs_to_one_stage(monkeypatch):
    """Of a clock that ticks once at each look, the passes of a generation add up to all but its ends."""
    model = sample._made(BUNDLED, range(2))
    ticks = itertools.count()
    monkeypatch.setattr(sample.time, "perf_counter", lambda: float(next(ticks)))
    passes = sample._generated(model.eval(), torch.ones(1, 5, dtype=torch.int64), 4)
    assert len(passes) == 4
    total = sum(sum(map(sum, map(astuple, one.blocks))) + sum(astuple(one.outside)) for one in passes)
    assert total == next(ticks) - 1
    assert all(rest.attention > 0 for one in passes for rest in one.blocks)
    assert all(one.outside.dense > 0 for one in passes)


def test_every_layer_counts(monkeypatch):
    """Six layers that are alike take six times the median of those timed."""
    monkeypatch.setattr(sample, "SMALL_BYTES", 0)
    rest, outside = sample.Rest(1.0, 2.0, 3.0), sample.Rest(0.5, 0.0, 0.25)
    one = sample._Pass((rest,) * sample.LAYERS, outside)
    monkeypatch.setattr(sample, "_run", lambda model, positions, *_: ([one], [one]))
    prompt, step = sample._measured(BUNDLED, Load(1, 4, 4), "torch", lambda *_: None)
    assert prompt == step == sample.Rest(6.5, 12.0, 18.25)


def test_kinds_of_layers(made):
    kinds = {
        like: sample._kinds(empty_model(read_model(made.folder(like)).config)) for like in ("gpt-oss-20b", "olmoe")
    }
    assert len(kinds["gpt-oss-20b"]) == 2  # attention to a window, and to all
    assert len(kinds["olmoe"]) == 1
    deepseek = sample._kinds(empty_model(read_model(made.folder("deepseek-v3")).config))
    assert len(deepseek) == 2  # dense, and of experts
    for found in (*kinds.values(), deepseek):
        positions = sorted(position for of_kind in found for position in of_kind)
        assert positions == list(range(len(positions)))


@pytest.mark.parametrize("like", ["gpt-oss-20b", "olmoe", "deepseek-v3", "qwen3-30b-a3b", "glm4-moe"])
def test_architectures_are_timed(made, like):
    model = read_model(made.folder(like))
    before = json.dumps(model.config.to_dict(), default=str)
    for rest in sample._measured(model, Load(2, 7, 4), "auto", lambda *_: None):
        assert min(astuple(rest)) >= 0
        assert rest.attention > 0
    assert json.dumps(model.config.to_dict(), default=str) == before


def test_small_layers_are_all_timed(monkeypatch):
    skeleton = empty_model(BUNDLED.config)
    assert sample._few(skeleton, range(6)) == range(6)
    monkeypatch.setattr(sample, "SMALL_BYTES", 1 << 20)
    assert sample._few(skeleton, range(6)) == range(sample.LAYERS)


def test_on_a_busy_machine_it_is_measured_again(monkeypatch):
    """And the plan says so."""
    monkeypatch.setattr(sample, "_measured", lambda *_: (sample.Rest(1.0, 2.0, 3.0), sample.Rest(4.0, 5.0, 6.0)))
    shares = iter([0.4, 0.05])
    monkeypatch.setattr(measured, "taken_by_others", lambda call: (call(), next(shares)))
    note = "other programs took 40% of the processors while layers were timed: plan again when they have ended"
    assert note in moestro.plan().notes
    assert moestro.plan().notes == moestro.plan().notes == ()


def test_it_is_measured_once(monkeypatch):
    calls = []
    found = sample.Rest(1.0, 2.0, 3.0), sample.Rest(4.0, 5.0, 6.0)
    monkeypatch.setattr(sample, "_measured", lambda *given: calls.append(given) or found)
    for _ in range(2):
        assert sample.rest_of(BUNDLED, Load(1, 8, 4), "auto") == (*found, 0.0)
    sample.rest_of(BUNDLED, Load(2, 8, 4), "auto")
    assert len(calls) == 2
    assert sum(name.startswith("beside the experts of ") for name in measured.read()) == 2


def test_what_is_measured_may_need_what_is_measured():
    (inner,), _ = measured.kept("inner", lambda: [2.0], bool)

    def measure():
        (other,), _ = measured.kept("other", lambda: [3.0], bool)
        return [inner + other]

    assert measured.kept("outer", measure, bool) == ([5.0], True)
    assert measured.read() == {"inner": [2.0], "other": [3.0], "outer": [5.0]}


def test_a_sample_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(machine, "available_bytes", lambda: 2**20)
    with pytest.raises(UnsupportedError, match="--machine"):
        sample._made(BUNDLED, range(2))


@pytest.mark.parametrize("like", ["gpt-oss-20b", "deepseek-v3"])
def test_what_was_made_is_gone(made, like, monkeypatch):
    """Half of the free memory may be in it, and the next batch, or a check, needs it: nothing may wait for gc."""
    kept, make = [], sample._made
    monkeypatch.setattr(sample, "_made", lambda *given: (model := make(*given), kept.append(weakref.ref(model)))[0])
    gc.disable()
    try:
        sample._measured(read_model(made.folder(like)), Load(1, 4, 4), "auto", lambda *_: None)
        assert kept[0]() is None
    finally:
        gc.enable()


def test_only_the_engine_is_predicted_where_nothing_measured_decides(monkeypatch):
    """As in the call itself: of small experts, with MOESTRO_MEASURE=0, and in the deterministic mode."""
    ways = []
    here = replace(read_machine("h200"), is_here=True)

    def measured_costs(way, *_):
        ways.append(way)
        return (Costs((1,), 1e-6, (1e-9,), (1e-9,)),) * 2

    monkeypatch.setattr(predict, "_costs", measured_costs)
    monkeypatch.setattr(crossover, "decides", lambda nbytes: nbytes > 10**9)
    predict.expert_seconds(BUNDLED, here, predict.Spread(), 4, Choice())
    assert set(ways) == {""}
    monkeypatch.setattr(crossover, "decides", lambda nbytes: True)
    predict.expert_seconds(BUNDLED, here, predict.Spread(), 4, Choice())
    assert set(ways) == {"", PLAIN}


def test_a_process_has_its_share_of_threads_and_of_memory(monkeypatch):
    """And in a job nothing that is measured chooses."""
    seen, here = [], replace(read_machine("h200"), is_here=True)

    def measured_costs(way, dtype, form, columns, threads):
        seen.append((way, threads))
        return (Costs((1,), 0.0, (1e-30,), (1e-30,)),) * 2

    monkeypatch.setattr(predict, "_costs", measured_costs)
    monkeypatch.setattr(predict, "_are_cached", lambda model: False)
    monkeypatch.setattr(crossover, "decides", lambda nbytes: True)
    torch.set_num_threads(4)
    try:
        # Of 16 experts a thousand tokens reach all, on each rank half of them, at half of the rate.
        seconds = [predict.expert_seconds(BUNDLED, here, predict.Spread(), 1000, choice) for choice in (Choice(), TWO)]
    finally:
        torch.set_num_threads(1)
    assert seconds[1] == pytest.approx(seconds[0])
    assert set(seen) == {("", 4), (PLAIN, 4), ("", 2)}


def test_costs_are_measured_with_the_threads_of_a_process(monkeypatch):
    threads = []
    monkeypatch.setattr(predict.costs, "costs", lambda way, bind, case: threads.append((case.threads, now())))
    now = torch.get_num_threads
    predict._costs("", torch.bfloat16, "bfloat16", (256, 128), 2)
    assert set(threads) == {(2, 2)}
    assert now() == 1
