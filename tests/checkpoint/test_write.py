"""Writing: the library's own bytes, a piece at a time, under the final name whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from checkpoint.files import every_dtype, parts, same_bits
from moestro.checkpoint import TensorSpec, open_checkpoint, plan_shards, shard_names, write_file, write_index
from moestro.checkpoint import write as writing
from moestro.checkpoint.header import DTYPES
from moestro.errors import InvalidInputError, UnsupportedError

TENSORS = {"a": torch.arange(12.0).view(4, 3), "b": torch.ones(5, dtype=torch.bfloat16), "s": torch.tensor(7)}


def specs_of(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]


def pieces_of(tensors: dict[str, Tensor], rows: int = 10**9) -> Iterator[tuple[str, Tensor]]:
    """Tensors in pieces of so many rows; one of each in turn."""
    pieces = [[(n, piece) for piece in (t.split(rows) if t.dim() else [t])] for n, t in tensors.items()]
    return (piece for turn in zip_longest(*pieces) for piece in turn if piece is not None)


def written(path: Path, tensors: dict[str, Tensor], rows: int = 10**9) -> dict[str, str]:
    return write_file(path, specs_of(tensors), pieces_of(tensors, rows))


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# The same bytes


@pytest.mark.parametrize("rows", [1, 3, 10**9])
def test_the_same_bytes_as_the_library(tmp_path: Path, rows: int) -> None:
    tensors = every_dtype()
    tensors |= {"empty": torch.zeros(0, 3), "thin": torch.zeros(3, 0), "scalar": torch.tensor(2.5)}
    tensors |= {'ä/ключ 鍵 😀 "\\/\n\t\b\f\x01\x7f\u2028': torch.arange(3), "": torch.ones(1)}
    save_file(tensors, tmp_path / "theirs")
    sums = written(tmp_path / "ours", tensors, rows)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    loaded, opened = load_file(tmp_path / "ours"), open_checkpoint(tmp_path / "ours")
    assert set(loaded) == set(tensors) == set(opened.names)
    for name, tensor in tensors.items():
        assert same_bits(loaded[name], tensor)
        assert same_bits(opened.tensor(name), tensor)
        assert sums[name] == hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=4)
kinds = st.sampled_from(list(DTYPES.values()))


@given(
    st.dictionaries(names, st.tuples(kinds, shapes), max_size=8),
    st.none() | st.dictionaries(names, names, min_size=1, max_size=1),
)
def test_the_same_bytes_whatever_the_tensors(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: dict[str, tuple[torch.dtype, list[int]]],
    metadata: dict[str, str] | None,
) -> None:
    tensors = {name: torch.zeros(shape, dtype=torch.uint8).to(dtype) for name, (dtype, shape) in kinds.items()}
    path = tmp_path_factory.mktemp("any") / "x"
    write_file(path, specs_of(tensors), pieces_of(tensors, 2), metadata)
    assert path.read_bytes() == save(tensors, metadata)


def test_metadata_is_sorted(tmp_path: Path) -> None:
    metadata = {"z": "1", "format": "pt", "ä": '"2"\n', "a": "3"}
    write_file(tmp_path / "x", specs_of(TENSORS), pieces_of(TENSORS), metadata)
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == metadata
    text = (tmp_path / "x").read_bytes()[8:]
    assert text.startswith('{"__metadata__":{"a":"3","format":"pt","z":"1","ä":'.encode())


def test_pieces_that_are_views(tmp_path: Path) -> None:
    """Strided, conjugated, negated, of a mapping, and such that want a gradient."""
    z = torch.randn(3, 4, dtype=torch.complex64)
    tensors = {
        "t": torch.randn(4, 6).t(),
        "step": torch.arange(20)[::3],
        "wide": torch.randn(1, 5).expand(3, 5),
        "conj": z.conj(),
        "neg": z.conj().imag,
        "grad": torch.randn(3, requires_grad=True),
    }
    assert tensors["neg"].is_neg()
    written(tmp_path / "x", tensors)
    loaded = load_file(tmp_path / "x")
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name
    opened = open_checkpoint(tmp_path / "x")
    written(tmp_path / "y", {name: opened.tensor(name) for name in opened.names}, 1)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_pieces_do_not_pile_up_before_a_slow_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive, counts = set[int](), list[int]()

    class Slow:
        def update(self, data: memoryview) -> None:
            time.sleep(0.01)

        def hexdigest(self) -> str:
            return ""

    def pieces() -> Iterator[tuple[str, Tensor]]:
        for i in range(12):
            array = np.full((1, 100), i, dtype=np.uint8)
            alive.add(i)
            weakref.finalize(array, alive.remove, i)
            counts.append(len(alive))
            piece = torch.from_numpy(array)  # lives until nobody needs these bytes
            del array
            yield "a", piece
            del piece

    monkeypatch.setattr(hashlib, "sha256", Slow)
    write_file(tmp_path / "x", [TensorSpec("a", torch.uint8, (12, 100))], pieces())
    assert max(counts) <= 3  # the one being made, the one being hashed, and one whose hashing has just ended
    assert alive == set()
    assert open_checkpoint(tmp_path / "x").tensor("a")[:, -1].tolist() == list(range(12))


def test_a_piece_is_hashed_while_the_next_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hash here waits until the next piece is being made, or the last one has been."""
    started = [threading.Event() for _ in range(4)]
    waited: list[bool] = []

    class Waiting:
        def update(self, data: memoryview) -> None:
            waited.append(started[len(waited) + 1].wait(timeout=10))

        def hexdigest(self) -> str:
            return ""

    def pieces() -> Iterator[tuple[str, Tensor]]:
        for i in range(3):
            started[i].set()
            yield "a", torch.full((1, 10), float(i))
        started[3].set()

    monkeypatch.setattr(hashlib, "sha256", Waiting)
    before = threading.active_count()
    write_file(tmp_path / "x", [TensorSpec("a", torch.float32, (3, 10))], pieces())
    assert waited == [True] * 3
    assert threading.active_count() == before


