"""Open a checkpoint of safetensors files: every header checked before anything is read, every tensor memory-mapped."""

from __future__ import annotations

import mmap
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from moestro.checkpoint.checksums import CHECKSUMS, Progress, compare_names, digests, mismatch, read_checksums
from moestro.checkpoint.header import (
    DOWNLOAD_AGAIN,
    OPEN,
    Entry,
    damaged,
    identity,
    read_header,
    read_object,
    reading,
    shown,
    unreadable,
)
from moestro.checkpoint.write import INDEX, SINGLE
from moestro.errors import InvalidInputError, invalid_input

# Without a reservation, a private mapping may be larger than the memory (Linux refuses it otherwise). Python names the
# flag from 3.13 on; the number is that of Linux on x86 and ARM.
_IS_KNOWN = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux, which Python's mmap does not name."""
_LARGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_NO_LARGE_PAGES: int | None = getattr(mmap, "MADV_NOHUGEPAGE", None)
_PIECE = 16 << 20
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if _IS_KNOWN else 0)


@dataclass(frozen=True, eq=False)
class _File:
    """A file whose header has been checked, and its mapping."""

    path: Path
    entries: tuple[Entry, ...]
    identity: tuple[int, int, int, int]
    mapping: mmap.mmap


class Checkpoint:
    """The tensors of one or several safetensors files, memory-mapped. `open_checkpoint` makes one.

    Its tensors share memory with the files' private mappings: a tensor's bytes are read from disk when they are
    touched, and what is written to a tensor stays in this process. A mapping lives as long as the checkpoint or one of
    its tensors does; there is nothing to close. While it lives, its file may be renamed, removed or replaced, but must
    not be written to or cut: what is touched beyond a cut kills the process (SIGBUS), which no library can catch.

    Attributes:
        names: every tensor's name, sorted.
        files: the files, in the order given, or sorted by name.
        location: the folder of the first file.
        nbytes: bytes of all tensors.
    """

    def __init__(self, files: Sequence[_File], entries: Mapping[str, Entry], is_folder: bool) -> None:
        self._files = {file.path: file for file in files}
        self._entries = dict(entries)
        self._is_folder = is_folder
        self.names: tuple[str, ...] = tuple(sorted(self._entries))
        self.files: tuple[Path, ...] = tuple(self._files)
        self.location: Path = self.files[0].parent
        self.nbytes: int = sum(entry.nbytes for entry in self._entries.values())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.location)!r}: {len(self.names)} tensors, {self.nbytes} bytes)"

    @property
    def identities(self) -> dict[Path, tuple[int, int, int, int]]:
        """Of each file what it was when it was opened: device, inode, size, and when it was last written to."""
        return {path: file.identity for path, file in self._files.items()}

    def entry(self, name: str) -> Entry:
        """Dtype, shape and place of a tensor.

        Raises:
            InvalidInputError: no tensor of this name.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise invalid_input(
                "Checkpoint.entry",
                got=f"the name {shown(name)}",
                needs=f"one of the {len(self.names)} tensors in {self.location}",
                fix="Print checkpoint.names.",
            )
        return entry

    def tensor(self, name: str) -> Tensor:
        """A tensor on the CPU that shares memory with the file's mapping: nothing is read until it is touched.

        Files of other writers may place a tensor at an address that its dtype does not allow (`Entry.is_aligned`); such
        a tensor is read and copied.

        Raises:
            InvalidInputError: no tensor of this name, or a file that was cut after it was opened.
        """
        entry = self.entry(name)
        mapping = self._mapping(entry)
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        if entry.is_aligned:
            count = entry.nbytes // entry.dtype.itemsize
            return torch.frombuffer(mapping, dtype=entry.dtype, count=count, offset=entry.start).view(entry.shape)
        data = torch.frombuffer(mapping, dtype=torch.uint8, count=entry.nbytes, offset=entry.start)
        return data.clone().view(entry.dtype).view(entry.shape)

    def release(self, name: str) -> None:
        """Give the memory that a tensor's pages take up in this process back to the system.

        For tensors that have been read and are not needed soon: the pages are mapped again when they are touched. What
        was written to the tensor is lost.

        Raises:
            InvalidInputError: as for `tensor`.
        """
        entry = self.entry(name)
        # Pages that other tensors share are left alone.
        start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = entry.stop // mmap.PAGESIZE * mmap.PAGESIZE - start
        if nbytes > 0:
            self._mapping(entry).madvise(mmap.MADV_DONTNEED, start, nbytes)

    def fetch(self, name: str) -> Iterator[int]:
        """Have a tensor's pages mapped into this process before it is read, piece by piece; yields the bytes of each.

        What the system does not have in its cache is read from the file, into large pages where the file system has
        them. Nothing is fetched where the system cannot (before Linux 5.14, or elsewhere).

        Raises:
            InvalidInputError: as for `tensor`.
        """
        entry = self.entry(name)
        if not entry.nbytes:
            return
        start, mapping = entry.start // mmap.PAGESIZE * mmap.PAGESIZE, self._mapping(entry)
        # Only here, where all of it is wanted: from then on a page that is missing is read with up to 4 MB around it.
        _advise(mapping, _LARGE_PAGES, start, entry.stop - start)
        for at in range(start, entry.stop, _PIECE):
            nbytes = min(_PIECE, entry.stop - at)
            try:
                mapping.madvise(_POPULATE_READ, at, nbytes)
            except OSError:
                return _advise(mapping, _NO_LARGE_PAGES, start, entry.stop - start)
            yield nbytes

    def _mapping(self, entry: Entry) -> mmap.mmap:
        mapping = self._files[entry.file].mapping
        if mapping.size() != len(mapping):
            raise invalid_input(
                "Checkpoint.tensor",
                got=f"{entry.file} of {mapping.size()} bytes for tensor {shown(entry.name)}",
                needs=f"the {len(mapping)} bytes it had when it was opened",
                fix="Leave open files alone: write beside them and rename, as write_file does.",
            )
        return mapping

    def checksums(self, on_progress: Progress | None = None) -> dict[str, dict[str, str]]:
        """SHA-256 of every tensor's bytes, by file name and tensor name; reads all of them, for `write_checksums`.

        `on_progress` is called with (bytes done, bytes in all), on worker threads, one call at a time.

        Raises:
            InvalidInputError: a file changed after it was opened, or cannot be read.
        """
        sums: dict[str, dict[str, str]] = {path.name: {} for path in self.files}
        for entry, found in self._digests(on_progress):
            sums[entry.file.name][entry.name] = found
        return sums

    def verify(self, on_progress: Progress | None = None) -> bool:
        """Compare every tensor's bytes with the `moestro-checksums.json` beside its file.

        Reads every tensor once, on `torch.get_num_threads()` threads; `on_progress` as for `checksums`.

        Returns:
            True if all agree; False if there are no checksums, and nothing was read.

        Raises:
            InvalidInputError: a tensor, or the list of them, is not what the checksums say, or cannot be read.
        """
        folders = sorted({path.parent for path in self.files})
        sums = {folder: listed for folder in folders if (listed := read_checksums(folder)) is not None}
        if not sums:
            return False
        if self._is_folder and (missing := sums[self.location].keys() - {path.name for path in self.files}):
            path = self.location / min(missing)
            raise mismatch(path, f"checksums of a file that the checkpoint in {self.location} does not have", "it")
        for file in self._files.values():
            compare_names(file.path, file.entries, sums.get(file.path.parent, {}))
        for entry, found in self._digests(on_progress):
            expected = sums[entry.file.parent][entry.file.name][entry.name]
            if found != expected:
                got = f"tensor {shown(entry.name)} with SHA-256 {found}"
                raise mismatch(entry.file, got, f"{expected}, as {CHECKSUMS} says")
        return True

    def _digests(self, on_progress: Progress | None) -> Iterator[tuple[Entry, str]]:
        files = self._files.values()
        entries = [entry for file in files for entry in file.entries]
        return digests(entries, {file.path: file.identity for file in files}, on_progress)


def open_checkpoint(source: Path | str | Sequence[Path | str]) -> Checkpoint:
    """Open a checkpoint, and check all that can be checked without reading its tensors.

    Args:
        source: a folder with `model.safetensors`, or with `model.safetensors.index.json` and the files it names; one
            safetensors file; or several.

    Raises:
        InvalidInputError: no checkpoint, a file that is cut off or damaged, an index that does not fit the files, a
            tensor in two files. The error names the file, and the tensor where it is about one.
        UnsupportedError: a tensor of a dtype of less than a byte.
    """
    paths = [Path(source)] if isinstance(source, str | Path) else [Path(path) for path in source]
    if not paths:
        raise invalid_input(OPEN, got="no files", needs="a folder, or at least one file", fix="Name the checkpoint.")
    folder = paths[0] if isinstance(source, str | Path) and os.path.isdir(paths[0]) else None
    weight_map = None
    if folder is not None:
        paths, weight_map = _files_of(folder)
    files = [_open(path) for path in paths]
    entries: dict[str, Entry] = {}
    for file in files:
        for entry in file.entries:
            if entry.name in entries:
                got = f"tensor {shown(entry.name)}, which {entries[entry.name].file} has too"
                raise damaged(file.path, got, "each tensor in one file", "Remove the file that is not of this model.")
            entries[entry.name] = entry
    if folder is not None and weight_map is not None:
        _compare_index(folder / INDEX, weight_map, entries)
    return Checkpoint(files, entries, is_folder=folder is not None)


def _open(path: Path) -> _File:
    with reading(path) as file:
        identified = identity(file)
        size = identified[2]
        return _File(path, read_header(path, file, size), identified, _mapped(path, file, size))


def _advise(mapping: mmap.mmap, advice: int | None, start: int, nbytes: int) -> None:
    if advice is not None:
        with suppress(OSError):  # a system built without large pages
            mapping.madvise(advice, start, nbytes)


def _mapped(path: Path, file: BinaryIO, size: int) -> mmap.mmap:
    flags, access = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    try:
        return mmap.mmap(file.fileno(), size, flags=flags, prot=access)
    except OSError as error:
        fix = "Raise `ulimit -v`, set vm.overcommit_memory to 0, or copy the file to a disk whose files can be mapped."
        raise damaged(path, f"{error.strerror} on mapping it", f"{size} bytes of address space", fix) from error


def _files_of(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files of a checkpoint, and its index if it has one."""
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error
    if INDEX not in names:
        if SINGLE not in names:
            raise _no_checkpoint(folder, names)
        return [folder / SINGLE], None
    weight_map = _read_index(folder / INDEX)
    shards = sorted(set(weight_map.values()))
    if SINGLE in names and SINGLE not in shards:
        got = f"both {SINGLE} and {INDEX}, which does not name it"
        raise damaged(folder, got, "one of them", "Remove the one that is out of date.")
    if missing := [shard for shard in shards if shard not in names]:
        lost = sorted(name for name, shard in weight_map.items() if shard in missing)
        got = f"no {', '.join(missing[:8])}{f' and {len(missing) - 8} more' if len(missing) > 8 else ''}"
        needs = f"every file that {INDEX} names: {len(lost)} tensors are in those, {shown(lost[0])} the first"
        raise damaged(folder, got, needs, "Download the missing files.")
    return [folder / shard for shard in shards], weight_map


