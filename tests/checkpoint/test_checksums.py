"""A changed byte is caught where checksums were written, whatever changed and whoever wrote the file."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from checkpoint.files import index, parts, written
from moestro.checkpoint import checksums, header, open_checkpoint, write_checksums
from moestro.errors import InvalidInputError

NAME = "moestro-checksums.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files, with checksums."""
    save_file({"a": torch.arange(1000.0), "empty": torch.zeros(0)}, tmp_path / A)
    save_file({"b": torch.randn(7, 11).bfloat16(), "c": torch.arange(5)}, tmp_path / B)
    written(tmp_path, {"model.safetensors.index.json": index(a=A, empty=A, b=B, c=B)})
    write_checksums(tmp_path, open_checkpoint(tmp_path).checksums())
    return tmp_path


def change(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def refused(source: object) -> str:
    checkpoint = open_checkpoint(source)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError) as caught:
        checkpoint.verify()
    found = parts(caught.value)
    assert found["operation"] == "Checkpoint.verify"
    return found[0]


def edit(folder: Path, change: Callable[[dict[str, dict[str, str]]], object]) -> None:
    sums = json.loads((folder / NAME).read_text())
    change(sums)
    (folder / NAME).write_text(json.dumps(sums))


def test_what_is_whole_passes(folder: Path) -> None:
    assert open_checkpoint(folder).verify() is True
    assert open_checkpoint([folder / B]).verify() is True
    sums = json.loads((folder / NAME).read_text())
    assert sums[A]["a"] == hashlib.sha256(torch.arange(1000.0).numpy().tobytes()).hexdigest()
    assert sums[A]["empty"] == hashlib.sha256(b"").hexdigest()
    assert sums.keys() == {A, B}


def test_without_checksums_nothing_is_read(folder: Path) -> None:
    (folder / NAME).unlink()
    calls: list[tuple[int, int]] = []
    assert open_checkpoint(folder).verify(lambda done, total: calls.append((done, total))) is False
    assert calls == []


def test_every_bit_of_every_byte_of_a_tensor(folder: Path) -> None:
    entry = open_checkpoint(folder).entry("c")
    for position in (entry.start, entry.start + 13, entry.stop - 1):
        for bit in range(8):
            change(folder / B, position, bit)
            message = refused(folder)
            assert f"{folder / B}: tensor 'c'" in message
            found = hashlib.sha256((folder / B).read_bytes()[entry.start : entry.stop]).hexdigest()
            expected = json.loads((folder / NAME).read_text())[B]["c"]
            assert f"SHA-256 {found}; needs {expected}" in message
            change(folder / B, position, bit)
    assert open_checkpoint(folder).verify() is True


def test_two_tensors_that_changed_places(folder: Path) -> None:
    """Same bytes in the file, other tensors: the header counts."""
    save_file({"x": torch.zeros(4), "y": torch.ones(4)}, folder / "z")
    write_checksums(folder, open_checkpoint([folder / "z"]).checksums())
    save_file({"x": torch.ones(4), "y": torch.zeros(4)}, folder / "z")
    assert "tensor 'x'" in refused([folder / "z"])


LISTS: dict[str, tuple[Callable[[dict[str, dict[str, str]]], object], str]] = {
    "tensor not listed": (lambda sums: sums[B].pop("b"), f"{B}: tensor 'b' without a checksum"),
    "tensor missing": (lambda sums: sums[B].update(d="0" * 64), f"{B}: tensor 'd' missing"),
    "file not listed": (lambda sums: sums.pop(B), f"no checksums of {B}"),
    "file missing": (lambda sums: sums.update(other={}), "other: checksums of a file that the checkpoint"),
}


@pytest.mark.parametrize("what", LISTS)
def test_checksums_of_other_tensors(folder: Path, what: str) -> None:
    edit(folder, LISTS[what][0])
    assert LISTS[what][1] in refused(folder)


