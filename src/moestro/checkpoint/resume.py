"""A folder that is written beside its place, continued where an earlier run stopped, and renamed when complete."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moestro.checkpoint.header import read_object
from moestro.checkpoint.scheme import OPERATION
from moestro.checkpoint.write import PARTIAL, explained, sync_folder
from moestro.errors import invalid_input

RECORD = "moestro-quantize.json"
"""What a folder was made of and how; stays in it."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

_FOLLOWS = ("configuration", "tensors", "shards")

Record = Mapping[str, Any]
"""Plain values; `shards` maps the name of each shard to its size in bytes."""


def followed(folder: Path) -> Path:
    """A folder by a name that can be given to another one: not by a link to it, "." or ".."."""
    return folder.resolve() if folder.is_symlink() or folder.name in ("", "..") else folder


def partial_folder(folder: Path) -> Path:
    """Where the folder is while it is incomplete."""
    place = followed(folder)
    return place.with_name(place.name + PARTIAL)


def is_complete(folder: Path, record: Record) -> bool:
    """Whether an earlier run made the whole folder from the same record; an error if it holds anything else."""
    found = _finished(folder, record)
    lost = [] if found is None else [name for name in record["shards"] if name not in found]
    if lost:
        raise invalid_input(
            OPERATION,
            got=f"{folder / lost[0]}, missing or cut, which was complete",
            needs=f"the {record['shards'][lost[0]]} bytes that were written",
            fix="Delete the folder and run again.",
        )
    return found is not None


def _finished(folder: Path, record: Record, begun: Collection[str] = ()) -> frozenset[str] | None:
    """Which shards in a folder are complete; None where it holds nothing, or only what has `begun`."""
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if there <= {*begun}:
        return None
    if RECORD not in there:
        raise invalid_input(
            OPERATION,
            got=f"{folder}, which exists and is not the result of such a run",
            needs="a folder that does not exist, or an empty one",
            fix="Name another folder, or delete that one.",
        )
    _check_same(folder, record)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    return frozenset(name for name, size in record["shards"].items() if sizes.get(name) == size)


def _check_same(folder: Path, record: Record) -> None:
    there = read_object(folder / RECORD, "a record", f"Delete {folder}.")
    if there != record:
        raise invalid_input(
            OPERATION,
            got=f"{folder}, begun with something else: {'; '.join(_differences(there, record))}",
            needs="the same source and options as when it was begun, or another folder",
            fix=f"Repeat that command to continue it, name another folder, or delete {folder}.",
        )


def _differences(there: Record, here: Record) -> list[str]:
    """What is not the same; of what follows from the rest, only where nothing else is named."""
    found = {}
    for key in dict.fromkeys([*here, *there]):
        before, now = there.get(key), here.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            names = [n for n in dict.fromkeys([*before, *now]) if before.get(n) != now.get(n)]
            text = f"other {key} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        else:  # a hash says nothing
            text = f"other {key}" if key in _FOLLOWS else f"{key} was {before}, now {now}"
        if before != now:
            found[key] = text
    return [text for key, text in found.items() if key not in _FOLLOWS] or list(found.values())


@contextmanager
def open_partial(destination: Path, record: Record) -> Iterator[tuple[Path, frozenset[str]]]:
    """The incomplete folder of a destination, made or continued, and the shards in it that are complete.

    Nobody else can open it meanwhile. It goes again if nothing is written. One that was begun with another record, is
    not such a folder, or holds a link, is refused.
    """
    path = partial_folder(destination)
    link = next((found for found in (path, *path.rglob("*")) if found.is_symlink()), None)
    if link is not None:  # moestro makes none: what is written must lie in the folder
        raise invalid_input(
            OPERATION,
            got=f"{link}, a link to {link.resolve()}",
            needs="a place of its own for the result while it is incomplete",
            fix="Delete the link, or name another folder.",
        )
    with explained(path):
        path.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        try:
            finished = _finished(path, record, begun=[RECORD + PARTIAL])
            for cut in path.rglob("*" + PARTIAL):
                if not cut.is_dir():
                    cut.unlink()
            yield path, finished or frozenset()
        finally:
            with suppress(OSError):
                path.rmdir()


def commit(path: Path, destination: Path) -> None:
    """Put an incomplete folder, complete now, in its place."""
    # The files are on the disk since they have their names.
    for folder in (path, *filter(Path.is_dir, path.rglob("*"))):
        sync_folder(folder)
    with explained(destination):
        path.rename(destination)
        sync_folder(destination.parent)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDONLY)
    try:
        busy = False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            busy = error.errno not in _NO_LOCKS
        try:  # another run may have renamed its folder meanwhile
            busy = busy or not os.path.samestat(os.fstat(handle), path.stat())
        except FileNotFoundError:
            busy = True
        if busy:
            got = f"{path}, which another run is writing"
            raise invalid_input(OPERATION, got=got, needs="one run at a time", fix="Wait for the other run.")
        yield
    finally:
        os.close(handle)
