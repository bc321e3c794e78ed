"""Two tiers with slots, in two memories of a CPU: what is computed with is what the files have, and one read is one."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter

import pytest
import torch

from memory.test_experts import (
    EXPERTS,
    LAYERS,
    NBYTES,
    NO_BIASES,
    TOP_K,
    LateReader,
    broken_off_in,
    content,
    planned,
    there,
)
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.memory import DeviceMemory, MemoryBudget, Visit, experts, residents, slots, tiers, turns, warm
from moestro.memory.prefetch import Gain
from moestro.memory.warm import tiers_of

FILES = {module.__file__ for module in (experts, residents, slots, tiers, turns, warm)}


@pytest.fixture(autouse=True)
def poisoned_slots(monkeypatch):
    monkeypatch.setattr(slots, "POISON", True)


class LateLink:
    """As a GPU may: what is copied is read and written at the last moment that is allowed."""

    def __init__(self):
        self.begun = self.used = self.settled = 0

    def follow(self):
        pass

    def copy(self, to, source):
        self.begun += 1
        return LateCopy(self, to, source)


class LateCopy:
    def __init__(self, link, to, source):
        self.link, self.to, self.source = link, to, source

    def run(self):
        if self.to is not None:
            for own, given in zip(self.to, self.source, strict=True):
                own.copy_(given)
            self.to = None

    def use(self):
        self.link.used += 1
        self.run()

    def settle(self):
        self.link.settled += 1
        self.run()


def made(reader, hot=4, host=5, on_miss="copy", late=False, policy="expected"):
    own = DeviceMemory(hot * NBYTES, on_miss, "cpu")
    memory = tiers_of(planned(), MemoryBudget(host * NBYTES, policy, device_memory=own), reader)
    for pool in (*memory.pools, *memory.below.memory.pools):
        pool.weights = lambda like: None
    if late:
        memory.below.link = LateLink()
    return memory


def compute(memory, index, counts, last=None):
    """A visit as a layer makes it: each expert once, in whatever tier, with what the files have; those tiers."""
    layer, visit = memory.layers[index], Visit(index, counts, last)
    waves, asked = layer.visit(visit, None)
    found, places = [], Counter()
    below = memory.computes_below and last is None
    for turn in layer.in_turn(visit, waves, NO_BIASES, asked, below):
        for expert, slot in zip(turn.wave.experts, turn.wave.slots, strict=True):
            assert there(turn.layer, slot) == content(index, expert), (index, expert)
            found.append(expert)
            places["device" if turn.layer is layer else "host"] += 1
    assert sorted(found) == sorted(counts)
    return places


def check(memory, reader):
    """No tier takes more than its part, none says that it has what it has not, no slot is read into twice at once."""
    host = memory.below.memory
    assert memory.residents.bytes_used <= memory.slot_bytes <= memory.nbytes == memory.budget.device_memory.nbytes
    assert host.residents.bytes_used <= host.slot_bytes <= host.nbytes == memory.budget.nbytes
    for tier in (memory, host):
        for layer in tier.layers:
            for expert, slot in tier.residents.resident(layer.index).items():
                if layer.pool.holds[slot] == (layer.index, expert):
                    layer.pool.use([slot])
                    assert there(layer, slot) == content(layer.index, expert)
    assert reader.wrong == []


@pytest.mark.parametrize("late", [False, True], ids=["copied at once", "copied late"])
@pytest.mark.parametrize(("hot", "host"), [(2, 2), (3, 9), (9, 3), (24, 24)])
def test_visits_of_two_tiers(hot, host, late):
    """Decoding and prompts at random, with reads that are late or fail: contents, counts and budgets."""
    reader, picks = LateReader(threads=3, fails=0.02, delays=0.02), random.Random(hot + host)
    memory, failed = made(reader, hot, host, late=late), 0
    for _ in range(1500):
        index, count = picks.randrange(LAYERS), picks.choice((1, TOP_K, TOP_K, EXPERTS))
        counts = {expert: picks.randrange(1, 9) for expert in picks.sample(range(EXPERTS), count)}
        last = tuple(picks.sample(sorted(counts), min(2, count))) if count > TOP_K else None
        try:
            compute(memory, index, counts, last)
        except InvalidInputError:
            failed += 1
    assert failed
    check(memory, reader)
    if late:
        link = memory.below.link
        assert 0 < link.used <= 2 * link.begun  # used here and by `check`
        assert host > 9 or link.settled > 0
    assert reader.close()


def test_what_is_in_host_memory_is_not_read_again():
    reader = LateReader()
    memory = made(reader, hot=2, host=24)
    rounds = 5
    for _ in range(rounds):
        for index in range(LAYERS):
            for expert in range(0, EXPERTS, 2):
                compute(memory, index, {expert: 1, expert + 1: 1})
    assert list(reader.submitted.values()) == [1] * LAYERS * EXPERTS
    device, host = memory.residents.total, memory.below.memory.residents.total
    assert (device.loads, host.loads) == (host.lookups, LAYERS * EXPERTS)
    assert host.hits == host.lookups - host.loads > 0
    told = memory.statistics()
    assert told["host"]["decode"]["hits"] == host.hits
    assert told["host"]["host"] is None
    assert reader.close()


def test_host_slots_turn_to_what_the_device_lacks():
    """An expert that stays on the device is not asked for below, and goes from there first."""
    reader = LateReader()
    memory = made(reader, hot=3, host=3)
    for turn in range(30):
        compute(memory, 0, {0: 1, 1 + turn % 3: 1})
    assert 0 in memory.residents.resident(0)
    assert 0 not in memory.below.memory.residents.resident(0)
    assert reader.close()


def test_a_wave_of_which_a_slot_still_has_its_expert():
    """An expert that was forgotten comes back to the slot that still has it, beside one that comes from the host."""
    reader = LateReader()
    memory = made(reader, hot=6, host=6, on_miss="compute")
    compute(memory, 0, {0: 1, 1: 1})
    memory.residents.forget(0, [1])
    assert compute(memory, 0, {1: 1, 2: 1}) == {"device": 1, "host": 1}
    assert reader.close()


def test_a_copy_that_nobody_waits_for_any_more_writes_to_no_slot():
    """One expert of a visit is copied late, another cannot be read: the slot of the first is given to others."""
    reader = LateReader()
    memory = made(reader, hot=3, host=6, late=True, policy="lru")
    for expert in range(5):
        compute(memory, 1, {expert: 1})
    reader.failing = {"expert 7 of layer 1"}
    with pytest.raises(InvalidInputError, match="expert 7"):
        compute(memory, 1, {7: 2, 0: 1})
    absent = [e for e in (1, 2, 3, 4) if memory.residents.slot_of(1, e) is None][:2]
    for other in range(EXPERTS):
        compute(memory, 1, dict.fromkeys(absent, 1))
        compute(memory, 0, {other: 1})  # takes the host's slots one after the other
    check(memory, reader)
    assert reader.close()


@pytest.mark.parametrize("late", [False, True])
def test_computed_where_they_are(late):
    """What the device lacks is computed below in decoding, and is there the next time; a prompt is computed above."""
    reader = LateReader()
    memory = made(reader, hot=6, host=6, on_miss="compute", late=late)
    assert compute(memory, 0, {0: 1, 1: 1}) == {"host": 2}
    assert compute(memory, 0, {0: 1, 1: 1}) == {"device": 2}
    assert compute(memory, 0, {1: 1, 2: 1}) == {"device": 1, "host": 1}
    assert compute(memory, 1, dict.fromkeys(range(EXPERTS), 3), last=(0,)) == {"device": EXPERTS}
    picks = random.Random(0)
    for _ in range(500):
        compute(memory, picks.randrange(LAYERS), dict.fromkeys(picks.sample(range(EXPERTS), TOP_K), 1))
    check(memory, reader)
    assert reader.close()


def test_auto_compares_and_chooses():
    reader = LateReader()
    memory = made(reader, hot=2, host=24, on_miss="auto")
    now = [0.0]
    for slow, wanted in (("device", True), ("host", False)):
        memory.on_miss = Gain(lambda: now[0])
        for step in range(64):
            for index in range(LAYERS):
                places = compute(memory, index, {step % EXPERTS: 1, (step + 3) % EXPERTS: 1})
                now[0] += 1e-3 + 1e-3 * places[slow]
        assert memory.computes_below is wanted, slow
        assert (memory.statistics()["on_miss"]["gain"] > 1) is wanted
    assert reader.close()


@pytest.mark.parametrize("on_miss", ["copy", "compute"])
@pytest.mark.parametrize("last", [None, (0,)], ids=["decode", "prompt"])
def test_a_visit_that_is_broken_off_anywhere(last, on_miss):
    """After Ctrl-C at any line of any tier, all that comes is computed with the right experts."""
    reader, at, goes_on = LateReader(delays=0.1), 1, True
    while goes_on:
        memory = made(reader, 5, 4, on_miss, late=True)
        compute(memory, 0, {0: 1, 1: 1, 2: 1})
        compute(memory, 1, {3: 1, 4: 1})
        counts = dict.fromkeys(range(1, 8 if last is not None else 5), 1) | {0: 1}
        goes_on = broken_off_in(FILES, at, lambda memory=memory, counts=counts: compute(memory, 0, counts, last))
        for index, picked in ((2, (0, 1)), (0, (1, 2, 7)), (1, range(EXPERTS)), (2, (3,)), (0, range(5))):
            compute(memory, index, dict.fromkeys(picked, 1))
        check(memory, reader)
        at += 3 if last is None else 9
    assert at > 50
    assert reader.close()


def test_the_least_of_each_tier_is_asked_for():
    reader = LateReader()
    for hot, host in ((1, 9), (9, 1)):
        with pytest.raises(InvalidInputError, match=f"{TOP_K * NBYTES:,} bytes"):
            made(reader, hot, host)
    assert reader.close()


def test_a_pool_of_a_device_has_no_more_slots_than_its_kernels_tell_apart(monkeypatch):
    """Layers that are alike share slots in groups; those of the host are not cut."""
    monkeypatch.setattr(warm, "MOST_EXPERTS", 2 * EXPERTS)
    for hot, pools in ((2 * EXPERTS, 1), (2 * EXPERTS + 1, 2), (LAYERS * EXPERTS, 2)):
        reader = LateReader()
        memory = made(reader, hot, host=5)
        assert [len(tier.pools) for tier in (memory, memory.below.memory)] == [pools, 1]
        assert max(pool.num_slots for pool in memory.pools) <= 2 * EXPERTS
        picks = random.Random(0)
        for _ in range(300):
            compute(memory, picks.randrange(LAYERS), dict.fromkeys(picks.sample(range(EXPERTS), TOP_K), 1))
        check(memory, reader)
        assert reader.close()


class Cuda:
    """In the place of what `CudaLink` asks of PyTorch: what is locked, and who waits for whom."""

    def __init__(self, monkeypatch, most=99):
        self.locked, self.waits, self.most = [], [], most
        self.now = Stream(self)
        for name, value in (
            ("Stream", lambda device: Stream(self)),
            ("cudart", lambda: self),
            ("current_stream", lambda device: self.now),
        ):
            monkeypatch.setattr(torch.cuda, name, value)

    def cudaHostRegister(self, address, nbytes, flags):
        if len(self.locked) == self.most:
            return 2
        self.locked.append(address)
        return 0

    def cudaHostUnregister(self, address):
        self.locked.remove(address)


class Stream:
    def __init__(self, cuda):
        self.cuda = cuda

    def wait_stream(self, other):
        self.cuda.waits.append((self, other))

    def synchronize(self):
        pass


def test_calls_on_several_streams_follow_one_another(monkeypatch):
    """A slot that a call on another stream fills or reads is not read or overwritten before."""
    cuda = Cuda(monkeypatch)
    link, (first, second) = tiers.CudaLink(torch.device("cpu"), []), (cuda.now, Stream(cuda))
    for stream in (first, first, second, second, first):
        cuda.now = stream
        link.follow()
    assert cuda.waits == [(second, first), (first, second)]


def test_memory_that_is_not_locked_is_given_back(monkeypatch):
    cuda, parts = Cuda(monkeypatch, most=2), [torch.zeros(8, dtype=torch.uint8) for _ in range(3)]
    launched = []
    monkeypatch.setattr(torch, "ones", lambda *_, **__: launched.append(len(cuda.locked)))
    with pytest.raises(InvalidInputError, match="8 bytes of host memory that could not be locked"):
        tiers.CudaLink(torch.device("cpu"), parts)
    assert cuda.locked == []
    assert launched == [0]
    link = tiers.CudaLink(torch.device("cpu"), parts[:2])
    assert len(cuda.locked) == 2
    del link
    assert cuda.locked == []


def test_a_link_that_could_not_begin_ends_without_a_word(monkeypatch):
    Cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: 1 // 0)
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    with pytest.raises(ZeroDivisionError):
        tiers.CudaLink(torch.device("cpu"), [])
    gc.collect()
    assert said == []


def test_devices_that_have_no_tier():
    reader = LateReader()
    budget = MemoryBudget(9 * NBYTES, device_memory=DeviceMemory(4 * NBYTES, device="meta"))
    with pytest.raises(UnsupportedError, match="an NVIDIA GPU"):
        tiers_of(planned(), budget, reader)
    assert reader.close()
