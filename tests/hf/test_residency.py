"""Mapped experts give their pages back beyond a share of the machine's memory, and nothing else changes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import moestro
from hf.checkpoints import logits
from moestro.checkpoint import Checkpoint
from moestro.hf import residency
from moestro.hf.store import ExpertStore


@pytest.fixture
def released(monkeypatch):
    """The tensors that were given back, in order."""
    names = []
    release = Checkpoint.release
    monkeypatch.setattr(Checkpoint, "release", lambda self, name: names.append(name) or release(self, name))
    return names


def stores(model):
    return [module for module in model.modules() if isinstance(module, ExpertStore)]


@pytest.fixture
def model(made, monkeypatch):
    monkeypatch.setattr(residency, "LOOK_SECONDS", 0.0)
    return moestro.load(made.folder("gpt-oss-20b"))


def test_below_the_limit_everything_stays(model, released):
    logits(model)
    assert released == []


def test_the_layer_that_ran_gives_back_before_the_next(model, released, monkeypatch):
    wanted = logits(model)
    monkeypatch.setattr(residency, "_resident_pages", lambda: 1 << 60)
    first, second = (list(store.tensors) for store in stores(model)[:2])
    assert torch.equal(logits(model), wanted)
    assert released[-len(first) :] == first
    assert torch.equal(logits(model), wanted)
    assert set(second) <= set(released)


@pytest.mark.skipif(not residency._is_measurable(), reason="the system does not say what a process takes up")
def test_what_fits_is_fetched_when_it_is_loaded(made, monkeypatch):
    fetched, threads = [], []
    fetch, start = Checkpoint.fetch, residency.Residency.fetch
    monkeypatch.setattr(Checkpoint, "fetch", lambda self, name: fetched.append(name) or fetch(self, name))
    monkeypatch.setattr(residency.Residency, "fetch", lambda *a: threads.append(start(*a)) or threads[-1])
    moestro.load(made.folder("gpt-oss-20b"))
    assert threads.pop() is None
    monkeypatch.setattr(residency, "LEAST_FETCHED", 1)
    model = moestro.load(made.folder("gpt-oss-20b"))
    threads.pop().join()
    assert fetched == [name for store in stores(model) for name in store.tensors]
    monkeypatch.setattr(residency, "_resident_pages", lambda: 1 << 60)
    moestro.load(made.folder("gpt-oss-20b"))
    assert threads == [None]


def test_what_is_quantised_while_it_is_read_is_not_fetched(made, monkeypatch):
    monkeypatch.setattr(residency.Residency, "fetch", lambda self, names: wanted.extend(names))
    wanted = []
    moestro.load(made.folder("gpt-oss-20b"), format="int8")
    assert wanted == []


def test_a_model_that_has_gone_is_not_fetched():
    class Gone:
        pass

    residency._fetch(residency.weakref.ref(Gone()), ["x"])


@pytest.mark.skipif(not residency._is_measurable(), reason="the system does not say what a process takes up")
def test_pages_are_given_back(model, monkeypatch):
    logits(model)
    before = residency._resident_pages()
    assert 0 < before < 1 << 40
    calls = []
    monkeypatch.setattr(residency, "_resident_pages", lambda: calls.append(1) or 1 << 60)
    logits(model)
    assert len(calls) == len(stores(model))


def test_below_the_limit_it_is_looked_at_now_and_then(model, monkeypatch):
    calls, pages = [], [0]
    monkeypatch.setattr(residency, "_resident_pages", lambda: calls.append(1) or pages[0])
    monkeypatch.setattr(residency, "LOOK_SECONDS", 1e9)
    for _ in range(3):
        logits(model)
    assert len(calls) == 1
    stores(model)[0].residency._next_look = 0.0
    pages[0] = 1 << 60
    logits(model)
    assert len(calls) == 1 + len(stores(model))


def test_what_was_written_is_kept(model, released, monkeypatch):
    name, tensor = next(iter(stores(model)[0].tensors.items()))
    tensor.zero_()
    monkeypatch.setattr(residency, "_resident_pages", lambda: 1 << 60)
    logits(model)
    logits(model)
    assert released
    assert name not in released
    assert not tensor.any()


def test_a_loaded_state_is_kept(model, released, monkeypatch):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    store = stores(model)[0]
    key = next(iter(store.tensors))
    state[key] = torch.zeros_like(state[key])
    model.load_state_dict(state)
    monkeypatch.setattr(residency, "_resident_pages", lambda: 1 << 60)
    logits(model)
    assert released == []
    assert not store.tensors[key].any()
    assert not model.state_dict()[key].any()


def test_copies_and_pickles_have_none(model):
    assert stores(model)[0].residency is not None
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert stores(copied)[0].residency is None
        assert torch.equal(logits(copied), logits(model))
