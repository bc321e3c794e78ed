"""Damaged files of every kind: opened as the safetensors library would, or refused in words; nothing else, ever."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from checkpoint.files import packed, parts, same_bits
from moestro.checkpoint import Checkpoint, open_checkpoint
from moestro.errors import MoestroError

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "ä.weight": torch.arange(8, dtype=torch.uint8),
    "e": torch.zeros(0, 2, dtype=torch.bfloat16),
    "s": torch.tensor(3, dtype=torch.int64),
}
SOUND = save(TENSORS, {"format": "pt"})
BEGIN = 8 + struct.unpack_from("<Q", SOUND)[0]
HEADER: dict[str, Any] = json.loads(SOUND[8:BEGIN])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.safetensors"


def opened(path: Path, data: bytes) -> Checkpoint | None:
    """The checkpoint, or None if it is refused in words."""
    path.unlink(missing_ok=True)  # mappings of the last one keep its bytes
    path.write_bytes(data)
    try:
        return open_checkpoint(path)
    except MoestroError as error:
        refusal = parts(error)["got"]
    assert str(path) in refusal
    return None


def compare_with_library(path: Path, checkpoint: Checkpoint | None) -> None:
    """What is opened is what the library opens: names, dtypes, shapes and bytes."""
    try:
        with safe_open(path, "pt") as file:
            theirs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except SafetensorError:
        theirs = None
    if checkpoint is not None:
        assert theirs is not None, "the library refuses what was opened"
        assert checkpoint.names == tuple(sorted(theirs))
        assert all(same_bits(checkpoint.tensor(name), tensor) for name, tensor in theirs.items())


def check(path: Path, data: bytes) -> None:
    compare_with_library(path, opened(path, data))


edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "set", "drop", "repeat", "insert"]),
        st.integers(0),
        st.integers(0),
        st.binary(max_size=9),
    ),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, changes: Sequence[tuple[str, int, int, bytes]], stop: int) -> bytes:
    """Changes of bits, bytes and stretches, all of them before `stop`."""
    for kind, position, amount, extra in changes:
        at = position % max(min(stop, len(data)), 1)
        length = amount % 9
        if kind == "flip" and data:
            data = data[:at] + bytes([data[at] ^ (1 << amount % 8)]) + data[at + 1 :]
        elif kind == "set" and data:
            data = data[:at] + bytes([amount % 256]) + data[at + 1 :]
        elif kind == "drop":
            data = data[:at] + data[at + length :]
        elif kind == "repeat":
            data = data[: at + length] + data[at:]
        else:
            data = data[:at] + extra + data[at:]
    return data


@settings(max_examples=600)
@given(edits)
def test_bytes_of_the_header(path: Path, changes: list[tuple[str, int, int, bytes]]) -> None:
    check(path, edited(SOUND, changes, BEGIN))


@settings(max_examples=100)
@given(edits)
def test_bytes_anywhere(path: Path, changes: list[tuple[str, int, int, bytes]]) -> None:
    check(path, edited(SOUND, changes, len(SOUND)))


@settings(max_examples=100)
@given(st.integers(0, len(SOUND) - 1), st.integers(0, 7))
def test_one_bit(path: Path, position: int, bit: int) -> None:
    """Of a tensor: nothing else about the file changes. Of the header: refused, or as the library reads it."""
    data = edited(SOUND, [("flip", position, bit, b"")], len(SOUND))
    checkpoint = opened(path, data)
    compare_with_library(path, checkpoint)
    if position >= BEGIN:
        assert checkpoint is not None
        for name, tensor in TENSORS.items():
            entry = checkpoint.entry(name)
            assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape))


sizes = st.sampled_from([-1, 0, 1, 2, 3, 8, 12, 24, 32, 48, 2**31, 2**32, 2**61, 2**63, 2**64 - 1, 2**64, 10**30])
odd = st.recursive(
    st.none() | st.booleans() | sizes | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
dtypes = st.sampled_from(["F32", "I64", "U8", "BF16", "BOOL", "F64", "F8_E4M3", "F4", "f32", ""]) | odd
shapes = st.lists(sizes, max_size=4) | odd
offsets = st.tuples(sizes, sizes).map(list) | odd
fields = st.fixed_dictionaries({}, optional={"dtype": dtypes, "shape": shapes, "data_offsets": offsets, "extra": odd})
headers = st.dictionaries(
    st.sampled_from([*TENSORS, "b", "__metadata__", ""]) | st.text(max_size=3),
    st.sampled_from(list(HEADER.values())) | fields | odd,
    max_size=5,
)


@settings(max_examples=400)
@given(headers | odd, st.booleans(), st.integers(0, 64))
def test_headers_of_any_values(path: Path, header: Any, sound: bool, size: int) -> None:
    """Over a sound header, or alone: JSON that no writer writes."""
    if sound and isinstance(header, dict):
        header = HEADER | header
    check(path, packed(header, SOUND[BEGIN:] if sound else bytes(size)))


@settings(max_examples=150)
@given(st.data())
def test_sound_headers_in_any_order(path: Path, data: st.DataObject) -> None:
    """Tensors laid out and listed in any order, at any alignment: opened, as the library does."""
    names = data.draw(st.lists(st.text(max_size=4).filter(lambda n: n != "__metadata__"), unique=True, max_size=6))
    header, stop = {}, 0
    for name in names:
        dtype, size = data.draw(st.sampled_from([("F32", 4), ("U8", 1), ("BF16", 2), ("I64", 8)]))
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        count = int(torch.Size(shape).numel())
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [stop, stop + size * count]}
        stop += size * count
    header = {name: header[name] for name in data.draw(st.permutations(names))}
    text = json.dumps(header).encode() + b" " * data.draw(st.integers(0, 8))
    checkpoint = opened(path, packed(text, bytes(i % 256 for i in range(stop))))
    assert checkpoint is not None
    assert checkpoint.names == tuple(sorted(names))
    for name in names:
        assert checkpoint.tensor(name).numel() == checkpoint.entry(name).nbytes // checkpoint.entry(name).dtype.itemsize
    compare_with_library(path, checkpoint)


@settings(max_examples=200)
@given(edits)
def test_bytes_of_an_index(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, int, int, bytes]]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed-index"
    folder.mkdir(exist_ok=True)
    (folder / "a").write_bytes(save({"x": torch.ones(2)}))
    (folder / "b").write_bytes(save({"y": torch.ones(2)}))
    text = json.dumps({"metadata": {"total_size": 16}, "weight_map": {"x": "a", "y": "b"}}).encode()
    (folder / "model.safetensors.index.json").write_bytes(edited(text, changes, len(text)))
    try:
        checkpoint = open_checkpoint(folder)
    except MoestroError as error:
        checkpoint, refusal = None, parts(error)["got"]
    if checkpoint is None:
        assert str(folder) in refusal
        return
    assert [checkpoint.entry(name).file.name for name in checkpoint.names] == ["a", "b"]
    assert checkpoint.names == ("x", "y")
