"""The native engine as a part of a process: its threads, the GIL, forks, wrong arguments, and where it is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import moestro
from moestro import Activation
from moestro.ops import dispatch, native
from moestro.ops.native import Isa
from tolerances import bit_equal

from . import problems
from .engines import RUNNING, every_isa, needs_engine, output, stored_weights

TESTS = Path(__file__).parents[1]


@needs_engine
def test_wrong_arguments_are_refused_and_never_followed():
    counts = {}
    for line in output(str(TESTS / "ops" / "fuzz_binding.py")).splitlines():
        count, _, name = line.strip().partition(" ")
        counts[name] = int(count)
    assert counts["computed"] >= 100
    assert counts["tables"] >= 100
    refusals = [name for name in counts if name.startswith(("ValueError", "TypeError"))]
    assert len(refusals) >= 20
    assert sum(counts[name] for name in refusals) >= 500


@needs_engine
@pytest.mark.skipif(sys.platform != "linux", reason="pages that may not be touched")
def test_not_a_byte_is_read_beyond_an_array():
    assert output(str(TESTS / "ops" / "guarded.py")) == "whole\n"


def call(isa: Isa, num_tokens: int = 60):
    sizes = problems.Sizes(num_tokens, 256, 384, 6, 2)
    torch.manual_seed(0)
    x, routing = torch.randn(num_tokens, 256), problems.routing(sizes, kind="full")
    weights = stored_weights("bfloat16", sizes, Activation())
    with moestro.use(implementation=f"cpu-{isa.name}"):
        assert moestro.explain(moestro.expert_mlp, x, routing, weights).chosen == f"cpu-{isa.name}"
    return lambda: moestro.expert_mlp(x, routing, weights)


@every_isa
def test_several_python_threads_at_once(isa):
    """Each with a team of its own, and different calls at that."""
    torch.set_num_threads(2)
    calls = [call(isa, n) for n in (1, 7, 60, 130)]
    wrong = []

    def repeat(i):
        torch.set_num_threads(2)
        with moestro.use(implementation=f"cpu-{isa.name}"):
            for _ in range(20):
                if not bit_equal(calls[i](), expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(len(calls))]
    with moestro.use(implementation=f"cpu-{isa.name}"):
        expected = [f() for f in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@needs_engine
def test_other_python_threads_go_on_meanwhile():
    """With switches forced never, another thread only gets on when the engine lets go of the interpreter."""
    compute, interval = call(RUNNING[0], 4000), sys.getswitchinterval()
    stop, steps, engine, seen = threading.Event(), [0], native.module, []

    def step():
        while not stop.is_set():
            steps[0] += 1
            time.sleep(0.0005)  # lets go itself

    class Watched:
        def __init__(self, prepared):
            self.prepared = prepared

        def __getattr__(self, name):
            return getattr(self.prepared, name)

        def run(self, *args):
            before = steps[0]
            self.prepared.run(*args)
            seen.append(steps[0] - before)

    class Engine:
        def __getattr__(self, name):
            return getattr(engine, name)

        def ExpertMlp(self, **args):
            return Watched(engine.ExpertMlp(**args))

    other = threading.Thread(target=step)
    try:
        native.module = Engine()
        dispatch._KEPT.clear()
        sys.setswitchinterval(1000.0)
        other.start()
        for _ in range(20):
            compute()
            if seen[-1]:
                break
    finally:
        native.module = engine
        dispatch._KEPT.clear()
        sys.setswitchinterval(interval)
        stop.set()
        other.join()
    assert seen[-1] > 0


COMMON = """
import os, sys, torch, moestro
from moestro import Activation
from ops import problems
from ops.engines import RUNNING, run, stored_weights
from tolerances import bit_equal