# What cannot be written


def refused(path: Path, specs: Sequence[TensorSpec], pieces: Iterable[Tensor]) -> str:
    with pytest.raises(InvalidInputError) as caught:
        write_file(path, specs, ((specs[0].name, piece) for piece in pieces))
    assert files(path.parent) == []
    found = parts(caught.value)
    assert found["operation"] == "write_file"
    return found[0]


SPEC = TensorSpec("a", torch.float32, (4, 3))
WRONG: dict[str, tuple[list[Tensor], tuple[str, ...]]] = {
    "none": ([], ("0 bytes for tensor 'a'", "48 bytes, for torch.float32 of shape [4, 3]")),
    "too few": ([torch.zeros(3, 3)], ("36 bytes", "48 bytes")),
    "too many": ([torch.zeros(3, 3), torch.zeros(2, 3)], ("60 bytes", "48 bytes")),
    "dtype": ([torch.zeros(4, 3).half()], ("a piece of torch.float16", "torch.float32")),
    "later dtype": ([torch.zeros(3, 3), torch.zeros(1, 3).long()], ("a piece of torch.int64",)),
    "transposed": ([torch.zeros(3, 4)], ("a piece of shape [3, 4]", "[n, 3]")),
    "flat": ([torch.zeros(12)], ("a piece of shape [12]", "[n, 3]")),
}


@pytest.mark.parametrize("what", WRONG)
def test_pieces_other_than_announced(tmp_path: Path, what: str) -> None:
    pieces, fragments = WRONG[what]
    message = refused(tmp_path / "x", [SPEC], pieces)
    for fragment in ("tensor 'a'", *fragments):
        assert fragment in message


