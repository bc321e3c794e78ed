"""SHA-256 of every tensor of a checkpoint, written beside its files and compared with them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from moestro.checkpoint.header import Entry, damaged, identity, read_object, reading, shown
from moestro.checkpoint.write import replace_text
from moestro.errors import InvalidInputError, invalid_input

CHECKSUMS = "moestro-checksums.json"
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
    """What `write_checksums` wrote in a folder; None if there is nothing."""
    path = folder / CHECKSUMS
    if not path.is_symlink() and not path.exists():
        return None
    found = read_object(path, "checksums")
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
        raise mismatch(path, f"no checksums of {path.name} in {CHECKSUMS}", "those of every file")
    names, listed = {entry.name for entry in entries}, sums[path.name].keys()
    if names != listed:
        name = min(names ^ listed)
        got = f"tensor {shown(name)} {'without a checksum' if name in names else 'missing'}"
        raise mismatch(path, got, f"the tensors that {CHECKSUMS} lists")


def mismatch(path: Path, got: str, needs: str) -> InvalidInputError:
    """The error for a file that is not what its checksums say."""
    fix = "The checkpoint has changed since its checksums were written: download or make it again."
    return invalid_input("Checkpoint.verify", got=f"{path}: {got}", needs=needs, fix=fix)


def digests(
    entries: Sequence[Entry], files: Mapping[Path, tuple[int, int, int, int]], on_progress: Progress | None = None
) -> Iterator[tuple[Entry, str]]:
    """Read every tensor once; SHA-256 of each, in the order given, on `torch.get_num_threads()` threads.

    `files` has the `identity` of each file when its header was read: one that changed since is refused.
    """
    total = sum(entry.nbytes for entry in entries)
    done, lock = 0, threading.Lock()

    def digest(entry: Entry) -> str:
        nonlocal done
        found = hashlib.sha256()
        for chunk in _chunks(entry, files[entry.file]):
            found.update(chunk)
            with lock:
                done += len(chunk)
                if on_progress is not None:
                    on_progress(done, total)
        return found.hexdigest()

    with ThreadPoolExecutor(torch.get_num_threads(), "moestro-sha256") as pool:
        yield from zip(entries, pool.map(digest, entries), strict=True)


def _chunks(entry: Entry, expected: tuple[int, int, int, int]) -> Iterator[memoryview]:
    """A tensor's bytes, a few MiB at a time; each chunk until the next is asked for."""
    buffer, left = memoryview(bytearray(min(entry.nbytes, _CHUNK_BYTES))), entry.nbytes
    with reading(entry.file) as file:
        if identity(file) != expected:
            raise mismatch(entry.file, "a file that changed after it was opened", "one that stays as it is")
        file.seek(entry.start)
        while left:
            nbytes: int = file.readinto(buffer[:left])  # type: ignore[attr-defined]
            if not nbytes:
                raise mismatch(entry.file, f"its end {left} bytes early", "a file that stays as it is")
            yield buffer[:nbytes]
            left -= nbytes