sizes = problems.Sizes(60, 256, 384, 6, 2)
torch.manual_seed(0)
x, routing = torch.randn(60, 256), problems.routing(sizes, kind="full")
weights = stored_weights("bfloat16", sizes, Activation())
call = lambda: run(RUNNING[0], x, routing, weights)
"""

THREADS = """
import time

def threads():
    # Those that a smaller team does not need end in their own time.
    seen = [0, 1]
    while len(set(seen[-4:])) > 1:
        time.sleep(0.05)
        seen.append(len(os.listdir("/proc/self/task")))
    return seen[-1]

call()
counts = [threads()]
for n in (1, 3, 5, 2):
    torch.set_num_threads(n)
    call()
    counts.append(threads())
torch.set_num_threads(5)
torch.randn(1 << 22).exp_()  # PyTorch's own work: no second team
counts.append(threads())
print(*(count - counts[0] for count in counts))
"""


@needs_engine
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_as_many_threads_as_pytorch_is_told_and_one_team():
    assert output("-c", COMMON + THREADS).split() in (["0", "0", "2", "4", "1", "4"], ["0", "0", "2", "4", "4", "4"])


FORK = """
import signal, warnings
warnings.simplefilter("ignore")
torch.set_num_threads(2)
expected = call()
ends = []
for generation in range(2):
    child = os.fork()
    if not child:
        signal.alarm(60)
        good = all(bit_equal(call(), expected) for _ in range(5))
        torch.set_num_threads(3)
        good = good and bit_equal(call(), expected)
        grandchild = os.fork()
        if not grandchild:
            os._exit(0 if bit_equal(call(), expected) else 1)
        good = good and os.waitpid(grandchild, 0)[1] == 0
        os._exit(0 if good else 1)
    ends.append(os.waitpid(child, 0)[1])
    ends.append(0 if bit_equal(call(), expected) else 1)
print(*ends)
"""


@needs_engine
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_children_of_a_fork_compute_too():
    assert output("-c", COMMON + FORK, timeout=200).split() == ["0"] * 4


MISSING = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "moestro._native":
            raise ImportError("blocked for a test")

sys.meta_path.insert(0, Blocked())
import torch, moestro
from moestro.errors import UnsupportedError

layer = moestro.FFN(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)
with torch.no_grad():
    assert layer(torch.randn(3, 16)).shape == (3, 16)
    explained = moestro.explain(layer, torch.randn(3, 16))
assert explained.chosen == "torch"
for name in ("cpu-native", "cpu-avx2"):
    try:
        with moestro.use(implementation=name):
            layer(torch.randn(3, 16))
    except UnsupportedError as error:
        print(error)
from moestro.cli import main
sys.argv = ["moestro", "info"]
main()
"""


def test_without_the_compiled_module():
    text = output("-c", MISSING)
    reason = "the native engine is not there (blocked for a test): install a C++17 compiler"
    first, second, info = text.split("\n", 2)
    assert reason in first
    assert "got implementation='cpu-avx2'" in second
    assert reason in " ".join(info.split())


def test_reasons(monkeypatch):
    assert native.reason(Isa("other", missing=("what nobody has",))) is not None
    if native.module is not None:
        assert native.reason(Isa("other", missing=("what nobody has",))) == "this processor lacks what nobody has"
        two = Isa("other", needs=("AVX2", "AMX-TILE", "AMX-BF16"), missing=("AMX-TILE", "AMX-BF16"))
        assert native.reason(two) == "this processor lacks AMX-TILE and AMX-BF16"
        assert all(set(isa.missing) <= set(isa.needs) for isa in native.ISAS)
        assert [native.reason(isa) for isa in RUNNING] == [None] * len(RUNNING)
        assert [isa.index for isa in native.ISAS] == list(range(len(native.ISAS)))
        assert native.ISAS[-1].name == "portable"
        assert native.ISAS[-1].runs_here
    monkeypatch.setattr(native, "module", None)
    monkeypatch.setattr(native, "problem", "No module named 'moestro._native'")
    assert native.reason(native.ABSENT) == (
        "the native engine is not there (No module named 'moestro._native'): "
        "install a C++17 compiler and then moestro again"
    )


