"""Experts behind slots while reads are late, fail and are broken off: what is computed with is what the files have.

`Residents` is not safe for threads and need not be: `ExpertMemory.lock` is held for a whole visit. So threads are
tested here, where they meet: visits of several threads, and the threads that read for them.
"""

from __future__ import annotations

import ctypes
import gc
import queue
import random
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from moestro.errors import InvalidInputError
from moestro.memory import LayerSize, MemoryBudget, Visit, Wave, experts, residents, slots, turns
from moestro.memory.prefetch import Prefetcher
from moestro.memory.tiers import LayerPlan, SlotTensor, Source
from moestro.memory.warm import tiers_of

NBYTES, LAYERS, EXPERTS, TOP_K = 32, 3, 8, 2
NO_BIASES = SimpleNamespace(gate_up_bias=None, down_bias=None)


@pytest.fixture(autouse=True)
def poisoned_slots(monkeypatch):
    monkeypatch.setattr(slots, "POISON", True)


def nothing():
    pass


def content(layer, expert):
    return bytes([layer * EXPERTS + expert + 1]) * NBYTES


class LateReader:
    """In the place of `Reader`: threads that write to slots late, and say of some reads that they failed.

    Attributes:
        failing: names of what cannot be read.
        wrong: two reads into one slot at once.
        submitted: how often each expert was asked for.
    """

    direct = False

    def __init__(self, threads=2, fails=0.0, delays=0.0):
        self.file = b"".join(content(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS))
        self.fails, self.delays, self.random = fails, delays, random.Random(0)
        self.wrong, self.submitted, self.writing, self.failing = [], Counter(), {}, set()
        self.lock, self.queue = threading.Lock(), queue.SimpleQueue()
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    @property
    def counts(self):
        return {"bytes_from_files": sum(self.submitted.values()) * NBYTES}

    def keep(self, memory):
        self.kept = memory

    def submit(self, runs, name, urgent=True):
        (run,) = runs
        before = self.writing.get(run.address)
        if before is not None:
            before.settle()  # as `Reader` does of what was broken off
        ticket = LateTicket(self, run, name)
        with self.lock:
            if run.address in self.writing:
                self.wrong.append(name)
            self.writing[run.address] = ticket
            self.submitted[name] += 1
        self.queue.put(ticket)
        return ticket

    def work(self):
        while (ticket := self.queue.get()) is not None:
            if self.random.random() < self.delays:
                time.sleep(0.0005)
            ticket.failed = ticket.name in self.failing or self.random.random() < self.fails
            data = self.file[ticket.run.offset : ticket.run.offset + NBYTES]
            ctypes.memmove(ticket.run.address, data[: NBYTES // 2] if ticket.failed else data, len(data) // 2)
            if not ticket.failed:
                ctypes.memmove(ticket.run.address, data, NBYTES)
            with self.lock:
                del self.writing[ticket.run.address]
            ticket.ended.set()

    def close(self):
        for _ in self.threads:
            self.queue.put(None)
        for thread in self.threads:
            thread.join(10)
        return not any(thread.is_alive() for thread in self.threads)


class LateTicket:
    def __init__(self, reader, run, name):
        self.reader, self.run, self.name = reader, run, name
        self.ended, self.failed = threading.Event(), False

    def wait(self):
        assert self.ended.wait(20)
        if self.failed:
            raise InvalidInputError(f"no {self.name}")

    def settle(self):
        assert self.ended.wait(20)


def planned():
    """The layers of the file that readers here have."""
    return [
        LayerPlan(
            f"layer {layer}",
            LayerSize(EXPERTS, TOP_K, NBYTES),
            (SlotTensor(torch.uint8, (NBYTES,)),),
            (Source(((0, layer * EXPERTS * NBYTES),), NBYTES),),
            lambda stacks: tuple(stacks),
        )
        for layer in range(LAYERS)
    ]


def made(reader, num_slots=5, policy="expected"):
    memory = tiers_of(planned(), MemoryBudget(num_slots * NBYTES, policy), reader)
    for pool in memory.pools:
        pool.weights = lambda like: None
    return memory


def there(layer, slot):
    return ctypes.string_at(layer.pool.rooms(slot)[0].data_ptr(), NBYTES)


def compute(memory, index, counts, last=None):
    """A visit as a layer makes it; raises what reads raise, and AssertionError where a slot has another expert."""
    layer = memory.layers[index]
    found = []
    waves = memory.residents.visit(index, counts, last)
    for turn in layer.in_turn(Visit(index, counts, last), waves, NO_BIASES, nothing):
        for expert, slot in zip(turn.wave.experts, turn.wave.slots, strict=True):
            assert there(layer, slot) == content(index, expert), (index, expert)
            found.append(expert)
    assert sorted(found) == sorted(counts)


def prefetch(memory, index, predicted):
    """Experts that are read before a layer asks for them."""
    for expert, slot in memory.residents.prefetch(index, predicted):
        wave = Wave((expert,), (slot,), ((expert, slot),))
        list(memory.layers[index].in_turn(Visit(index, {expert: 1}), [wave], NO_BIASES, nothing))


def check(memory, reader):
    """No slot is taken twice or lost, and none says that it has what it has not."""
    used = sum(len(memory.residents.resident(layer.index)) for layer in memory.layers)
    assert memory.residents.bytes_used == used * NBYTES <= memory.budget.nbytes
    assert memory.slot_bytes <= memory.budget.nbytes
    for layer in memory.layers:
        for expert, slot in memory.residents.resident(layer.index).items():
            if layer.pool.holds[slot] == (layer.index, expert):
                assert there(layer, slot) == content(layer.index, expert)
    assert reader.wrong == []


def test_threads_of_demand_prefetch_and_eviction():
    """Eight threads and 40,000 operations (experts asked for, read early, evicted), with delays and failures."""
    reader = LateReader(threads=4, fails=0.01, delays=0.01)
    memory, wrong, failures = made(reader, num_slots=9), [], Counter()
    operations, enough = Counter(), 40_000

    def work(number):
        picks = random.Random(number)
        try:
            while sum(operations.values()) < enough:
                index, wide = picks.randrange(LAYERS), picks.random() < 0.3
                picked = picks.sample(range(EXPERTS), picks.randint(1, EXPERTS if wide else 3))
                last = picked[:TOP_K] if wide else None
                with memory.lock:
                    before = memory.residents.total
                    try:
                        compute(memory, index, dict.fromkeys(picked, 1), last)
                        if picks.random() < 0.1:
                            prefetch(memory, (index + 1) % LAYERS, picks.sample(range(EXPERTS), 2))
                    except InvalidInputError:
                        failures[number] += 1
                    after = memory.residents.total
                    operations[number] += after.lookups - before.lookups + after.early - before.early
                    operations[number] += after.loads - before.loads  # each evicts, but for the first few
                    assert memory.residents.bytes_used <= memory.budget.nbytes
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"
    assert wrong == []
    assert min(failures.values()) > 0
    assert len(failures) == 8
    with memory.lock:
        check(memory, reader)
    total = memory.residents.total
    assert total.hits + total.loads == total.lookups
    assert reader.close()


def test_one_read_a_miss():
    reader = LateReader()
    memory, picks = made(reader, num_slots=9), random.Random(0)
    for _ in range(300):
        index, wide = picks.randrange(LAYERS), picks.random() < 0.3
        picked = picks.sample(range(EXPERTS), picks.randint(1, EXPERTS if wide else 3))
        compute(memory, index, dict.fromkeys(picked, 1), picked[:1] if wide else None)
        prefetch(memory, (index + 1) % LAYERS, picks.sample(range(EXPERTS), 2))
    total = memory.residents.total
    assert sum(reader.submitted.values()) == total.loads + total.early
    assert total.read_bytes == (total.loads + total.early) * NBYTES
    check(memory, reader)
    assert reader.close()


def test_what_was_to_be_read_early_and_never_was_may_go():
    """After Ctrl-C between the choice of experts and their reads."""
    reader = LateReader()
    memory = made(reader, 5, "lru")
    memory.prefetcher = Prefetcher([None] * LAYERS, [TOP_K] * LAYERS)
    memory.residents.prefetch(1, [5, 6])
    for picked in ((0, 1), (2, 3), (4, 5), (6, 7)):
        visit = Visit(0, dict.fromkeys(picked, 1))
        waves, asked = memory.layers[0].visit(visit, None)
        for turn in memory.layers[0].in_turn(visit, waves, NO_BIASES, asked):
            assert [there(turn.layer, slot) for slot in turn.wave.slots] == [content(0, e) for e in turn.wave.experts]
    assert memory.residents.resident(1) == {}
    check(memory, reader)
    assert reader.close()


def broken_off(memory, index, counts, last, at):
    """A visit that Ctrl-C ends at the n-th line of the bookkeeping; whether it came so far."""
    files = {module.__file__ for module in (experts, residents, slots, turns)}
    return broken_off_in(files, at, lambda: compute(memory, index, counts, last))


def broken_off_in(files, at, visit):
    """Call what Ctrl-C ends at the n-th line of these files; whether it came so far."""
    line = 0

    def trace(frame, event, argument):
        nonlocal line
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            line += 1
            if line == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    gc.disable()  # or Ctrl-C comes to what an earlier visit left
    sys.settrace(trace)
    try:
        visit()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False


@pytest.mark.parametrize("last", [None, (0,)], ids=["decode", "prompt"])
def test_a_visit_that_is_broken_off_anywhere(last):
    """After Ctrl-C at any line, once or twice in a row, all that comes is computed with the right experts."""
    reader = LateReader(delays=0.1)
    at, step = 1, 3 if last is None else 7
    goes_on = True
    while goes_on:
        memory = made(reader, num_slots=5)
        compute(memory, 0, {0: 1, 1: 1, 2: 1})
        compute(memory, 1, {3: 1, 4: 1})
        goes_on = broken_off(memory, 0, dict.fromkeys(range(1, 8 if last is not None else 5), 1) | {0: 1}, last, at)
        if at % 2:
            broken_off(memory, 1, {5: 1, 6: 1, 7: 1}, None, at // 2)
        for index, picked in ((2, (0, 1)), (0, (1, 2, 7)), (1, range(EXPERTS)), (2, (3,)), (0, range(5))):
            compute(memory, index, dict.fromkeys(picked, 1))
            check(memory, reader)
        at += step
    assert at > 50
    assert reader.close()