def _no_checkpoint(folder: Path, names: set[str]) -> InvalidInputError:
    found = sorted(
        name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".partial"))
    )
    got = f"neither {SINGLE} nor {INDEX}{', but ' + ', '.join(found[:8]) if found else ''}"
    fix = "Check the path; pass safetensors files of other names as a list; save other formats as safetensors."
    return damaged(folder, got, "one of them", fix)


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_object(path, "an index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(path, f"weight_map {shown(str(weight_map))}", "a file's name for each tensor")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.isprintable() or shard != os.path.basename(shard) or not shard:
            got = f"tensor {shown(name)} in {shown(str(shard))}"
            raise damaged(path, got, "the name of a file in the same folder")
    return weight_map


def _compare_index(path: Path, weight_map: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    for name, shard in weight_map.items():
        entry = entries.get(name)
        if entry is None or entry.file.name != shard:
            where = "no file has it" if entry is None else f"it is in {entry.file.name}"
            raise damaged(path, f"tensor {shown(name)} in {shard}, but {where}", "the file that holds each tensor")
    if unlisted := entries.keys() - weight_map.keys():
        entry = entries[min(unlisted)]
        got = f"no tensor {shown(entry.name)}, which is in {entry.file.name} ({len(unlisted)} such)"
        raise damaged(path, got, "every tensor of its files", f"{DOWNLOAD_AGAIN[:-1]}, or write its index anew.")
