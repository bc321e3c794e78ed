"""Runs of files arrive byte for byte, and a file that is not what it was is an error that names it."""

from __future__ import annotations

import importlib.util
import os
import resource
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import InvalidInputError, UnsupportedError
from moestro.memory.reader import Reader, Run
from source import ROOT

SIZE = 5_000_003
BLOCK = 4096


def identity(path):
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reads") / "file"
    generator = torch.Generator().manual_seed(0)
    path.write_bytes(bytes(torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator).numpy()))
    return path


@pytest.fixture(scope="module", params=[(1, True), (4, True), (8, False)], ids=["one", "four", "cached"])
def reader(request, file):
    threads, direct = request.param
    made = Reader(threads, direct)
    assert made.add(file, identity(file)) == 0
    assert direct or not made.direct
    return made


def room(nbytes, step=0):
    """Memory whose address is `step` past a block, with as many bytes behind it that are to stay as they are."""
    whole = torch.full((nbytes + 3 * BLOCK,), 0xAB, dtype=torch.uint8)
    start = -whole.data_ptr() % BLOCK + step
    return whole[start : start + nbytes + BLOCK]


spans = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, BLOCK - 1), st.booleans())


@given(spans=st.lists(spans, min_size=1, max_size=4))
def test_runs_arrive_and_nothing_else_changes(reader, file, spans):
    wanted, runs, memory = file.read_bytes(), [], []
    for first, second, step, in_step in spans:
        start, stop = sorted((first, second))
        memory.append((start, stop, room(stop - start, start % BLOCK if in_step else step)))
        runs.append(Run(0, start, stop - start, memory[-1][2].data_ptr()))
    before = reader.counts
    reader.submit(runs, "some runs").wait()
    for start, stop, got in memory:
        assert bytes(got[: stop - start].numpy()) == wanted[start:stop]
        assert bool((got[stop - start :] == 0xAB).all())
    after = reader.counts
    assert after["requests"] == before["requests"] + 1
    assert after["bytes"] - before["bytes"] == sum(run.length for run in runs)


def test_nothing_is_read_and_is_there_at_once(reader):
    reader.submit([], "nothing").wait()