BEST = "from moestro.ops import native; print(*(isa.name for isa in native.ISAS if isa.runs_here))"


@needs_engine
@pytest.mark.skipif("avx2" not in {isa.name for isa in RUNNING}, reason="what is masked has to be there")
def test_masked_features_are_lacking(monkeypatch):
    monkeypatch.setenv("MOESTRO_WITHOUT_FEATURES", "avx512f,avx2")
    assert output("-c", BEST).split() == ["portable"]
    monkeypatch.setenv("MOESTRO_WITHOUT_FEATURES", "avx2 avx512f")
    text = " ".join(output("-m", "moestro", "info").split())
    assert "masked features avx2, avx512f" in text
    assert "cpu-avx2 this processor lacks AVX2 (masked)" in text


@needs_engine
def test_a_feature_that_nobody_has_is_refused(monkeypatch):
    monkeypatch.setenv("MOESTRO_WITHOUT_FEATURES", "avx2 avx1024")
    command = [sys.executable, "-c", "from moestro_command import main; main()", "info"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("[MOESTRO_WITHOUT_FEATURES] got avx2 avx1024; needs features out of avx2, fma")


STARVED = """
import os, resource, threading, time, torch
from moestro import ExpertWeights, Routing
from moestro.ops.expert_mlp import expert_mlp

torch.set_num_threads({threads})
weights = ExpertWeights.from_dense(torch.randn(4, 64, 64), torch.randn(4, 64, 32))
x = torch.randn(60000, 64)
routing = Routing(torch.arange(60000)[:, None].expand(-1, 2).remainder(4).contiguous(), torch.ones(60000, 2))
few = Routing(routing.expert_ids[:4], routing.routing_weights[:4])
first = expert_mlp(x[:4], few, weights)
made = []
other = threading.Thread(target=lambda: made.append(expert_mlp(x, routing, weights)))  # its workspace goes with it
other.start(), other.join()
while os.path.exists(f"/proc/self/task/{{other.native_id}}"):
    time.sleep(0.01)
(expected,) = made
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (30 << 20), -1))
for _ in range(2):
    try:
        expert_mlp(x, routing, weights)
        print("enough")
    except (MemoryError, RuntimeError):
        print("too little")
assert torch.equal(expert_mlp(x[:4], few, weights), first)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert torch.equal(expert_mlp(x, routing, weights), expected)
print("well")
"""


@needs_engine
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are Linux's")
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_that_is_not_there_is_an_error_and_no_more(threads):
    said = output("-c", STARVED.format(threads=threads)).split("\n")
    assert said[:3] == ["too little", "too little", "well"]


LENT = """
import resource, torch
from moestro import ExpertWeights, Routing
from moestro.ops.expert_mlp import expert_mlp

def pages():
    return int(open("/proc/self/statm").read().split()[0])

def lent():
    lines = open("/proc/self/smaps").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("LazyFree:")) << 10

weights = ExpertWeights.from_dense(torch.randn(4, 64, 64), torch.randn(4, 64, 32))
x = torch.randn(60000, 64)
routing = Routing(torch.arange(60000)[:, None].expand(-1, 2).remainder(4).contiguous(), torch.ones(60000, 2))
expert_mlp(x[:4], Routing(routing.expert_ids[:4], routing.routing_weights[:4]), weights)
before, first = pages(), expert_mlp(x, routing, weights)
print((pages() - before) * resource.getpagesize() - first.nbytes, lent())
assert torch.equal(expert_mlp(x, routing, weights), first)
"""


@needs_engine
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="such memory is Linux's")
def test_memory_of_many_tokens_is_kept_until_the_system_wants_it():
    kept, lent = map(int, output("-c", LENT).split())
    assert min(kept, lent) > 32 << 20
