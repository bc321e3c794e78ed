"""Opening a checkpoint: what is sound is mapped, what is not is refused by name before anything is computed."""

from __future__ import annotations

import gc
import json
import os
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from checkpoint.files import described, every_dtype, index, packed, parts, refusal, resident, same_bits, sparse, written
from moestro.checkpoint import Checkpoint, header, open_checkpoint
from moestro.checkpoint.header import MAX_HEADER_BYTES
from moestro.errors import InvalidInputError, MoestroError, UnsupportedError

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
F = bytes(range(16))
"""Four float32."""
NUMBERS = {"x": described(0, 16)}


# Sound files


def test_files_of_the_library_load_in_every_dtype(tmp_path: Path) -> None:
    tensors = every_dtype()
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), 'ä/ключ 鍵 "\\\n': torch.arange(3)}
    save_file(tensors, tmp_path / ONE, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names == tuple(sorted(tensors))
    assert checkpoint.nbytes == sum(t.nbytes for t in tensors.values())
    assert checkpoint.files == (tmp_path / ONE,)
    assert checkpoint.location == tmp_path
    raw = (tmp_path / ONE).read_bytes()
    for name, tensor in tensors.items():
        assert same_bits(checkpoint.tensor(name), tensor), name
        entry = checkpoint.entry(name)
        assert (entry.name, entry.dtype, entry.shape) == (name, tensor.dtype, tuple(tensor.shape))
        assert raw[entry.start : entry.stop] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("as_text", [True, False], ids=["str", "Path"])
def test_one_file_several_files_and_folders(tmp_path: Path, as_text: bool) -> None:
    a, b = {"a": torch.randn(3)}, {"b": torch.randn(2, 2)}
    save_file(a, tmp_path / A)
    save_file(b, tmp_path / B)
    path: Callable[[Path], Any] = str if as_text else Path
    assert open_checkpoint(path(tmp_path / B)).names == ("b",)
    assert open_checkpoint([path(tmp_path / B), path(tmp_path / A)]).files == (tmp_path / B, tmp_path / A)
    written(tmp_path, {INDEX: index(a=A, b=B)})
    checkpoint = open_checkpoint(path(tmp_path))
    assert checkpoint.files == (tmp_path / A, tmp_path / B)
    assert torch.equal(checkpoint.tensor("b"), b["b"])
    assert "a" in checkpoint
    assert "c" not in checkpoint


def test_links_as_hub_caches_have_them(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    save_file({"a": torch.ones(3)}, blobs / "0a")
    save_file({"b": torch.ones(3)}, blobs / "0b")
    written(blobs, {"0c": index(a=A, b=B)})
    for name, blob in ((A, "0a"), (B, "0b"), (INDEX, "0c")):
        (snapshot / name).symlink_to(f"../blobs/{blob}")
    (tmp_path / "main").symlink_to("snapshot")
    assert open_checkpoint(tmp_path / "main").names == ("a", "b")
    (blobs / "0b").unlink()
    found = refusal(snapshot)
    assert f"{snapshot / B}: a link to ../blobs/0b, which is not there" in found["got"]


def test_an_index_that_names_the_single_file(tmp_path: Path) -> None:
    written(tmp_path, {ONE: packed(NUMBERS, F), INDEX: index(x=ONE)})
    assert open_checkpoint(tmp_path).names == ("x",)


def test_spaces_after_the_header_and_fields_nobody_asked_for(tmp_path: Path) -> None:
    text = json.dumps({"__metadata__": None, "x": described(0, 16) | {"note": [1]}}).encode() + b"   "
    written(tmp_path, {ONE: packed(text, F)})
    assert open_checkpoint(tmp_path).tensor("x").numpy().tobytes() == F


def test_no_tensors(tmp_path: Path) -> None:
    written(tmp_path, {ONE: packed({})})
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.names, checkpoint.nbytes) == ((), 0)


def test_an_unknown_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(written(tmp_path, {ONE: packed(NUMBERS, F)}))
    for ask in (checkpoint.entry, checkpoint.tensor, checkpoint.release, lambda name: [*checkpoint.fetch(name)]):
        with pytest.raises(InvalidInputError) as caught:
            ask("y")
        assert "'y'" in parts(caught.value)["got"]


# Files that are not sound


def lfs(oid: str = "4d7a") -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 4800000000\n".encode()


HEADERS: dict[str, tuple[Any, bytes, tuple[str, ...]]] = {
    "too short": (described(0, 16, shape=[5]), F, ("'x'", "F32 of shape [5]", "16 bytes", "20 bytes")),
    "too long": (described(0, 16, shape=[3]), F, ("'x'", "16 bytes", "12 bytes")),
    "other dtype": (described(0, 16, "F64", [4]), F, ("'x'", "F64", "32 bytes")),
    "unknown dtype": (described(0, 16, "F33", [16]), F, ("'x'", "'F33'", "BF16")),
    "dtype null": (described(0, 16) | {"dtype": None}, F, ("'x'", "None")),
    "dtype list": (described(0, 16) | {"dtype": ["F32"]}, F, ("'x'", "F32")),
    "negative size": (described(0, 16, shape=[-4]), F, ("'x'", "[-4]")),
    "fraction": (described(0, 16, shape=[4.0]), F, ("'x'", "[4.0]")),
    "true": (described(0, 4, shape=[True]), F[:4], ("'x'", "[True]")),
    "shape null": (described(0, 16) | {"shape": None}, F, ("'x'", "None")),
    "shape text": (described(0, 16, shape="4"), F, ("'x'", "shape '4'")),
    "many dimensions": (described(0, 4, shape=[1] * 65), F[:4], ("'x'", "64")),
    "huge": (described(0, 0, shape=[0, 2**62, 2]), b"", ("'x'", str(2**62))),
    "product overflows": (described(0, 16, shape=[2**32, 2**32, 2**30]), F, ("'x'", str(2**32))),
    "offsets reversed": (described(0, 16) | {"data_offsets": [16, 0]}, F, ("'x'", "[16, 0]")),
    "offsets negative": (described(0, 16) | {"data_offsets": [-16, 0]}, F, ("'x'", "[-16, 0]")),
    "three offsets": (described(0, 16) | {"data_offsets": [0, 8, 16]}, F, ("'x'", "[0, 8, 16]")),
    "no offsets": ({"dtype": "F32", "shape": [4]}, F, ("'x'", "data_offsets")),
    "no object": ([0, 16], F, ("'x'", "[0, 16]")),
    "starts late": (described(4, 20), F + F[:4], ("'x'", "leaves 4 bytes", "the header")),
    "starts beyond 2^64": (described(2**70, 2**70 + 16), F, ("'x'", "leaves")),
    "cut off": (described(0, 16), F[:-1], ("'x'", "1 bytes that are missing")),
    "no data": (described(0, 16), b"", ("'x'", "16 bytes that are missing")),
    "a byte more": (described(0, 16), F + b"!", ("'x'", "1 bytes after")),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_tensor_that_does_not_fit(tmp_path: Path, what: str) -> None:
    description, data, fragments = HEADERS[what]
    found = refusal(written(tmp_path, {ONE: packed({"x": description}, data)}))
    assert found["operation"] == "open_checkpoint"
    assert str(tmp_path / ONE) in found["got"]
    for fragment in fragments:
        assert fragment in found[0], found[0]


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_less_than_a_byte_is_refused_by_name(tmp_path: Path, dtype: str) -> None:
    written(tmp_path, {ONE: packed({"x": described(0, 16, dtype, [32])}, F)})
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(tmp_path)
    assert f"tensor 'x' of {dtype}, less than a byte" in parts(caught.value)["got"]


PAIRS: dict[str, tuple[Any, Any, int, tuple[str, ...]]] = {
    "overlap": (described(0, 8), described(4, 12), 12, ("'b'", "overlaps tensor 'a'")),
    "inside": (described(0, 16), described(4, 8), 16, ("'b'", "overlaps tensor 'a'")),
    "same": (described(0, 8), described(0, 8), 8, ("'b'", "overlaps tensor 'a'")),
    "hole": (described(0, 4), described(8, 12), 12, ("'b'", "leaves 4 bytes unused after tensor 'a'")),
    "empty inside": (described(0, 8), described(4, 4), 8, ("'b'", "overlaps tensor 'a'")),
    "cut before": (described(0, 8), described(8, 16), 6, ("'a'", "the 1 tensors after it", "10 bytes")),
}


@pytest.mark.parametrize("what", PAIRS)
def test_tensors_that_do_not_follow_each_other(tmp_path: Path, what: str) -> None:
    a, b, size, fragments = PAIRS[what]
    for fields in ({"a": a, "b": b}, {"b": b, "a": a}):
        found = refusal(written(tmp_path, {ONE: packed(fields, F[:size])}))
        for fragment in (str(tmp_path / ONE), *fragments):
            assert fragment in found[0], found[0]


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "an empty file"),
    "7 bytes": (b"\2\0\0\0\0\0\0", "7 bytes"),
    "header cut off": (packed(NUMBERS, F)[:20], "bytes, cut off in its header"),
    "no header": (struct.pack("<Q", 0), "a header that starts with b''"),
    "header of 2^63": (struct.pack("<Q", 2**63) + F, f"a header of {2**63} bytes"),
    "header of 200 MB": (struct.pack("<Q", 2 * MAX_HEADER_BYTES) + F, f"{2 * MAX_HEADER_BYTES} bytes"),
    "git-lfs": (lfs(), "a git-lfs pointer"),
    "pickle": (b"PK\x03\x04" + F, "a zip archive, as torch.save writes"),
    "gguf": (b"GGUF\3\0\0\0" + F, "a GGUF file"),
    "page": (b"<!DOCTYPE html><html>Not found</html>", "a web page"),
    "latin-1": (packed(b'{"\xe4":1}'), "not UTF-8 at byte 2"),
    "no json": (packed(b'{"x" 1}'), "not JSON"),
    "list": (packed(b"[]"), "starts with b'[]'"),
    "space first": (packed(b" {}"), "starts with b' {}'"),
    "byte order mark": (packed(b"\xef\xbb\xbf{}"), "starts with"),
    "zero bytes after": (packed(b"{}\0\0\0\0\0\0"), "not JSON"),
    "NaN": (packed(b'{"x":NaN}'), "a header with NaN"),
    "infinity": (packed(b'{"x":-Infinity}'), "-Infinity"),
    "deep": (packed(b'{"x":' * 100_000), "nested too deep"),
    "many digits": (packed(b'{"x":' + b"9" * 5000 + b"}"), "not JSON"),
    "name twice": (packed(b'{"x":%s,"x":%s}' % ((json.dumps(described(0, 16)).encode(),) * 2), F), "'x' twice"),
    "field twice": (
        packed(b'{"x":{"dtype":"F32","dtype":"I32","shape":[4],"data_offsets":[0,16]}}', F),
        "'dtype' twice",
    ),
    "metadata list": (packed({"__metadata__": ["a"]} | NUMBERS, F), "__metadata__"),
    "metadata of numbers": (packed({"__metadata__": {"a": 1}} | NUMBERS, F), "__metadata__"),
    "half a character": (packed({"\ud800": described(0, 16)}, F), "not Unicode text"),
    "half in metadata": (packed({"__metadata__": {"a": "\udfff"}} | NUMBERS, F), "not Unicode text"),
}


