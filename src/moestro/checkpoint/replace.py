"""Files that appear under their name whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from moestro.errors import InvalidInputError, invalid_input

PARTIAL = ".partial"
WRITE = "write_file"


class Output:
    """A file being written, which says in words what stops it."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file

    def write(self, data: bytes | memoryview) -> None:
        with explained(self._path):
            self._file.write(data)

    def write_at(self, position: int, data: bytes | memoryview) -> None:
        """Write from this byte on; what no write reaches is zero."""
        with explained(self._path):
            self._file.seek(position)
            self._file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[Output]:
    """A file to write, which takes its name only when the block ends: on disk by then, its folder's entry too.

    Until then it is ``path + ".partial"``. If the block raises, that is removed, and what had the name keeps it; if the
    process is killed, it stays, and the next one to write the file overwrites it.

    Raises:
        InvalidInputError: the system does not let it be written: no folder, no permission, no space.
    """
    partial = path.with_name(path.name + PARTIAL)
    with explained(path):
        file = open(partial, "wb", opener=_open_no_link)  # noqa: SIM115 (closed below, where closing can fail too)
    try:
        try:
            yield Output(path, file)
            with explained(path):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with explained(path):
                file.close()
        with explained(path):
            os.replace(partial, path)
            _sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _open_no_link(path: str, flags: int) -> int:
    """Open a file, but not what a link of its name leads to."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def replace_text(path: Path, text: str) -> Path:
    """Write a small text file in UTF-8, whole or not at all; returns its path. Errors as for `replacing`."""
    with replacing(path) as file:
        file.write(text.encode())
    return path


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Errors of the system inside the block, as moestro's own."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InvalidInputError:
    return invalid_input(
        WRITE,
        got=f"{path}: {error.strerror or error}",
        needs="a folder that can be written to, with space for the file",
        fix="Free space on the disk, or write elsewhere; nothing was left under the file's name.",
    )
