"""A folder that is written beside its place, continued where an earlier run stopped, and renamed when complete."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestro.checkpoint.replace import PARTIAL, explained, replace_text
from moestro.errors import InvalidInputError, invalid_input

RECORD = "moestro-quantize.json"
"""What a folder was made of and how; stays in it."""

JOURNAL = "moestro-quantize.journal"
"""The finished shards with the checksums of their tensors; goes when the folder is complete."""

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
    """Whether an earlier run made the whole folder from the same record.

    Raises:
        InvalidInputError: the folder holds anything else, or a shard of it is missing or cut.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not (folder / RECORD).is_file():
        raise invalid_input(
            "quantize",
            got=f"{folder}, which exists and is not the result of an earlier run",
            needs="a folder that does not exist, or an empty one",
            fix="Name another folder.",
        )
    _check_same(folder, record)
    for name, size in record["shards"].items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            raise invalid_input(
                "quantize",
                got=f"{folder / name}, {'missing' if found is None else f'{found} bytes'}, which was complete",
                needs=f"the {size} bytes that were written",
                fix="Delete the folder and run again.",
            )
    if (folder / JOURNAL).exists():  # a disk that may not be written to refuses to remove even what is not there
        (folder / JOURNAL).unlink()
    return True


def _check_same(folder: Path, record: Record) -> None:
    there = _read(folder / RECORD)
    if there != record:
        raise invalid_input(
            "quantize",
            got=f"{folder}, begun with something else: {'; '.join(_differences(there, record))}",
            needs="the same source and options as when it was begun, or another folder",
            fix=f"Repeat that command to continue it, name another folder, or delete {folder}.",
        )


def _differences(there: Record, here: Record) -> list[str]:
    """What is not the same; of what follows from the rest, only where nothing else is named."""
    differing = [key for key in dict.fromkeys([*here, *there]) if there.get(key) != here.get(key)]
    found = {key: _difference(key, there.get(key), here.get(key)) for key in differing}
    return [text for key, text in found.items() if key not in _FOLLOWS] or list(found.values())


def _difference(key: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        names = [n for n in dict.fromkeys([*before, *now]) if before.get(n) != now.get(n)]
        return f"other {key} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
    if key in _FOLLOWS:  # a hash of it says nothing
        return f"other {key}"
    return f"{key} was {before}, now {now}"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(found, dict):
        raise _damaged(path, "no JSON object")
    return found


def _as_text(value: Any) -> str:
    """Plain values as the text of a JSON file."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _damaged(path: Path, reason: str) -> InvalidInputError:
    return invalid_input(
        "quantize", got=f"{path}, damaged ({reason})", needs="it as it was written", fix=f"Delete {path.parent}."
    )


@dataclass(frozen=True)
class PartialFolder:
    """An incomplete folder that this process alone writes.

    Attributes:
        path: where it is now.
        destination: where it goes when complete.
        record: what it is made of.
        finished: the shards that are complete, each with the SHA-256 of its tensors.
    """

    path: Path
    destination: Path
    record: Record
    finished: dict[str, dict[str, str]]

    def begin(self) -> None:
        """Write the record, unless an earlier run did."""
        if not (self.path / RECORD).exists():
            replace_text(self.path / RECORD, _as_text(self.record))

    def finish(self, shard: str, sums: Mapping[str, str]) -> None:
        """Note that a shard is complete and in place."""
        self.finished[shard] = dict(sums)
        replace_text(self.path / JOURNAL, _as_text(self.finished))

    def commit(self) -> None:
        """Put the folder, complete now, in its place."""
        for path in (*self.path.rglob("*"), self.path):
            if path.is_dir():  # the files are on the disk since they have their names
                _sync(path)
        with explained(self.destination):
            self.path.rename(self.destination)
            _sync(self.destination.parent)
        (self.destination / JOURNAL).unlink(missing_ok=True)


@contextmanager
def open_partial(destination: Path, record: Record) -> Iterator[PartialFolder]:
    """The incomplete folder of a destination, made or continued; nobody else can open it meanwhile.

    Raises:
        InvalidInputError: it was begun with another record, is not such a folder, is or holds a link, cannot be
            written, or is open.
    """
    path = partial_folder(destination)
    _check_no_links(path)
    with explained(path):
        path.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        try:
            yield PartialFolder(path, destination, record, _finished(path, record))
        finally:
            with suppress(OSError):  # goes if nothing was written
                path.rmdir()


def _check_no_links(path: Path) -> None:
    """Refuse links where moestro makes none: what is written must lie in the folder."""
    link = next((found for found in (path, *path.rglob("*")) if found.is_symlink()), None)
    if link is not None:
        raise invalid_input(
            "quantize",
            got=f"{link}, a link to {link.resolve()}",
            needs="a place of its own for the result while it is incomplete",
            fix="Delete the link, or name another folder.",
        )


def _finished(path: Path, record: Record) -> dict[str, dict[str, str]]:
    """Say which shards are complete, and clear away what was cut off; what another wrote is left alone."""
    if not (path / RECORD).exists():
        first = path / (RECORD + PARTIAL)
        if any(found != first for found in path.iterdir()):
            raise invalid_input(
                "quantize",
                got=f"{path}, which exists and is not an unfinished result",
                needs="that name for the result while it is incomplete",
                fix="Name another folder, or delete that one.",
            )
        first.unlink(missing_ok=True)
        return {}
    _check_same(path, record)
    for cut in path.rglob("*" + PARTIAL):
        if not cut.is_dir():
            cut.unlink()
    if not (path / JOURNAL).exists():
        return {}
    found = _read(path / JOURNAL)
    sizes = record["shards"]
    return {name: sums for name, sums in found.items() if _size(path / name) == sizes.get(name)}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise _busy(path) from None
        if not path.exists() or not os.path.samestat(os.fstat(handle), path.stat()):
            raise _busy(path)
        yield
    finally:
        os.close(handle)


def _busy(path: Path) -> InvalidInputError:
    return invalid_input(
        "quantize",
        got=f"{path}, which another run is writing",
        needs="one run at a time",
        fix="Wait for the other run.",
    )


def _sync(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