@pytest.mark.parametrize("what", FILES)
def test_files_that_are_none(tmp_path: Path, what: str) -> None:
    data, fragment = FILES[what]
    found = refusal(written(tmp_path, {ONE: data}))
    assert str(tmp_path / ONE) in found["got"]
    assert fragment in found["got"], found[0]


def test_a_long_name_does_not_fill_the_screen(tmp_path: Path) -> None:
    found = refusal(written(tmp_path, {ONE: packed({"n" * 10**6: described(0, 16, "F33")}, F)}))
    assert "(1000000 characters)" in found["got"]
    assert len(found[0]) < 2000


def test_sizes_without_end_do_not_hang(tmp_path: Path) -> None:
    shape = [10**4000] * 64
    assert "'x'" in refusal(written(tmp_path, {ONE: packed({"x": described(0, 16, shape=shape)}, F)}))["got"]


# What the system refuses


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path, fragment in (
        (tmp_path / "nothing", "no such file"),
        ([tmp_path / "folder"], "a folder"),
        ([tmp_path / "pipe"], "no regular file"),
        (Path("/dev/zero"), "no regular file"),
        (tmp_path / "pipe" / "x", "Not a directory"),
        (tmp_path / ("n" * 300), "File name too long"),
    ):
        assert fragment in refusal(path)["got"], path
    (tmp_path / "loop").symlink_to("loop")
    assert "symbolic link" in refusal([tmp_path / "loop"])["got"]
    assert "no files" in refusal([])["got"]


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    assert f"neither {ONE} nor {INDEX}" in refusal(tmp_path)["got"]
    written(tmp_path, {"pytorch_model.bin": b"PK", "adapter.safetensors": b""})
    assert "but adapter.safetensors, pytorch_model.bin" in refusal(tmp_path)["got"]