def test_a_producer_without_end_is_stopped(tmp_path: Path) -> None:
    made = 0

    def pieces() -> Iterator[Tensor]:
        nonlocal made
        while made < 100:
            made += 1
            yield torch.zeros(3, 3)

    assert "72 bytes or more" in refused(tmp_path / "x", [SPEC], pieces())
    assert made == 2


def test_a_piece_of_a_tensor_that_was_not_announced(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        write_file(tmp_path / "x", [SPEC], [("b", torch.zeros(4, 3))])
    assert "a piece of tensor 'b'" in parts(caught.value)["got"]
    assert files(tmp_path) == []


def test_names_that_no_header_can_hold(tmp_path: Path) -> None:
    one = torch.zeros(1)
    for names, fragment in ((["b", "b"], "'b'"), (["__metadata__"], "__metadata__"), (["\ud800"], "Unicode")):
        specs = [TensorSpec(name, torch.float32, (1,)) for name in names]
        assert fragment in refused(tmp_path / "x", specs, [one])


def test_a_header_that_nobody_would_read(tmp_path: Path) -> None:
    assert "a header of 100000" in refused(tmp_path / "x", [TensorSpec("n" * 10**8, torch.float32, (0,))], [])


@pytest.mark.parametrize("dtype", [torch.complex128, torch.quint8, torch.float4_e2m1fn_x2])
def test_dtypes_that_no_file_can_hold(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError) as caught:
        write_file(tmp_path / "x", [TensorSpec("a", dtype, (1,))], [])
    assert f"tensor 'a' of {dtype}" in parts(caught.value)["got"]
    assert files(tmp_path) == []


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Interrupted])
def test_an_error_of_the_producer_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    def pieces() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(2, 3)
        assert files(tmp_path) == ["x", "x.partial"]
        raise error("no more")

    written(tmp_path / "x", TENSORS)
    before = (tmp_path / "x").read_bytes()
    with pytest.raises(error, match="no more"):
        write_file(tmp_path / "x", [SPEC], pieces())
    assert files(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == before
    (tmp_path / "x.partial").write_bytes(b"of a process that was killed" * 100)
    written(tmp_path / "x", TENSORS, 1)
    assert files(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == before


def no_space(tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> str:
    """/dev/full takes the place of the file being written: every write to it fails for want of space."""
    monkeypatch.setattr(writing, "_open_no_link", lambda path, flags: os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(InvalidInputError) as caught:
        written(tmp_path / "x", tensors)
    assert files(tmp_path) == []
    cause = caught.value.__cause__
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC
    return parts(caught.value)[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("size", [1, 10**6], ids=["found when flushed", "found when written"])
def test_no_space(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    message = no_space(tmp_path, {"a": torch.zeros(size)}, monkeypatch)
    assert f"{tmp_path / 'x'}: No space left on device" in message
    assert "Free space" in message


def test_a_file_larger_than_the_limit(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        message = refused(
            tmp_path / "x", [TensorSpec("a", torch.uint8, (2**21,))], [torch.zeros(2**21, dtype=torch.uint8)]
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in message


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        written(tmp_path / "no" / "x", TENSORS)
    assert f"{tmp_path / 'no' / 'x'}: No such file or directory" in parts(caught.value)["got"]


def test_a_folder_has_the_name(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(InvalidInputError) as caught:
        written(tmp_path / "x", TENSORS)
    assert "directory" in parts(caught.value)["got"]
    assert files(tmp_path) == ["x"]


def test_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else f"{os.fstat(descriptor).st_size} bytes"
        events.append(f"fsync {kind}")
        fsync(descriptor)

    def logged_replace(source: Path, target: Path) -> None:
        events.append(f"{source.name} -> {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    written(tmp_path / "x", TENSORS)
    size = (tmp_path / "x").stat().st_size
    assert events == [f"fsync {size} bytes", "x.partial -> x", "fsync folder"]


def test_killed_while_writing(tmp_path: Path) -> None:
    """A name means a whole file: what was there before stays, and the next run replaces it."""
    written(tmp_path / "x", TENSORS)
    before = (tmp_path / "x").read_bytes()
    code = f"""
import torch
from pathlib import Path
from moestro.checkpoint import TensorSpec, write_file
def pieces():
    for _ in range(10):
        yield "a", torch.zeros(1, 2**20)
    print("half", flush=True)
    input()
write_file(Path({str(tmp_path / "x")!r}), [TensorSpec("a", torch.float32, (20, 2**20))], pieces())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    assert files(tmp_path) == ["x", "x.partial"]
    assert (tmp_path / "x").read_bytes() == before
    written(tmp_path / "x", TENSORS)
    assert files(tmp_path) == ["x"]


# Several files


def sized(*sizes: int) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", torch.uint8, (size,)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "max_bytes", "expected"),
    [
        ((3, 3, 3), 6, [[3, 3], [3]]),
        ((3, 3, 3), 9, [[3, 3, 3]]),
        ((3, 3, 3), 5, [[3], [3], [3]]),
        ((1, 50, 1), 6, [[1], [50], [1]]),
        ((50,), 6, [[50]]),
        ((0, 6, 0, 1), 6, [[0, 6, 0], [1]]),
        ((), 6, []),
    ],
)
def test_which_tensors_share_a_file(sizes: tuple[int, ...], max_bytes: int, expected: list[list[int]]) -> None:
    assert [[spec.nbytes for spec in shard] for shard in plan_shards(sized(*sizes), max_bytes)] == expected


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 60))
def test_plans_keep_order_and_bounds(sizes: list[int], max_bytes: int) -> None:
    specs = sized(*sizes)
    shards = plan_shards(specs, max_bytes)
    assert [spec for shard in shards for spec in shard] == specs
    totals = [sum(spec.nbytes for spec in shard) for shard in shards]
    assert all(total <= max_bytes or len(shard) == 1 for total, shard in zip(totals, shards, strict=True))
    firsts = [shard[0].nbytes for shard in shards[1:]]
    assert all(total + first > max_bytes for total, first in zip(totals, firsts, strict=False))


def test_impossible_plans() -> None:
    for call in (lambda: plan_shards(sized(1), 0), lambda: shard_names(0)):
        with pytest.raises(InvalidInputError) as caught:
            call()
        assert parts(caught.value)["needs"] == "at least 1"


def test_names_of_files() -> None:
    assert shard_names(1) == ("model.safetensors",)
    assert shard_names(3)[::2] == ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")


def test_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    tensors = every_dtype()
    shards = plan_shards(specs_of(tensors), 500)
    assert len(shards) > 3
    named = dict(zip(shard_names(len(shards)), shards, strict=True))
    for name, specs in named.items():
        write_file(tmp_path / name, specs, pieces_of({spec.name: tensors[spec.name] for spec in specs}))
    index = json.loads(write_index(tmp_path, named).read_text())
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in tensors.values())}
    assert index["weight_map"] == {spec.name: name for name, specs in named.items() for spec in specs}
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names) == set(tensors)
    assert all(same_bits(checkpoint.tensor(name), tensor) for name, tensor in tensors.items())
    assert files(tmp_path) == sorted([*named, "model.safetensors.index.json"])


def test_a_tensor_in_two_files_has_no_index(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        write_index(tmp_path, {"one": sized(1), "two": sized(1)})
    assert "'t0' in one and in two" in parts(caught.value)["got"]
    assert files(tmp_path) == []


def test_the_index_takes_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = write_index(tmp_path, {"one": sized(1)})
    before = path.read_bytes()
    (tmp_path / f"{path.name}.partial").mkdir()
    with pytest.raises(InvalidInputError) as caught:
        write_index(tmp_path, {"one": sized(1, 2)})
    assert "Is a directory" in parts(caught.value)["got"]
    assert path.read_bytes() == before
