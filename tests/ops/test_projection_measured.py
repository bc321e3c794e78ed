"""Up to how many rows the engine multiplies: found by a search, kept for the machine, and the same on all ranks."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import moestro
from moestro import settings
from moestro.ops import measured as store
from moestro.ops.dispatch import observed
from moestro.ops.native import ISAS
from moestro.ops.projection import PROJECTION, measured, projection, tuning
from moestro.ops.projection.tuning import TILED_ROWS

NAME = "cpu-one: bfloat16 linear modules, {} threads, most rows"
FIRST = [isa for isa in ISAS if isa.runs_here and isa.multiplies_floats][:1]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(settings, "MEASURES", True)
    monkeypatch.setattr(store._Waits, "longest", lambda self: 0.0)  # other tests may keep the cores
    measured.most_rows.cache_clear()
    yield tmp_path / "moestro"
    measured.most_rows.cache_clear()


def timed(monkeypatch, crossing):
    """Pretend that the engine is as fast up to so many rows; the numbers of rows that were tried."""
    tried = []

    def is_ahead(one, other, share=1.0):
        tried.append(one.args[0].shape[0])
        return tried[-1] <= crossing * share

    monkeypatch.setattr(measured, "_is_ahead", is_ahead)
    return tried


@pytest.mark.parametrize("crossing", [0, 1, 3, 4, 16, 100, 256, 511, 512, 5000])
def test_the_search_finds_the_crossing(monkeypatch, crossing):
    tried = timed(monkeypatch, crossing)
    found = measured.most_rows("one", torch.bfloat16, 2, F.linear)
    most = max((rows for rows in measured.STEPS if rows <= crossing), default=0)
    assert found == (measured.ALL if crossing >= measured.STEPS[-1] / measured.FAR else most)
    assert len(tried) <= 5


@pytest.mark.unpoisoned
def test_a_busy_machine_decides_nothing(monkeypatch, folder):
    monkeypatch.setattr(store._Waits, "longest", lambda self: 9.0)
    given_up = store.times_given_up()
    assert measured.most_rows("one", torch.bfloat16, 2, F.linear) is None
    assert store.times_given_up() == given_up + 1  # it does not go on
    assert store.read() == {}
    x, weight = torch.randn(TILED_ROWS + 1, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    if FIRST:
        explained = moestro.explain(projection, x, weight)
        assert explained.chosen == "torch"
        assert "threads waited for cores" in str(explained)
        assert moestro.explain(projection, x[:4], weight).chosen == f"cpu-{FIRST[0].name}"


def test_it_is_kept_and_not_measured_again(monkeypatch, folder):
    tried = timed(monkeypatch, 16)
    assert measured.most_rows("one", torch.bfloat16, 2, F.linear) == 16
    count = len(tried)
    measured.most_rows.cache_clear()
    assert measured.most_rows("one", torch.bfloat16, 2, F.linear) == 16
    assert len(tried) == count
    assert measured.most_rows("one", torch.bfloat16, 3, F.linear) == 16
    assert len(tried) == 2 * count
    kept = json.loads((folder / store.FILE).read_text())
    assert [*kept.values()] == [{NAME.format(2): [16], NAME.format(3): [16]}]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', ["many"], "many", [1e400], [-4], [5], [8, 8], []])
def test_a_damaged_file_is_measured_over(monkeypatch, folder, content):
    timed(monkeypatch, 8)
    folder.mkdir()
    damaged = content
    if content == "many" or isinstance(content, list):
        damaged = json.dumps({store._machine(): {NAME.format(2): content}})
    (folder / store.FILE).write_text(damaged)
    assert measured.most_rows("one", torch.bfloat16, 2, F.linear) == 8
    assert store.read() == {NAME.format(2): [8]}


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    timed(monkeypatch, 8)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(settings, "cache_folder", lambda: tmp_path / "file" / "moestro")
    assert measured.most_rows("one", torch.bfloat16, 2, F.linear) == 8


def test_a_user_without_a_home(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    timed(monkeypatch, 8)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert measured.most_rows("one", torch.bfloat16, 2, F.linear) == 8


def test_nothing_but_the_file_is_left(monkeypatch, folder):
    def full(one, other):
        raise OSError("No space left on device")

    timed(monkeypatch, 8)
    assert measured.most_rows("one", torch.bfloat16, 2, F.linear) == 8
    monkeypatch.setattr(os, "replace", full)
    assert measured.most_rows("one", torch.bfloat16, 3, F.linear) == 8
    assert [each.name for each in folder.iterdir()] == [store.FILE]


def test_what_another_process_found_meanwhile_stays(monkeypatch, folder):
    def is_ahead(one, other, share=1.0):
        (folder / store.FILE).write_text(json.dumps({store._machine(): {"other": [4]}, "elsewhere": {"one": [2]}}))
        return True

    folder.mkdir()
    monkeypatch.setattr(measured, "_is_ahead", is_ahead)
    measured.most_rows("one", torch.bfloat16, 2, F.linear)
    assert store.read() == {"other": [4], NAME.format(2): [measured.ALL]}
    assert "elsewhere" in json.loads((folder / store.FILE).read_text())


def test_threads_measure_one_after_another(monkeypatch):
    inside, most = [], []

    def is_ahead(one, other, share=1.0):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return True

    monkeypatch.setattr(measured, "_is_ahead", is_ahead)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda n: measured.most_rows("one", torch.bfloat16, n % 2, F.linear), range(4))
        assert [*found] == [measured.ALL] * 4
    assert max(most) == 1
    assert len(most) == 10


def test_the_graphics_card_is_not_woken(monkeypatch):
    """A process that has asked for its properties cannot fork workers that use it."""

    def woken(*_):
        raise AssertionError

    for name in ("device_count", "get_device_name", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, woken)
    timed(monkeypatch, 8)
    store._machine.cache_clear()
    assert measured.most_rows("one", torch.bfloat16, 2, F.linear) == 8


@pytest.mark.skipif(not FIRST, reason="there is no engine")
@pytest.mark.unpoisoned
def test_whatever_surrounds_the_first_call(folder):
    def other_device():
        return torch.device("meta")

    x, weight = torch.randn(2, 64).half(), torch.randn(9, 64).half()
    for surrounding in (other_device, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)):
        measured.most_rows.cache_clear()
        (folder / store.FILE).unlink(missing_ok=True)
        with torch.no_grad(), surrounding():
            y = projection(x.clone(), weight.clone())
        assert (y.device.type, y.dtype) == ("cpu", torch.float16)
        assert store.read()


@pytest.mark.skipif(not FIRST, reason="there is no engine")
@pytest.mark.unpoisoned
def test_what_is_measured_decides(monkeypatch):
    dtype = torch.bfloat16
    x, weight = torch.randn(40, 64).to(dtype), torch.randn(9, 64).to(dtype)
    timed(monkeypatch, 32)
    with torch.no_grad():
        found = moestro.explain(projection, x[:32], weight)
        assert found.chosen == f"cpu-{FIRST[0].name}"
        found = moestro.explain(projection, x[:33], weight)
    assert found.chosen == "torch"
    assert "beyond 32 rows (33 here), measured on this machine" in str(found)


@pytest.mark.skipif(not FIRST, reason="there is no engine")
@pytest.mark.unpoisoned
def test_a_real_measurement(folder):
    x, weight = torch.randn(2, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    state = torch.get_rng_state()
    with torch.no_grad():
        projection(x, weight)
    assert {n for numbers in store.read().values() for n in numbers} <= {0, *measured.STEPS, measured.ALL}
    assert store.read()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(not FIRST, reason="there is no engine")
@pytest.mark.unpoisoned
def test_ranks_of_a_job_do_not_measure(monkeypatch):
    tried = timed(monkeypatch, 256)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    isa = FIRST[0]
    most = tuning.TILED_ROWS if isa.has_tile_unit else tuning.DOTTED_ROWS
    assert tuning.slower(isa, most, torch.bfloat16, F.linear) is None
    assert "where nothing is measured" in tuning.slower(isa, most + 1, torch.bfloat16, F.linear)
    assert tried == []


@pytest.mark.skipif(not FIRST, reason="there is no engine")
@pytest.mark.unpoisoned
def test_a_call_from_before_the_job_is_not_that_of_a_rank(monkeypatch):
    timed(monkeypatch, 256)
    x, weight = torch.randn(200, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    ran = []
    with torch.no_grad(), observed(PROJECTION, lambda prepared, *_: ran.append(prepared.implementation)):
        projection(x, weight)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        projection(x, weight)
    assert ran == [f"cpu-{FIRST[0].name}", "torch"]
