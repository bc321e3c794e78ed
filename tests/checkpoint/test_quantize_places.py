"""Where quantising writes: links, the working folder, disks, and folders of somebody else that have the name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from checkpoint.quantize_jobs import experts_of, make_job, make_source, many_files, refused, sums
from moestro.checkpoint import open_checkpoint, write_checksums
from moestro.checkpoint.quantize import quantize_checkpoint
from moestro.checkpoint.resume import JOURNAL, RECORD, partial_folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source") / "model")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(source: Path, tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "dst").symlink_to(tmp_path / "disk" / "real")
    assert partial_folder(tmp_path / "dst") == tmp_path / "disk" / "real.partial"
    report = quantize_checkpoint(make_job(source, tmp_path / "dst"))
    assert report.destination == tmp_path / "disk" / "real"
    assert (tmp_path / "dst").is_symlink()
    assert open_checkpoint(tmp_path / "dst").files
    assert quantize_checkpoint(make_job(source, tmp_path / "dst")).complete_before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "dst"]


def test_dots_at_the_end_of_a_path(source: Path, tmp_path: Path) -> None:
    (tmp_path / "dst" / "inner").mkdir(parents=True)
    (tmp_path / "dst" / "inner").rmdir()
    assert partial_folder(tmp_path / "dst" / "inner" / "..") == tmp_path / "dst.partial"
    quantize_checkpoint(make_job(source, tmp_path / "dst" / "inner" / ".."))
    assert (tmp_path / "dst" / "config.json").exists()


def test_the_working_folder(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", "../here", str(tmp_path / "here")):
        assert "the working folder" in refused(make_job(source, Path(name)))["got"]
    assert list(tmp_path.iterdir()) == [tmp_path / "here"]


def test_where_a_disk_is_mounted(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dst").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "dst")
    assert "where a disk is mounted" in refused(make_job(source, tmp_path / "dst"))["got"]


def test_nothing_is_removed_from_a_folder_of_somebody_else(source: Path, tmp_path: Path) -> None:
    other = partial_folder(tmp_path / "dst")
    (other / "deep").mkdir(parents=True)
    for path in (other / "thesis.partial", other / "deep" / "download.partial"):
        path.write_text("x")
    before = sums(other)
    assert f"{other}, which exists" in refused(make_job(source, tmp_path / "dst"))["got"]
    assert sums(other) == before


def test_a_run_that_was_killed_while_it_began(source: Path, tmp_path: Path) -> None:
    other = partial_folder(tmp_path / "dst")
    other.mkdir()
    (other / f"{RECORD}.partial").write_text('{"versi')
    quantize_checkpoint(make_job(source, tmp_path / "dst"))
    assert not (tmp_path / "dst" / f"{RECORD}.partial").exists()


def test_a_complete_folder_on_a_disk_that_may_not_be_written_to(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(source, tmp_path / "dst")
    quantize_checkpoint(job)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", unlink)
    assert not (tmp_path / "dst" / JOURNAL).exists()
    assert quantize_checkpoint(job).complete_before


def test_a_source_that_is_not_what_its_checksums_say(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "src")
    checkpoint = open_checkpoint(copy)
    write_checksums(copy, checkpoint.checksums())
    quantize_checkpoint(many_files(copy, tmp_path / "good"))
    entry = checkpoint.entry(f"{experts_of(1)}.down_proj")
    data = bytearray(entry.file.read_bytes())
    data[entry.start + 7] ^= 4
    entry.file.write_bytes(data)
    found = refused(many_files(copy, tmp_path / "dst"))
    assert f"{entry.file}: tensor {entry.name!r} with SHA-256" in found["got"]
