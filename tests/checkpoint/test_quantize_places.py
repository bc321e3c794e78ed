"""Where quantising writes: links, the working folder, disks, and folders of somebody else that have the name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from checkpoint.quantize_jobs import experts_of, make_job, make_source, many_files, refused, sums
from moestro.checkpoint import open_checkpoint, write_checksums
from moestro.checkpoint.quantize import quantize_checkpoint
from moestro.checkpoint.resume import RECORD, partial_folder
from moestro.checkpoint.write import replace_text
from moestro.errors import InvalidInputError


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


# Links


@pytest.mark.parametrize("name", ["notes.txt", "deep/notes.txt"])
def test_a_link_out_of_the_source(source: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("of somebody else")
    copy = shutil.copytree(source, tmp_path / "src")
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).symlink_to(tmp_path / "secret")
    found = refused(make_job(copy, tmp_path / "dst"))
    assert f"{copy / name}, a link to {tmp_path / 'secret'}" in found["got"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "src"]


def test_links_within_the_source_and_to_folders(source: Path, tmp_path: Path) -> None:
    """Files are copied, folders are not followed."""
    copy = shutil.copytree(source, tmp_path / "src")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("x")
    (copy / "elsewhere").symlink_to(tmp_path / "elsewhere")
    (copy / "LICENSE").symlink_to("README.md")
    quantize_checkpoint(make_job(copy, tmp_path / "dst"))
    assert (tmp_path / "dst" / "LICENSE").read_bytes() == (copy / "README.md").read_bytes()
    assert not (tmp_path / "dst" / "LICENSE").is_symlink()
    assert not (tmp_path / "dst" / "elsewhere").exists()


def test_a_cache_of_the_hub_is_made_of_links(source: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    shutil.copytree(source, snapshot)
    blobs.mkdir()
    for number, path in enumerate(sorted(p for p in snapshot.rglob("*") if p.is_file())):
        path.rename(blobs / f"{number}")
        path.symlink_to(blobs / f"{number}")
    quantize_checkpoint(make_job(snapshot, tmp_path / "dst"))
    assert (tmp_path / "dst" / "README.md").read_bytes() == (source / "README.md").read_bytes()


def test_the_folder_of_an_unfinished_result_is_no_link(source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    partial_folder(tmp_path / "dst").symlink_to(tmp_path / "elsewhere")
    assert "dst.partial, a link to" in refused(make_job(source, tmp_path / "dst"))["got"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", ["additional_chat_templates", "model.safetensors.partial"])
def test_nothing_is_written_through_links_in_it(source: Path, tmp_path: Path, name: str) -> None:
    job = make_job(source, tmp_path / "dst")
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(job, stop)
    (tmp_path / "elsewhere").mkdir()
    (partial_folder(tmp_path / "dst") / name).symlink_to(tmp_path / "elsewhere" / ("" if "." not in name else "file"))
    assert f"{name}, a link to" in refused(job)["got"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def stop(progress: object) -> None:
    raise KeyboardInterrupt


def test_a_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "x.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidInputError, match="symbolic link"):
        replace_text(tmp_path / "x", "text")
    assert not (tmp_path / "elsewhere").exists()
