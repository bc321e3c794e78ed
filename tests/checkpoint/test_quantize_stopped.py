"""Quantising that stops, by force or not, goes on later and ends with the same bytes; and how much memory it takes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from checkpoint import quantize_jobs
from checkpoint.quantize_jobs import make_job, make_source, many_files, refused, sums
from moestro.checkpoint import open_checkpoint
from moestro.checkpoint.checksums import CHECKSUMS
from moestro.checkpoint.quantize import Progress, quantize_checkpoint
from moestro.checkpoint.resume import RECORD, partial_folder
from moestro.checkpoint.scheme import Scheme
from moestro.errors import InvalidInputError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source") / "model")


def python(*arguments: str) -> str:
    """What a new interpreter that finds the tests and the package prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    found = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment)
    return found.stdout


def times(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


def test_killed_at_random_moments(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(many_files(source, tmp_path / "whole"))
    met = json.loads(python(quantize_jobs.__file__, str(source), str(tmp_path / "dst"), "7"))
    assert len(met) >= 2  # how many there is time for is the machine's affair
    assert len(set(met)) >= 2
    assert sums(tmp_path / "dst") == sums(tmp_path / "whole")
    assert not partial_folder(tmp_path / "dst").exists()


class Stop(Exception):  # noqa: N818
    """Stands for whatever stops a run."""


def stop_after(nbytes: int) -> Callable[[Progress], None]:
    def on_progress(progress: Progress) -> None:
        if progress.written >= nbytes:
            raise Stop

    return on_progress


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_a_run_goes_on_where_another_stopped(source: Path, tmp_path: Path, share: float) -> None:
    whole = quantize_checkpoint(many_files(source, tmp_path / "whole"))
    job = many_files(source, tmp_path / "dst")
    with pytest.raises(Stop):
        quantize_checkpoint(job, stop_after(int(share * whole.bytes_after)))
    beside = partial_folder(job.destination)
    finished = {path: path.stat().st_mtime_ns for path in beside.glob("*.safetensors")}
    (beside / "config.json.partial").write_text("cut o")
    report = quantize_checkpoint(job)
    assert report.num_resumed == len(finished)
    assert (share > 0) == (report.num_resumed > 0)
    assert all((job.destination / path.name).stat().st_mtime_ns == t for path, t in finished.items())
    assert sums(tmp_path / "dst") == sums(tmp_path / "whole")


def test_a_shard_that_was_cut_is_written_again(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(many_files(source, tmp_path / "whole"))
    job = many_files(source, tmp_path / "dst")
    with pytest.raises(Stop):
        quantize_checkpoint(job, stop_after(40_000))
    beside = partial_folder(job.destination)
    one, *_, last = sorted(beside.glob("*.safetensors"))
    one.write_bytes(one.read_bytes()[:-1])
    last.unlink()
    quantize_checkpoint(job)
    assert sums(tmp_path / "dst") == sums(tmp_path / "whole")


def test_checksums_are_of_what_was_written(source: Path, tmp_path: Path) -> None:
    """A shard that changed between two runs is not what its checksums say; one without checksums is written again."""
    job = many_files(source, tmp_path / "dst")
    with pytest.raises(Stop):
        quantize_checkpoint(job, stop_after(40_000))
    beside = partial_folder(job.destination)
    one, other, *_ = shards = sorted(beside.glob("*.safetensors"))
    one.write_bytes(one.read_bytes()[:-1] + bytes([one.read_bytes()[-1] ^ 1]))
    listed = json.loads((beside / CHECKSUMS).read_text())
    del listed[other.name]
    (beside / CHECKSUMS).write_text(json.dumps(listed))
    assert quantize_checkpoint(job).num_resumed == len(shards) - 1
    with pytest.raises(InvalidInputError) as caught:
        open_checkpoint(tmp_path / "dst").verify()
    assert f"{tmp_path / 'dst' / one.name}: tensor" in str(caught.value)


def test_a_second_run_writes_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = many_files(source, tmp_path / "dst")
    first = quantize_checkpoint(job)
    before = times(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    steps: list[Progress] = []
    second = quantize_checkpoint(job, steps.append)
    assert times(tmp_path) == before
    assert second.complete_before
    assert steps == []
    assert replace(second, complete_before=False, num_resumed=0, seconds=first.seconds) == first


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    "what", ["format", "search", "overrides", "shard size", "checksums", "source", "files", "configuration"]
)
def test_another_job_is_refused(source: Path, tmp_path: Path, what: str, complete: bool) -> None:
    copy = shutil.copytree(source, tmp_path / "src")
    job = make_job(copy, tmp_path / "dst", shard_bytes=30_000)
    if complete:
        quantize_checkpoint(job)
    else:
        with pytest.raises(Stop):
            quantize_checkpoint(job, stop_after(30_000))
    before = times(tmp_path / ("dst" if complete else "dst.partial"))
    schemes = {
        "format": Scheme("int8"),
        "search": Scheme("mxfp4", {}, "mse"),
        "overrides": Scheme("mxfp4", {"*": "int8"}),
    }
    job = replace(job, scheme=schemes.get(what, job.scheme), checksums=what == "checksums")
    job = replace(job, shard_bytes=30_001 if what == "shard size" else 30_000)
    if what == "source":
        os.utime(copy / "model-00002-of-00003.safetensors")
    elif what == "files":
        (copy / "README.md").write_text("other")
    elif what == "configuration":
        (copy / "config.json").write_text("{}")
    found = refused(job)
    assert what in found["got"]
    assert times(tmp_path / ("dst" if complete else "dst.partial")) == before


@pytest.mark.parametrize("damage", ["cut", "missing", "record"])
def test_a_complete_folder_that_was_damaged(source: Path, tmp_path: Path, damage: str) -> None:
    job = many_files(source, tmp_path / "dst")
    quantize_checkpoint(job)
    shard = min((tmp_path / "dst").glob("*.safetensors"))
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "missing":
        shard.unlink()
    else:
        shard = tmp_path / "dst" / RECORD
        shard.write_text("{")
    assert str(shard) in refused(job)["got"]


def test_two_runs_at_once(source: Path, tmp_path: Path) -> None:
    job = make_job(source, tmp_path / "dst")
    beside = partial_folder(job.destination)
    beside.mkdir()
    handle = os.open(beside, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert "another run" in refused(job)["got"]
    finally:
        os.close(handle)
    quantize_checkpoint(job)


def test_a_folder_that_was_renamed_meanwhile_where_no_locks_are(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run ends just now, on a file system without locks."""

    def flock(handle: int, operation: int) -> None:
        (tmp_path / "dst.partial").rename(tmp_path / "elsewhere")
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(InvalidInputError, match="which another run is writing"):
        quantize_checkpoint(make_job(source, tmp_path / "dst"))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_empty_destination_and_missing_parents(source: Path, tmp_path: Path) -> None:
    (tmp_path / "dst").mkdir()
    quantize_checkpoint(make_job(source, tmp_path / "dst"))
    quantize_checkpoint(make_job(source, tmp_path / "a" / "b" / "dst"))
    assert sums(tmp_path / "dst") == sums(tmp_path / "a" / "b" / "dst")


# Memory

PEAK = """
import sys, threading, time
from dataclasses import replace
from pathlib import Path
import torch
from checkpoint.quantize_jobs import make_job
from moestro.checkpoint import ExpertSource, open_checkpoint
from moestro.checkpoint.quantize import Job, quantize_checkpoint
from moestro.checkpoint.scheme import Scheme
from moestro.formats import dense, find_format, quantize

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024

folder = Path(sys.argv[1])
checkpoint = open_checkpoint(folder)
names = [name for name in checkpoint.names if name.startswith("experts")]
sources = [ExpertSource(name, dense(checkpoint.tensor(name)), (name,)) for name in names]
job = Job(folder, checkpoint, sources, folder.parent / "dst", Scheme("int4-g32"))
quantize(torch.randn(64, 64), find_format("int4-g32"))
base = peak = anonymous()
running = True

def watch():
    global peak
    while running:
        peak = max(peak, anonymous())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
quantize_checkpoint(job)
running = False
thread.join()
print(peak - base)
"""


@pytest.mark.parametrize("shape", [(64, 512, 512), (2, 4096, 2048)])
def test_memory_holds_a_few_experts(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Two stacks of experts and a tensor that is copied, 32 MiB each; what is in memory is a fraction of one.

    An expert that is large is not copied either: only what is made of it is in memory.
    """
    stack = torch.zeros(shape, dtype=torch.bfloat16)
    (tmp_path / "src").mkdir()
    tensors = {"experts.a": stack, "experts.b": stack + 1, "rest": stack.clone()}
    save_file(tensors, tmp_path / "src" / "model.safetensors")
    (tmp_path / "src" / "config.json").write_text("{}")
    assert int(python("-c", PEAK, str(tmp_path / "src"))) < 24 * 2**20