@contextmanager
def without_rights() -> Iterator[None]:
    """As a user who owns nothing, where the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_no_permission(tmp_path: Path) -> None:
    written(tmp_path, {ONE: packed(NUMBERS, F)})
    (tmp_path / ONE).chmod(0)
    with without_rights():
        found = refusal(tmp_path / ONE)
    assert f"{tmp_path / ONE}: Permission denied" in found["got"]
    tmp_path.chmod(0)
    with without_rights():
        found = refusal(tmp_path)
    tmp_path.chmod(0o700)
    assert "Permission denied" in found["got"]


# Several files and their index

SHARDS = {A: packed({"a": described(0, 16)}, F), B: packed({"b": described(0, 16), "c": described(16, 16)}, F)}

INDICES: dict[str, tuple[dict[str, bytes], tuple[str, ...]]] = {
    "tensor elsewhere": ({INDEX: index(a=A, b=A, c=B)}, (INDEX, f"'b' in {A}", f"it is in {B}")),
    "tensor nowhere": ({INDEX: index(a=A, b=B, c=B, d=B)}, (INDEX, f"'d' in {B}", "no file has it")),
    "tensor not listed": ({INDEX: index(a=A, b=B)}, (INDEX, "no tensor 'c'", B)),
    "tensor twice": (
        {INDEX: index(a=A, b=B), B: packed({"a": described(0, 16), "b": described(16, 16)}, F)},
        ("'a'", A, B),
    ),
    "file elsewhere": ({INDEX: index(a=A, b="../" + B, c=B)}, (INDEX, "'b'", "'../")),
    "absolute": ({INDEX: index(a="/etc/passwd", b=B, c=B)}, (INDEX, "'a'", "/etc/passwd")),
    "no name": ({INDEX: index(a="", b=B, c=B)}, (INDEX, "'a'", "name of a file in the same folder")),
    "zero byte": ({INDEX: index(a="x\0y", b=B, c=B)}, (INDEX, "'a'", "name of a file in the same folder")),
    "half a character": ({INDEX: index(a="\ud800", b=B, c=B)}, (INDEX, "not Unicode text")),
    "folder": ({INDEX: index(a="..", b=B, c=B)}, ("..",)),
    "number": ({INDEX: index(a=1, b=B, c=B)}, (INDEX, "'a'")),
    "list": ({INDEX: b"[]"}, (INDEX, "JSON list")),
    "no weight_map": ({INDEX: b"{}"}, (INDEX, "weight_map")),
    "empty weight_map": ({INDEX: index()}, (INDEX, "weight_map")),
    "empty": ({INDEX: b""}, (INDEX, "not JSON")),
    "cut off": ({INDEX: index(a=A, b=B, c=B)[:-9]}, (INDEX, "not JSON")),
    "name twice": ({INDEX: b'{"weight_map":{"a":"%s","a":"%s"}}' % (A.encode(), B.encode())}, (INDEX, "'a' twice")),
    "git-lfs": ({INDEX: lfs()}, (INDEX, "git-lfs")),
    "two checkpoints": ({INDEX: index(a=A, b=B, c=B), ONE: packed({})}, (ONE, INDEX, "out of date")),
}


def test_an_index_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 1000)
    found = refusal(written(tmp_path, SHARDS | {INDEX: index(a=A, b=B, c=B) + b" " * 1000}))
    assert "an index of more bytes than that" in found[0]


@pytest.mark.parametrize("what", INDICES)
def test_an_index_that_does_not_fit(tmp_path: Path, what: str) -> None:
    changes, fragments = INDICES[what]
    found = refusal(written(tmp_path, SHARDS | changes))
    for fragment in (str(tmp_path), *fragments):
        assert fragment in found[0], found[0]


def test_missing_files_are_named(tmp_path: Path) -> None:
    many = {f"t{i}": f"model-{i:05d}-of-00012.safetensors" for i in range(12)}
    written(tmp_path, {INDEX: index(a=A, b=B, c=B), A: SHARDS[A]})
    found = refusal(tmp_path)
    assert f"no {B}" in found["got"]
    assert "2 tensors are in those, 'b' the first" in found["needs"]
    written(tmp_path, {INDEX: index(**many)})
    found = refusal(tmp_path)
    assert "no model-00000-of-00012.safetensors" in found["got"]
    assert "and 4 more" in found["got"]


def test_a_tensor_in_two_files_of_a_list(tmp_path: Path) -> None:
    written(tmp_path, {A: SHARDS[A], B: SHARDS[A]})
    found = refusal([tmp_path / A, tmp_path / B])
    assert f"{tmp_path / B}: tensor 'a', which {tmp_path / A} has too" in found["got"]


# Mapping


def test_opening_costs_no_memory_whatever_the_size(tmp_path: Path) -> None:
    """More than this machine has, too: a writable mapping of that size needs MAP_NORESERVE."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for nbytes in (20 * 10**9, 4 * memory):
        path = sparse(tmp_path / f"{nbytes}.safetensors", nbytes)
        assert path.stat().st_blocks * 512 < 2**20
        before = resident()
        tensor = open_checkpoint(path).tensor("x")
        assert tensor.numel() * 4 == nbytes
        assert tensor[-1].item() == 0
        tensor[nbytes // 8] = 1.0
        assert resident() - before < 2**24
        path.unlink()


def test_no_address_space(tmp_path: Path) -> None:
    path = sparse(tmp_path / ONE, 20 * 10**9)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 10**9, hard))
    try:
        found = refusal(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert f"{path}: Cannot allocate memory on mapping it" in found["got"]
    assert "ulimit -v" in found["fix"]


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(100)}, tmp_path / ONE)
    before = (tmp_path / ONE).read_bytes()
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.tensor("x").fill_(1.0)
    assert checkpoint.tensor("x").eq(1).all()
    assert (tmp_path / ONE).read_bytes() == before
    assert open_checkpoint(tmp_path).tensor("x").eq(0).all()


