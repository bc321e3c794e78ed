"""`moestro.use`: what it forces, where, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
import torch

import moestro
from moestro.settings import Settings, current


def in_a_thread(call: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=120)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


@pytest.fixture(autouse=True)
def nothing_stays():
    before = current()
    yield
    assert current() == before


def test_blocks_nest() -> None:
    before = current()
    with moestro.use(implementation="torch"):
        with moestro.use(strategy="grouped"):
            assert current() == Settings("torch", "grouped")
            with moestro.use(implementation="reference"):
                assert current() == Settings("reference", "grouped")
            assert current() == Settings("torch", "grouped")
        assert current().implementation == "torch"
    assert current() == before


def test_blocks_overlap() -> None:
    first, second = moestro.use(implementation="torch"), moestro.use(implementation="reference")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert current().implementation == "reference"
    second.__exit__(None, None, None)


def test_overlapping_threads_leave_nothing_behind() -> None:
    before, entered, left = current(), threading.Event(), threading.Event()

    def other() -> None:
        assert current() == before  # not that of the thread that started this one
        with moestro.use(implementation="reference"):
            entered.set()
            assert left.wait(60)
            assert current().implementation == "reference"
        assert current() == before

    thread = threading.Thread(target=other)
    with moestro.use(implementation="torch"):
        thread.start()
        assert entered.wait(60)
        assert current().implementation == "torch"
    left.set()
    thread.join(60)
    assert current() == before
    in_a_thread(lambda: current() == before or pytest.fail("a block stayed open"))


def test_tasks_have_their_own() -> None:
    async def task(name: str, mine: asyncio.Event, others: asyncio.Event) -> None:
        with moestro.use(implementation=name):
            mine.set()
            await others.wait()
            assert current().implementation == name

    async def both() -> None:
        one, two = asyncio.Event(), asyncio.Event()
        await asyncio.gather(task("torch", one, two), task("reference", two, one))

    asyncio.run(both())


def seen(x: torch.Tensor) -> torch.Tensor:
    return x + (1 if current().implementation == "reference" else 2)


def test_compiled_code_reads_and_guards_it() -> None:
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled, x = torch.compile(seen, fullgraph=True, backend=backend), torch.zeros(1)
    assert compiled(x).item() == 2
    for _ in range(2):
        with moestro.use(implementation="reference"):
            assert compiled(x).item() == 1
        assert compiled(x).item() == 2

    def other() -> None:
        assert compiled(x).item() == 2
        with moestro.use(implementation="reference"):
            assert compiled(x).item() == 1

    with moestro.use(implementation="reference"):
        in_a_thread(other)
        assert compiled(x).item() == 1
    # One for each setting; PyTorch guards its number of threads too, which a thread of its own may have otherwise.
    assert len(graphs) in (2, 4)


def test_a_block_inside_compiled_code() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def inside(x: torch.Tensor) -> torch.Tensor:
        with moestro.use(implementation="reference"):
            x = seen(x)
        return seen(x)

    assert inside(torch.zeros(1)).item() == 3


def test_a_compiled_layer_runs_what_is_forced() -> None:
    layer = moestro.FFN(hidden_size=32, intermediate_size=16, num_experts=4, top_k=2).requires_grad_(False)
    x = torch.randn(3, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    compiled(x)
    with moestro.use(implementation="no-such-thing"), pytest.raises(Exception, match="no-such-thing"):
        compiled(x)
    compiled(x)