DAMAGED = {
    "empty": b"",
    "list": b"[]",
    "cut off": b'{"a": {"b": "',
    "not a table": b'{"a": 1}',
    "number": b'{"a": {"b": 1}}',
    "short": b'{"a": {"b": "12ab"}}',
    "capitals": b'{"a": {"b": "%s"}}' % (b"A" * 64),
    "twice": b'{"a": {}, "a": {}}',
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_checksums(folder: Path, what: str) -> None:
    (folder / NAME).write_bytes(DAMAGED[what])
    with pytest.raises(InvalidInputError) as caught:
        open_checkpoint(folder).verify()
    assert str(folder / NAME) in parts(caught.value)["got"]


def test_a_dangling_link_is_no_absence(folder: Path) -> None:
    (folder / NAME).unlink()
    (folder / NAME).symlink_to("nowhere")
    with pytest.raises(InvalidInputError) as caught:
        open_checkpoint(folder).verify()
    assert "a link to nowhere, which is not there" in parts(caught.value)["got"]


def test_files_beside_different_checksums(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_file({name: torch.ones(3)}, tmp_path / name / "x")
    both = [tmp_path / "one" / "x", tmp_path / "two" / "x"]
    write_checksums(tmp_path / "one", open_checkpoint(both[:1]).checksums())
    assert f"{both[1]}: no checksums of x" in refused(both)
    write_checksums(tmp_path / "two", open_checkpoint(both[1:]).checksums())
    assert open_checkpoint(both).verify() is True


def test_progress_ends_at_the_total(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    calls: list[tuple[int, int]] = []
    assert checkpoint.verify(lambda done, total: calls.append((done, total)))
    done = [d for d, _ in calls]
    assert done == sorted(done)
    assert calls[-1] == (checkpoint.nbytes, checkpoint.nbytes)
    assert {total for _, total in calls} == {checkpoint.nbytes}


def test_large_tensors_report_on_the_way(tmp_path: Path) -> None:
    save_file({"x": torch.arange(3 * 2**20)}, tmp_path / "x")
    calls: list[int] = []
    sums = open_checkpoint(tmp_path / "x").checksums(lambda done, _: calls.append(done))
    assert calls == [2**22 * i for i in range(1, 7)]
    data = torch.arange(3 * 2**20).numpy().tobytes()
    assert sums == {"x": {"x": hashlib.sha256(data).hexdigest()}}


def test_as_many_threads_as_torch_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({f"t{i}": torch.full((1000,), float(i)) for i in range(6)}, tmp_path / "x")
    checkpoint = open_checkpoint(tmp_path / "x")
    alone = checkpoint.checksums()
    barrier = threading.Barrier(3)
    names: set[str] = set()

    def meeting(path: Path) -> AbstractContextManager[BinaryIO]:
        names.add(threading.current_thread().name)
        barrier.wait(timeout=60)
        return header.reading(path)

    monkeypatch.setattr(checksums, "reading", meeting)
    torch.set_num_threads(3)
    assert checkpoint.checksums() == alone
    assert len(names) == 3


def test_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.BytesIO):
        def readinto(self, buffer: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def fileno(self) -> int:
            return descriptor

    save_file({"x": torch.ones(4)}, tmp_path / "x")
    checkpoint = open_checkpoint(tmp_path / "x")
    with open(tmp_path / "x", "rb") as file:
        descriptor = file.fileno()
        monkeypatch.setattr(header, "open", lambda path, mode: Broken(), raising=False)
        with pytest.raises(InvalidInputError) as caught:
            checkpoint.checksums()
    assert f"{tmp_path / 'x'}: Input/output error" in parts(caught.value)["got"]


def test_an_error_of_the_callback_reaches_the_caller(folder: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise InterruptedError("enough")

    before = threading.active_count()
    with pytest.raises(InterruptedError, match="enough"):
        open_checkpoint(folder).verify(stop)
    assert threading.active_count() == before


def test_a_file_that_changes_after_it_was_opened(folder: Path) -> None:
    for spoil in (replace_a, lambda path: os.truncate(path, 100), lambda path: os.utime(path, (1, 1))):
        save_file({"a": torch.arange(1000.0), "empty": torch.zeros(0)}, folder / A)
        checkpoint = open_checkpoint(folder)
        spoil(folder / A)
        with pytest.raises(InvalidInputError) as caught:
            checkpoint.verify()
        assert f"{folder / A}: a file that changed after it was opened" in parts(caught.value)["got"]


def replace_a(path: Path) -> None:
    save_file({"a": torch.arange(1000.0), "empty": torch.zeros(0)}, path.with_name("new"))
    os.replace(path.with_name("new"), path)


def test_names_of_any_language(tmp_path: Path) -> None:
    save_file({'ключ "鍵\n': torch.ones(2)}, tmp_path / "ä")
    write_checksums(tmp_path, open_checkpoint(tmp_path / "ä").checksums())
    assert open_checkpoint(tmp_path / "ä").verify() is True


@given(st.data())
def test_any_changed_byte_is_caught(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Of the header, which then does not fit or names other tensors, or of a tensor."""
    folder = tmp_path_factory.mktemp("any")
    save_file({"a": torch.arange(6.0), "b": torch.arange(9, dtype=torch.uint8)}, folder / "x", {"format": "pt"})
    write_checksums(folder, open_checkpoint([folder / "x"]).checksums())
    before = (folder / "x").read_bytes()
    checkpoint = open_checkpoint([folder / "x"])
    entries = [checkpoint.entry(name) for name in checkpoint.names]
    position = data.draw(st.integers(min(e.start for e in entries), len(before) - 1))
    change(folder / "x", position, data.draw(st.integers(0, 7)))
    name = next(e.name for e in entries if e.start <= position < e.stop)
    assert f"tensor {name!r}" in refused([folder / "x"])
