"""What each way to multiply costs: the sample, what follows from it, and who runs then."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

import moestro
from moestro import ExpertWeights, Routing, expert_mlp, reference, settings
from moestro.formats import FORMATS
from moestro.ops import measured, native
from moestro.ops.expert_mlp import costs, crossover
from moestro.ops.expert_mlp.costs import NEVER, ROWS, Costs, Work

from . import problems
from .engines import RUNNING, STORED, TILED, check, check_tiles, needs_engine, stored_weights
from .stored import sizes_for

LARGE = problems.Sizes(6, 512, 512, 4, 2)
"""Experts that are worth measuring."""

BEST = (TILED + RUNNING)[:1]


@pytest.fixture(autouse=True)
def measures(poisoned_memory, tmp_path, monkeypatch):
    torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(settings, "MEASURES", True)
    monkeypatch.setattr(measured._Waits, "longest", lambda self: 0.0)  # other tests may keep the cores
    caches = costs.costs, costs._read_rate
    for cache in caches:
        cache.cache_clear()
    yield tmp_path / "moestro" / measured.FILE
    for cache in caches:
        cache.cache_clear()


def flat(seconds, call=0.0):
    """So many seconds a weight with any number of rows."""
    return Costs(ROWS, call, (seconds,) * len(ROWS), (seconds,) * len(ROWS))


def pretend(monkeypatch, engine, plain):
    """Costs by way; the sets have those of `engine`."""
    monkeypatch.setattr(costs, "costs", lambda way, *_: plain if way == costs.PLAIN else engine)
    monkeypatch.setattr(costs, "_read_rate", lambda threads: (1e12, True))


def large(rows=3, dtype=torch.bfloat16):
    """A call of large experts, each with so many rows."""
    sizes = problems.Sizes(rows * 2, LARGE.hidden_size, LARGE.intermediate_size, 4, 2)
    ids = torch.tensor([[0, 1], [2, 3]]).repeat(rows, 1)
    weights = problems.weights(sizes, problems.ACTIVATIONS[0], dtype)
    return torch.randn(rows * 2, 512).to(dtype), Routing(ids, torch.rand(rows * 2, 2)), weights


def test_cost_between_and_beyond_what_was_tried():
    found = Costs((1, 3, 9), 0.0, (1.0, 2.0, 8.0), (4.0, 4.0, 4.0))
    assert found.wide_rows == 9
    assert [found.at(rows) for rows in (0.5, 1, 2, 3, 6)] == [1, 1, 1.5, 2, 5]
    assert [found.at(rows) for rows in (9, 18)] == [4, 8]


@pytest.mark.parametrize("first", [*ROWS, NEVER])
def test_wide_kernels_begin_where_they_are_faster(first):
    wide = tuple(0.5 if rows >= first else 2.0 for rows in ROWS)
    assert Costs(ROWS, 0.0, (1.0,) * len(ROWS), wide).wide_rows == first


def test_noise_below_where_both_are_one_kernel_is_not_decisive():
    """A sum that is a little smaller with wide kernels from 60 rows on than from 1."""
    narrow = (0.98, 0.99, 1.0, 0.99, 1.0, 1.0, 1.3, 1.3)
    assert Costs(ROWS, 0.0, narrow, (1.0,) * len(ROWS)).wide_rows == 1
    assert Costs(ROWS, 0.0, (0.8, *narrow[1:]), (1.0,) * len(ROWS)).wide_rows == 2


def test_no_wide_kernels_where_nothing_is_gained():
    assert flat(1.0).wide_rows == NEVER


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (3, 5, 2), (2, 4, 4), (4, 3, 1)])
def test_work_is_what_even_routing_has(tokens, experts, top_k):
    """Against every routing there is."""
    choices = list(itertools.combinations(range(experts), top_k))
    routings = list(itertools.product(choices, repeat=tokens))
    active = sum(len(set(itertools.chain(*routing))) for routing in routings) / len(routings)
    sizes = problems.Sizes(tokens, 16, 8, experts, top_k)
    weights = problems.weights(sizes, problems.ACTIVATIONS[0], torch.float32)
    work = Work.of(problems.routing(sizes, kind="full"), weights)
    assert work.experts == pytest.approx(active)
    assert work.rows * work.experts == pytest.approx(tokens * top_k)
    assert (work.first, work.second) == (16 * 16, 16 * 8)
    assert work.nbytes == pytest.approx(active * 4 * 3 * 16 * 8)


def test_seconds_are_those_of_products_or_of_reading():
    work = Work(experts=10, rows=4, first=200, second=100, nbytes=5000, cached=False)
    one, other = flat(1.0, call=7.0), flat(2.0)
    assert work.seconds(one, other, 1e9) == 10 * 7 + 10 * (200 + 200)
    assert work.seconds(one, other, 0.5) == 10 * 7 + 10_000
    assert Work(10, 4, 200, 100, 5000, cached=True).seconds(one, other, 0.5) == 10 * 7 + 10 * 400


@pytest.mark.parametrize("name", STORED)
def test_a_sample_is_experts_of_the_format(name):
    weights = costs.sample(FORMATS[name], 256, "float", 1)
    routing = Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    y = reference.expert_mlp(torch.linspace(-1, 1, 256).repeat(2, 1), routing, weights)
    assert weights.gate_up.format.name == name
    assert y.isfinite().all()
    assert y.abs().max() > 1e-20, "products of numbers that are too small to multiply fast"


@pytest.mark.parametrize("size", [1, 256, 257, 2880, 4096, 100_000])
def test_columns_of_a_sample(size):
    columns = costs.columns_of(size)
    assert 256 <= columns <= costs.MOST_COLUMNS
    assert columns & (columns - 1) == 0
    assert min(size, costs.MOST_COLUMNS) <= columns < max(2 * size, 257)


def test_disturbed_times_are_not_believed():
    assert costs._rising([9.0, 1.0, 2.0, 8.0, 4.0], 0.25) == [0.75, 0.75, 1.75, 3.75, 3.75]


@needs_engine
@pytest.mark.parametrize("isa", TILED + RUNNING, ids=lambda isa: isa.name)
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("wide", [1, 2, 5, NEVER])
def test_any_rows_may_be_the_first_with_wide_kernels(isa, name, wide, monkeypatch):
    dtype = torch.bfloat16 if isa.multiplies_bfloat16 else torch.float32
    sizes = sizes_for(name, 21)
    x, routing = torch.randn(21, sizes.hidden_size).to(dtype), problems.routing(sizes, kind="duplicates")
    weights = stored_weights(name, sizes, problems.ACTIVATIONS[0])
    if isa.multiplies_bfloat16 and FORMATS[name].element not in native.TILED:
        pytest.skip("it does not multiply them")
    monkeypatch.setattr(crossover, "wide_rows", lambda *_: wide)
    (check_tiles if isa.multiplies_bfloat16 else check)(isa, x, routing, weights)


@needs_engine
@pytest.mark.parametrize("isa", [isa for isa in TILED if isa in BEST], ids=lambda isa: isa.name)
@pytest.mark.parametrize("rows", [2, 3])
def test_tiles_from_the_measured_rows_on(isa, rows, monkeypatch):
    pretend(monkeypatch, Costs((1, 3), 0.0, (1.0, 1.0), (2.0, 0.5)), flat(9.0))
    explained = moestro.explain(expert_mlp, *large(rows))
    assert {use.kernel == "bfloat16 tiles" for use in explained.kernels} == {rows >= 3}


@needs_engine
@pytest.mark.parametrize(("plain", "chosen"), [(0.5, "torch"), (0.95, None), (2.0, None)])
def test_the_smallest_prediction_runs(plain, chosen, monkeypatch):
    (isa,) = BEST
    pretend(monkeypatch, flat(1.0), flat(plain))
    arguments = large(dtype=torch.bfloat16 if isa.multiplies_bfloat16 else torch.float32)
    explained = moestro.explain(expert_mlp, *arguments)
    name = f"cpu-{isa.name}"
    assert explained.chosen == (chosen or name)
    work = Work.of(*arguments[1:]).experts * 3 * 512 * 512
    assert explained.predictions == pytest.approx({name: work, "torch": plain * work})
    assert f"predicted {name} {1e3 * work:.3g} ms, torch {1e3 * plain * work:.3g} ms" in str(explained)
    with moestro.use(implementation=name):
        assert moestro.explain(expert_mlp, *arguments).chosen == name


@needs_engine
def test_only_the_best_set_is_measured(monkeypatch):
    (isa,) = BEST
    asked = []
    monkeypatch.setattr(costs, "costs", lambda way, *_: asked.append(way) or flat(2.0 if way != costs.PLAIN else 1.0))
    monkeypatch.setattr(costs, "read_rate", lambda: 1e12)
    arguments = large(dtype=torch.bfloat16 if isa.multiplies_bfloat16 else torch.float32)
    explained = moestro.explain(expert_mlp, *arguments)
    assert set(asked) == {f"cpu-{isa.name}", costs.PLAIN}
    passed = [c for c in explained.candidates if "predicted" in (c.reason or "")]
    assert explained.chosen == "torch"
    assert all(f"and cpu-{isa.name} " in c.reason for c in passed)
    with moestro.use(implementation="cpu-portable"):
        moestro.explain(expert_mlp, *arguments)
    assert "cpu-portable" in asked


@needs_engine
def test_other_threads_have_costs_of_their_own(monkeypatch):
    (isa,) = BEST
    names = []
    sound = [1e-6] * (1 + 2 * len(ROWS))
    monkeypatch.setattr(measured, "kept", lambda name, *_: names.append(name) or (sound, True))
    arguments = large(dtype=torch.bfloat16 if isa.multiplies_bfloat16 else torch.float32)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            moestro.explain(expert_mlp, *arguments)
    finally:
        torch.set_num_threads(before)
    assert {"1 threads", "2 threads"} <= {name.rpartition(", ")[2] for name in names if name.startswith("cpu-")}


@needs_engine
@pytest.mark.parametrize("damaged", [[], [0.0] * (1 + 2 * len(ROWS)), [-1.0] * (1 + 2 * len(ROWS)), "many", [1e400]])
def test_damaged_costs_are_measured_over(measures, damaged):
    (isa,) = BEST
    arguments = large(dtype=torch.bfloat16 if isa.multiplies_bfloat16 else torch.float32)
    moestro.explain(expert_mlp, *arguments)
    (machine, kept), *_ = json.loads(measures.read_text()).items()
    measures.write_text(json.dumps({machine: dict.fromkeys(kept, damaged)}))
    costs.costs.cache_clear()
    costs._read_rate.cache_clear()
    found = moestro.explain(expert_mlp, *arguments).predictions
    assert all(0 < seconds < math.inf for seconds in found.values())


@needs_engine
@pytest.mark.parametrize("busy", ["engine", "plain"])
def test_what_was_measured_on_a_busy_machine_decides_nothing(busy, monkeypatch):
    (isa,) = BEST
    slow, fast = Costs((1, 3), 0.0, (9.0, 9.0), (1.0, 1.0), calm=False), Costs((1, 3), 0.0, (9.0, 9.0), (1.0, 1.0))
    pretend(monkeypatch, *((slow, flat(1e-3)) if busy == "engine" else (fast, replace(flat(1e-3), calm=False))))
    arguments = large(dtype=torch.bfloat16 if isa.multiplies_bfloat16 else torch.float32)
    explained = moestro.explain(expert_mlp, *arguments)
    assert (explained.chosen, explained.predictions, explained.too_busy) == (f"cpu-{isa.name}", {}, True)
    assert "not predicted: threads waited for cores" in str(explained)
    assert crossover.wide_rows(isa, None, arguments[0], arguments[2]) == (0 if busy == "engine" else 1)
    pretend(monkeypatch, fast, flat(1e-3))
    explained = moestro.explain(expert_mlp, *arguments)
    assert (explained.chosen, explained.too_busy) == ("torch", False)
    monkeypatch.setattr(costs, "_read_rate", lambda threads: (1e12, False))
    explained = moestro.explain(expert_mlp, *arguments)
    assert (explained.chosen, explained.too_busy) == (f"cpu-{isa.name}", True)
    nobody = Routing(torch.full((0, 2), -1), torch.ones(0, 2))
    assert not moestro.explain(expert_mlp, arguments[0][:0], nobody, arguments[2]).too_busy


@needs_engine
def test_nothing_is_asked_where_it_may_not_decide(monkeypatch):
    (isa,) = BEST
    arguments = large(dtype=torch.bfloat16 if isa.multiplies_bfloat16 else torch.float32)

    def asked(*_):
        raise AssertionError("it was measured")

    monkeypatch.setattr(costs, "costs", asked)
    with monkeypatch.context() as patch:
        patch.setattr(settings, "MEASURES", False)
        assert moestro.explain(expert_mlp, *arguments).predictions == {}
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        assert moestro.explain(expert_mlp, *arguments).chosen == f"cpu-{isa.name}"
    torch.use_deterministic_algorithms(True)
    assert moestro.explain(expert_mlp, *arguments).chosen == f"cpu-{isa.name}"
    torch.use_deterministic_algorithms(False)
    small = problems.Sizes(3, 64, 32, 4, 2)
    weights = problems.weights(small, problems.ACTIVATIONS[0], torch.float32)
    moestro.expert_mlp(torch.randn(3, 64), problems.routing(small), weights)


def test_all_experts_of_a_layer_count(monkeypatch):
    """However few of them have slots: rows of an expert follow from all of them."""
    _, routing, weights = large()

    class Slots(ExpertWeights):
        planned_experts = 64

    slots = Slots(weights.gate_up, weights.down)
    assert Work.of(routing, slots).rows < Work.of(routing, weights).rows


@needs_engine
def test_a_real_measurement_is_kept(measures, monkeypatch):
    """Nothing else of the process changes, whatever surrounds the first call."""
    (isa,) = BEST
    arguments = large(dtype=torch.bfloat16 if isa.multiplies_bfloat16 else torch.float32)
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), moestro.use(strategy="selective"):
        found = moestro.explain(expert_mlp, *arguments).predictions
    assert set(found) == {f"cpu-{isa.name}", "torch"}
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in found.values())
    assert torch.equal(torch.get_rng_state(), state)
    (kept,) = json.loads(measures.read_text()).values()
    assert any(name.startswith(f"cpu-{isa.name}, to ") for name in kept)
    costs.costs.cache_clear()
    monkeypatch.setattr(measured, "fastest", lambda *_: pytest.fail("measured again"))
    assert moestro.explain(expert_mlp, *arguments).predictions == found