def test_threads_that_ask_at_once(file):
    wanted, reader, wrong = file.read_bytes(), Reader(4), []
    reader.add(file, identity(file))

    def ask(number):
        generator = torch.Generator().manual_seed(number)
        for _ in range(100):
            start, length = (int(v) for v in torch.randint(0, SIZE // 2, (2,), generator=generator))
            got = room(length)
            ticket = reader.submit([Run(0, start, length, got.data_ptr())], "a run", urgent=bool(start % 2))
            if start % 3 == 0:
                ticket.hurry()
            if start % 5 == 0 and ticket.drop():
                continue
            ticket.wait()
            if bytes(got[:length].numpy()) != wanted[start : start + length]:
                wrong.append((number, start, length))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert reader.counts["requests"] == 800


def test_a_file_on_a_disk_is_read_past_the_cache(file, reader):
    """Where this machine's temporary files lie on such a filesystem."""
    if not hasattr(os, "O_DIRECT") or reader.threads == 8:
        pytest.skip("this reader is to use the cache")
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        assert not reader.direct
    else:
        assert reader.direct


def ask_for_all(reader, path):
    got = room(SIZE)
    reader.submit([Run(0, 0, SIZE, got.data_ptr())], "expert 3 of model.layers.1").wait()


def damage(path, how):
    if how == "cut":
        os.truncate(path, SIZE // 2)
    elif how == "written":
        with open(path, "r+b") as file:
            file.write(b"other")
        os.utime(path, ns=(0, 0))
    elif how == "replaced":
        other = path.with_suffix(".new")
        other.write_bytes(path.read_bytes())
        os.replace(other, path)
    else:
        os.remove(path)


@pytest.mark.parametrize("how", ["cut", "written", "replaced", "removed"])
def test_a_file_that_is_not_what_it_was(file, tmp_path, how):
    path = tmp_path / "weights"
    path.write_bytes(file.read_bytes())
    reader = Reader(2)
    reader.add(path, identity(path))
    ask_for_all(reader, path)
    damage(path, how)
    with pytest.raises(InvalidInputError) as caught:
        ask_for_all(reader, path)
    assert str(path) in str(caught.value)
    assert "expert 3 of model.layers.1" in str(caught.value)


def test_a_run_past_the_end(file):
    reader = Reader(2)
    reader.add(file, identity(file))
    got = room(20)
    with pytest.raises(InvalidInputError, match="its end at byte"):
        reader.submit([Run(0, SIZE - 10, 20, got.data_ptr())], "an expert").wait()


def test_what_the_system_will_not_read():
    """A process's memory as a file: the first megabytes are never mapped, which is an I/O error."""
    path = Path("/proc/self/mem")
    if not path.exists():
        pytest.skip("this system has no /proc")
    reader = Reader(2)
    reader.add(path, identity(path))
    got = room(BLOCK)
    with pytest.raises(InvalidInputError, match="Input/output error at byte"):
        reader.submit([Run(0, 1 << 20, BLOCK, got.data_ptr())], "an expert").wait()


def test_what_nobody_waits_for_is_not_written_later(file):
    """A request that was broken off, and another for the same memory: what comes last stays."""
    wanted, reader = file.read_bytes(), Reader(1)
    reader.add(file, identity(file))
    memory, other = room(SIZE), room(SIZE)
    for urgent in (True, False):
        reader.submit([Run(0, 0, SIZE, memory.data_ptr())], "broken off", urgent=False)
        reader.submit([Run(0, 9, SIZE - 9, memory.data_ptr())], "the one after it", urgent=urgent).wait()
        reader.submit([Run(0, 0, SIZE, other.data_ptr())], "the last", urgent=False).wait()
        assert bytes(memory[: SIZE - 9].numpy()) == wanted[9:]


def test_a_relative_path_and_another_folder(file, tmp_path, monkeypatch):
    monkeypatch.chdir(file.parent)
    reader = Reader(1)
    reader.add(Path(file.name), identity(file))
    monkeypatch.chdir(tmp_path)
    ask_for_all(reader, file)


def test_another_file_by_the_time_it_is_opened(file, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(file.read_bytes())
    before = identity(path)
    kept = tmp_path / "kept"
    os.rename(path, kept)
    path.write_bytes(kept.read_bytes())
    with pytest.raises(InvalidInputError, match="another file in its place"):
        Reader(1).add(path, before)


def test_a_system_that_starts_no_threads(file):
    """In a child, with hardly any address space left."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (space + 12 * 2**20, resource.RLIM_INFINITY))
            _ = [Reader(8) for _ in range(20)]  # the first may have stacks of threads that have ended
        except InvalidInputError as error:
            code = 0 if "8 reading threads" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InvalidInputError, match="No such file"):
        Reader(1).add(tmp_path / "none", (0, 0, 0, 0))


@pytest.mark.parametrize("threads", [0, 9, -1])
def test_threads_that_there_are_not(threads):
    with pytest.raises(InvalidInputError, match="reading threads"):
        Reader(threads)


def test_dropped_requests_are_never_read(file):
    reader = Reader(1)
    reader.add(file, identity(file))
    memory = [room(SIZE) for _ in range(6)]
    tickets = [reader.submit([Run(0, 0, SIZE, m.data_ptr())], "a guess", urgent=False) for m in memory]
    dropped = [ticket.drop() for ticket in tickets]
    for ticket, gone in zip(tickets, dropped, strict=True):
        if not gone:
            ticket.wait()
    assert dropped[-1]
    assert reader.counts["dropped"] == sum(dropped)
    assert bool((memory[-1] == 0xAB).all())
    with pytest.raises(InvalidInputError, match="dropped"):
        tickets[-1].wait()


def test_a_forked_child_is_told(file):
    reader = Reader(1)
    reader.add(file, identity(file))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ask_for_all(reader, file)
        except UnsupportedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ask_for_all(reader, file)


def test_under_thread_sanitizer(capfd):
    """A part of what tools/reads.py runs."""
    made = importlib.util.spec_from_file_location("reads_tool", ROOT / "tools" / "reads.py")
    tool = importlib.util.module_from_spec(made)
    made.loader.exec_module(tool)
    assert tool.main("4000") == 0
    assert "WARNING" not in capfd.readouterr().err
