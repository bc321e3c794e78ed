"""Models whose next layer's experts are read early: the same bits, whatever is predicted and whenever reads end."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import moestro
from hf.checkpoints import logits
from hf.test_memory import PROMPT, budgets, steps
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.hf import routers
from moestro.hf.memory import expert_memory, hits_line, memory_line
from moestro.memory import MemoryBudget, slots
from moestro.memory.reader import Reader, Ticket
from reading_ahead import Always

LIKE = ["gpt-oss-20b", "deepseek-v3", "qwen3-30b-a3b-fp8", "olmoe", "dbrx", "llama4-scout"]


@pytest.fixture(autouse=True)
def poisoned_slots(monkeypatch):
    monkeypatch.setattr(slots, "POISON", True)


def prefetching(folder, size, policy="expected"):
    model = moestro.load(folder, memory=MemoryBudget(size, policy, prefetch=True))
    memory = expert_memory(model)
    memory.prefetcher.gain = Always()
    return model, memory


def generated(model):
    with torch.no_grad():
        found = model.generate(PROMPT[:, :30], max_new_tokens=12, do_sample=False)
        return [found, *steps(model), model.generate(PROMPT[:, :40].view(4, 10), max_new_tokens=8, do_sample=False)]


def assert_same(found, wanted, about):
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), (about, number)


@pytest.mark.parametrize("ended", ["in time", "late"])
@pytest.mark.parametrize("like", LIKE)
def test_bits_are_those_of_the_whole_model(made, monkeypatch, like, ended):
    folder = made.folder(like)
    wanted = generated(moestro.load(folder))
    if ended == "late":  # as far as anybody sees before the layer waits for it
        monkeypatch.setattr(Ticket, "has_ended", property(lambda ticket: False))
    early = used = 0
    for size in budgets(folder)[1 if ended == "late" else 2 : -1 : 2]:
        model, memory = prefetching(folder, size)
        assert_same(generated(model), wanted, size)
        assert memory.slot_bytes <= size
        total = memory.residents.total
        early, used = early + total.early, used + total.useful
        told, counts = memory.statistics(), memory.reader.counts
        asked = sum(told[part]["read_bytes"] for part in ("prompt", "decode"))
        dropped = counts["dropped"] * max(layer.plan.size.expert_bytes for layer in memory.layers)
        assert asked - dropped <= counts["bytes"] <= asked
    assert early > 0
    assert used > 0


def test_a_read_that_fails_early_is_an_error_once_it_is_needed(made, monkeypatch):
    folder = made.folder("olmoe")
    wanted = generated(moestro.load(folder))
    model, _ = prefetching(folder, budgets(folder)[-2])
    submit, failing = Reader.submit, []

    def submit_and_fail(self, runs, name, urgent=True):
        ticket = submit(self, runs, name, urgent)
        if not urgent:
            failing.append(ticket)
            ticket._reader.engine.wait(ticket._number)  # its outcome is gone: what waits for it now finds it dropped
        return ticket

    monkeypatch.setattr(Reader, "submit", submit_and_fail)
    said = []
    for _ in range(30):
        try:
            generated(model)
        except InvalidInputError as error:
            said.append(str(error))
    assert said
    assert all("expert " in text for text in said)
    monkeypatch.setattr(Reader, "submit", submit)
    assert_same(generated(model), wanted, "after failures")
    assert failing


def test_a_reader_ends_its_threads_before_the_slots_go(made, monkeypatch):
    folder, order, end = made.folder("qwen3-30b-a3b"), [], Reader.__del__
    model, memory = prefetching(folder, budgets(folder)[-2])
    reader, rooms = memory.reader, {id(room) for pool in memory.pools for room in pool.memory}
    assert {id(room) for kept in reader._kept for room in kept} == rooms
    with torch.no_grad():
        model(torch.tensor([[1]]))
    del model, memory
    gc.collect()

    def end_and_tell(reader):
        end(reader)
        order.append("threads")

    monkeypatch.setattr(Reader, "__del__", end_and_tell)
    for kept in reader._kept:
        for room in kept:
            weakref.finalize(room, order.append, "slots")
    del kept, room, reader
    assert order == ["threads"] + ["slots"] * len(rooms)


def test_what_is_said(made):
    model, memory = prefetching(made.folder("olmoe"), budgets(made.folder("olmoe"))[-2])
    generated(model)
    told = memory.statistics()["prefetch"]
    assert told["layers"] == 1
    assert 0 < told["recall"] <= 1
    assert told["read"] >= told["used"] > 0
    assert "prefetch not yet compared" in memory_line(model)
    memory.prefetcher.gain.gain = 1.5
    assert "prefetch is compared anew, a step was 1.50x as fast with it, recall " in memory_line(model)
    assert "lookups hit" in hits_line(model)
    assert expert_memory(moestro.load(made.folder("olmoe"), memory="1GB")).statistics()["prefetch"] is None


def test_recall_of_the_rows_themselves(made):
    """A layer's own router on its own rows says what the model picks: the guess is only in whose rows they are."""
    from moestro.hf import served
    from moestro.ops.dispatch import observed
    from moestro.ops.expert_mlp import EXPERT_MLP

    for like in ("gpt-oss-20b", "deepseek-v3", "olmoe", "mixtral-8x7b", "glm4-moe", "dbrx"):
        model = moestro.load(made.folder(like))
        paths = iter([layer.path for layer in served(model)])
        right = asked = 0

        def tell(prepared, arguments, result, model=model, paths=paths):
            nonlocal right, asked
            rows, routing, weights = arguments[:3]
            router = routers.router_of(model, next(paths), weights.num_experts, weights.gate_up.shape[2])
            picked = router(rows).topk(routing.top_k).indices
            right += (picked[:, :, None] == routing.expert_ids[:, None, :]).any(-1).sum().item()
            asked += picked.numel()

        with observed(EXPERT_MLP, tell):
            logits(model, PROMPT[:, :20])
        groups = like == "deepseek-v3"  # it picks groups of experts first, which a guess leaves out
        assert right >= (0.75 if groups else 0.95) * asked, like


def test_where_there_is_no_router(made, monkeypatch):
    monkeypatch.setattr("moestro.hf.memory.router_of", lambda *_: None)
    with pytest.raises(UnsupportedError, match="prefetch"):
        moestro.load(made.folder("olmoe"), memory=MemoryBudget(10**9, prefetch=True))
    with pytest.raises(InvalidInputError, match="prefetch='yes'"):
        MemoryBudget(10**9, prefetch="yes")


def test_routers_that_could_be_two():
    block = nn.Module()
    block.experts = nn.Module()
    block.one, block.two = nn.Linear(8, 4), nn.Linear(8, 3)
    assert routers.router_of(block, "experts", 4, 8)(torch.ones(2, 8)).shape == (2, 4)
    block.two = nn.Linear(8, 4)
    assert routers.router_of(block, "experts", 4, 8) is None
    assert routers.router_of(block, "experts", 5, 8) is None
