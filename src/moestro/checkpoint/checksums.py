"""SHA-256 of every tensor of a checkpoint, written beside its files and compared with them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch

from moestro.checkpoint.header import Entry, damaged, identity, open_file, parse_object, shown, unreadable
from moestro.checkpoint.replace import replace_text
from moestro.errors import InvalidInputError, invalid_input

CHECKSUMS = "moestro-checksums.json"
VERIFY = "Checkpoint.verify"
Progress = Callable[[int, int], object]
"""Called with the bytes done and the bytes in all: on worker threads, one call at a time."""
Sums = Mapping[str, Mapping[str, str]]
"""File name -> tensor name -> SHA-256 of the tensor's bytes, in lower-case hexadecimal."""

_CHUNK_BYTES = 1 << 22
_SHA256 = re.compile("[0-9a-f]{64}")


def write_checksums(folder: Path, sums: Sums) -> Path:
    """Write `moestro-checksums.json`, whole or not at all.

    Args:
        folder: that of the checkpoint's files.
        sums: file name -> tensor name -> SHA-256, as `write_file` and `Checkpoint.checksums` return them.

    Raises:
        InvalidInputError: it cannot be written.
    """
    return replace_text(folder / CHECKSUMS, json.dumps(sums, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def read_checksums(folder: Path) -> dict[str, dict[str, str]] | None:
    """What `write_checksums` wrote in a folder; None if there is nothing.

    Raises:
        InvalidInputError: the file is not one of checksums, or cannot be read.
    """
    path = folder / CHECKSUMS
    if not path.is_symlink() and not path.exists():
        return None
    with open_file(path) as file:
        try:
            text = file.read()
        except OSError as error:
            raise unreadable(path, error) from error
    found = parse_object(text, path, "checksums")
    for name, sums in found.items():
        if not isinstance(sums, dict):
            raise damaged(path, f"{shown(str(sums))} for {shown(name)}", "SHA-256 by tensor for every file")
        for tensor, value in sums.items():
            if not isinstance(value, str) or not _SHA256.fullmatch(value):
                raise damaged(path, f"{shown(str(value))} for tensor {shown(tensor)}", "SHA-256 in hexadecimal")
    return found


def compare_names(path: Path, entries: Sequence[Entry], sums: Sums) -> None:
    """Raise unless a file and its checksums list the same tensors."""
    if path.name not in sums:
        raise _mismatch(path, f"no checksums of {path.name} in {CHECKSUMS}", "those of every file")
    names, listed = {entry.name for entry in entries}, sums[path.name].keys()
    if names != listed:
        name = min(names ^ listed)
        got = f"tensor {shown(name)} {'without a checksum' if name in names else 'missing'}"
        raise _mismatch(path, got, f"the tensors that {CHECKSUMS} lists")


def compare(entry: Entry, found: str, expected: str) -> None:
    """Raise unless a tensor's SHA-256 is the expected one."""
    if found != expected:
        got = f"tensor {shown(entry.name)} with SHA-256 {found}"
        raise _mismatch(entry.file, got, f"{expected}, as {CHECKSUMS} says")


def missing_file(folder: Path, name: str) -> InvalidInputError:
    """The error for checksums of a file that is not part of the checkpoint."""
    return _mismatch(folder / name, f"checksums of a file that the checkpoint in {folder} does not have", "the file")


def _mismatch(path: Path, got: str, needs: str) -> InvalidInputError:
    fix = "The checkpoint has changed since its checksums were written: download or make it again."
    return invalid_input(VERIFY, got=f"{path}: {got}", needs=needs, fix=fix)


def digests(
    entries: Sequence[Entry], files: Mapping[Path, tuple[int, int, int, int]], on_progress: Progress | None = None
) -> Iterator[tuple[Entry, str]]:
    """Read every tensor once; SHA-256 of each, in the order given, on `torch.get_num_threads()` threads.

    Args:
        entries: the tensors.
        files: the `identity` of each file when its header was read.
        on_progress: called after every few MiB.

    Raises:
        InvalidInputError: a file was replaced or changed, or cannot be read.
    """
    total = sum(entry.nbytes for entry in entries)
    done, lock = 0, threading.Lock()

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            if on_progress is not None:
                on_progress(done, total)

    with ThreadPoolExecutor(torch.get_num_threads(), "moestro-sha256") as pool:
        yield from zip(entries, pool.map(lambda entry: _digest(entry, files[entry.file], count), entries), strict=True)


def _digest(entry: Entry, expected: tuple[int, int, int, int], count: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(entry.nbytes, _CHUNK_BYTES)))
    left = entry.nbytes
    with open_file(entry.file) as file:
        if identity(file) != expected:
            raise _mismatch(entry.file, "a file that changed after it was opened", "one that stays as it is")
        file.seek(entry.start)
        while left:
            nbytes = _read(file, buffer[:left], entry.file)
            if not nbytes:
                raise _mismatch(entry.file, f"its end {left} bytes early", "a file that stays as it is")
            digest.update(buffer[:nbytes])
            left -= nbytes
            count(nbytes)
    return digest.hexdigest()


def _read(file: BinaryIO, buffer: memoryview, path: Path) -> int:
    try:
        return int(file.readinto(buffer))  # type: ignore[attr-defined]
    except OSError as error:
        raise unreadable(path, error) from error