def mappings(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_a_mapping_lives_as_long_as_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / ONE
    save_file({"x": torch.arange(1000), "y": torch.ones(3)}, path)
    checkpoint: Checkpoint | None = open_checkpoint(tmp_path)
    assert checkpoint is not None
    view, other = checkpoint.tensor("x")[1:3], checkpoint.tensor("y")
    assert mappings(path) == 1
    checkpoint = None
    gc.collect()
    assert view.tolist() == [1, 2]
    assert mappings(path) == 1
    del view, other
    gc.collect()
    assert mappings(path) == 0


def test_a_replaced_or_removed_file_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / ONE
    save_file({"x": torch.arange(1000)}, path)
    tensor = open_checkpoint(path).tensor("x")
    save_file({"x": torch.zeros(5)}, tmp_path / "other")
    os.replace(tmp_path / "other", path)
    assert torch.equal(tensor, torch.arange(1000))
    path.unlink()
    assert torch.equal(tensor, torch.arange(1000))


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / ONE
    save_file({"x": torch.arange(10000)}, path)
    checkpoint = open_checkpoint(path)
    os.truncate(path, 4096)
    for ask in (checkpoint.tensor, checkpoint.release):
        with pytest.raises(InvalidInputError) as caught:
            ask("x")
        assert f"{path} of 4096 bytes for tensor 'x'" in parts(caught.value)["got"]


@pytest.mark.parametrize("padding", range(8))
def test_tensors_at_any_address(tmp_path: Path, padding: int) -> None:
    """Writers need not pad the header: what is not aligned is copied."""
    fields = {"d": described(0, 16, "F64"), "b": described(16, 20, "BF16"), "u": described(20, 23, "U8")}
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8 + padding)
    written(tmp_path, {ONE: packed(text, bytes(range(23)))})
    checkpoint = open_checkpoint(tmp_path)
    for name, (start, stop) in {"d": (0, 16), "b": (16, 20), "u": (20, 23)}.items():
        tensor, entry = checkpoint.tensor(name), checkpoint.entry(name)
        assert tensor.view(torch.uint8).tolist() == list(range(start, stop))
        assert tensor.data_ptr() % entry.dtype.itemsize == 0
        assert entry.is_aligned == (padding % entry.dtype.itemsize == 0)
        shares = checkpoint.tensor(name).data_ptr() == tensor.data_ptr()
        assert shares == entry.is_aligned


def test_nothing_else_is_raised_for_any_prefix(tmp_path: Path) -> None:
    """A file cut at every byte: refused, each time, and never mapped."""
    save_file({"x": torch.arange(3), "y": torch.ones(2, 2)}, tmp_path / ONE)
    whole = (tmp_path / ONE).read_bytes()
    for size in range(len(whole)):
        (tmp_path / ONE).write_bytes(whole[:size])
        with pytest.raises(MoestroError) as caught:
            open_checkpoint(tmp_path)
        assert parts(caught.value)["fix"]
    (tmp_path / ONE).write_bytes(whole)
    with safe_open(tmp_path / ONE, "pt") as file:
        assert tuple(sorted(file.keys())) == open_checkpoint(tmp_path).names
