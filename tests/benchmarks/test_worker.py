"""A peer in a process of its own: what it computes, when it runs, and how it ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import worker_peer
from moestro.bench import Plan, Variant, make_layer, ours, run
from moestro.bench.layers import Layer, expected_output, inputs
from moestro.bench.peers.variant import Bind
from moestro.errors import UnsupportedError
from moestro.tolerances import disagreement
from peers import worker
from worker_peer import SECONDS, TOO_MANY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped as Linux does it")


def state(pid: int) -> str:
    """R, S, T (stopped), ... as the kernel says."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_it_computes_and_is_stopped_otherwise_until_it_ends(tiny) -> None:
    layer = make_layer(tiny("olmoe"), torch.bfloat16, 6)
    made = worker.Worker(worker_peer.right, layer)
    pid = made.process.pid
    for num_tokens in (1, 5):
        x, routings = inputs(layer, num_tokens, count=2)
        for routing in routings:
            call = worker._Run(made, x, routing)
            while state(pid) != "T":  # a stopped process stops when it is next scheduled
                os.sched_yield()
            assert disagreement(call(), expected_output(layer, x, routing), layer.dtype) is None
            assert SECONDS <= call.seconds() < 100 * SECONDS
    x, routings = inputs(layer, TOO_MANY, count=1)
    call = worker._Run(made, x, routings[0])
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="a process that ended"):
            call()
    del call, made
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_calls_warm_up_by_those_of_their_point(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "WAKE_SECONDS", 0.0)
    called: list[tuple[int, torch.Tensor]] = []

    def opens(layer: Layer) -> Bind:
        return lambda x, routing: lambda: called.append((len(x), routing.expert_ids))

    served = worker._Served()
    served.open(opens, torch.get_num_threads(), tiny("olmoe"), torch.float32, 6)
    layer = make_layer(tiny("olmoe"), torch.float32, 6)
    for num_tokens, first in ((1, 0), (4, 2)):
        x, routings = inputs(layer, num_tokens, count=3)
        given = [routings[0], routings[-1], *routings]
        found = [served.inputs(x, r.expert_ids, r.routing_weights) for r in given]
        assert found[:3] == [first, first + 1, first]
        assert len(set(found)) == len(routings)
        called.clear()
        served.seconds(found[0])
        assert {tokens for tokens, _ in called} == {num_tokens}
        assert [ids.equal(routings[0].expert_ids) for _, ids in called] == [False] * (len(called) - 1) + [True]


def test_in_a_run(tiny, known_roof) -> None:
    good = ours("auto")
    peers = tuple(
        Variant(name, good.refuses, partial(worker.prepare, getattr(worker_peer, name)), good.cost)
        for name in ("right", "failing")
    )
    report = run(Plan((tiny("olmoe"),), (2,), (torch.float32,), (good,), peers, seconds=1e-4))
    rows = {row.variant: row for row in report.rows}
    assert rows["right"].status == "ok"
    assert rows["right"].microseconds >= SECONDS * 1e6
    assert rows["failing"].status == "skipped"
    assert "RuntimeError: no kernels for olmoe with 1 threads" in rows["failing"].reason


def test_a_process_that_ended_before_it_read_a_request_is_closed() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.wait()
    assert process.stdin is not None
    process.stdin.write(b"a request")
    worker._kill(process)
    assert process.stdin.closed
