"""Pages of mapped files: given back, and mapped ahead of their use."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoint.files import resident, sparse
from moestro.checkpoint import open_checkpoint, read


def test_released_pages_leave_memory(tmp_path: Path) -> None:
    nbytes = 2**27
    checkpoint = open_checkpoint(sparse(tmp_path / "model.safetensors", nbytes))
    tensor = checkpoint.tensor("x")
    before = resident()
    assert tensor.sum().item() == 0
    assert resident() - before > nbytes // 2
    checkpoint.release("x")
    assert resident() - before < nbytes // 8
    assert tensor.sum().item() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux maps pages ahead of their use")
def test_fetched_pages_are_there_before_they_are_read(tmp_path: Path) -> None:
    nbytes = 2**27
    checkpoint = open_checkpoint(sparse(tmp_path / "model.safetensors", nbytes))
    before = resident()
    pieces = list(checkpoint.fetch("x"))
    if not pieces:
        pytest.skip("this system cannot, before Linux 5.14")
    assert nbytes <= sum(pieces) < nbytes + 2**16
    assert resident() - before > nbytes // 2


def test_nothing_is_fetched_where_the_system_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "_POPULATE_READ", 12345)
    assert list(open_checkpoint(sparse(tmp_path / "model.safetensors", 2**20)).fetch("x")) == []


def flags_of(path: Path) -> list[set[str]]:
    """What the system notes of each part of the address space that the file is mapped to."""
    try:
        parts = Path("/proc/self/smaps").read_text().split(str(path))[1:]
        return [set(part.split("VmFlags:")[1].split("\n")[0].split()) for part in parts]
    except (OSError, IndexError):
        pytest.skip("this system does not tell")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="only Linux has this advice")
def test_large_pages_are_asked_for_what_is_fetched(tmp_path: Path) -> None:
    with mmap.mmap(-1, 2**22) as probe:
        try:
            probe.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pytest.skip("this system is built without large pages")
    path = sparse(tmp_path / "model.safetensors", 2**22)
    checkpoint = open_checkpoint(path)
    assert not any("hg" in flags for flags in flags_of(path))
    if not list(checkpoint.fetch("x")):
        pytest.skip("this system cannot fetch, before Linux 5.14")
    assert any("hg" in flags for flags in flags_of(path))
    assert checkpoint.tensor("x").sum().item() == 0


def test_nothing_is_fetched_of_a_tensor_without_elements(tmp_path: Path) -> None:
    """The last of a file that ends with a page: there is no page to ask for."""
    save_file(
        {"a": torch.zeros(mmap.PAGESIZE - 128, dtype=torch.uint8), "z": torch.zeros(0)}, tmp_path / "x.safetensors"
    )
    data = (tmp_path / "x.safetensors").read_bytes()
    header, rest = int.from_bytes(data[:8], "little"), data[8:]
    fill = -len(data) % mmap.PAGESIZE
    padded = (header + fill).to_bytes(8, "little") + rest[:header] + b" " * fill + rest[header:]
    (tmp_path / "x.safetensors").write_bytes(padded)
    assert len(padded) % mmap.PAGESIZE == 0
    assert list(open_checkpoint(tmp_path / "x.safetensors").fetch("z")) == []


def test_a_system_without_large_pages_fetches_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sum(open_checkpoint(sparse(tmp_path / "model.safetensors", 2**20)).fetch("x"))
    for number in (None, 12345):
        monkeypatch.setattr(read, "_LARGE_PAGES", number)
        checkpoint = open_checkpoint(tmp_path / "model.safetensors")
        assert sum(checkpoint.fetch("x")) == expected
        assert checkpoint.tensor("x").sum().item() == 0


def test_release_leaves_the_neighbours_alone(tmp_path: Path) -> None:
    tensors = {name: torch.full((1500,), float(i)) for i, name in enumerate("abc")}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    mapped = {name: checkpoint.tensor(name) for name in tensors}
    mapped["a"].fill_(7.0)
    mapped["c"].fill_(8.0)
    checkpoint.release("b")
    assert mapped["a"].eq(7).all()
    assert mapped["c"].eq(8).all()
    assert torch.equal(mapped["b"], tensors["b"])
