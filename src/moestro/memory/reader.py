"""Runs of bytes from files into memory, read by threads of the engine, past the page cache where that can be."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestro.errors import InvalidInputError, MoestroError, invalid_input, unsupported
from moestro.ops import native

OPERATION = "memory"
THREADS = 4
"""That read, unless somebody says otherwise."""
MOST_THREADS = 8

_OTHER = "another file in its place, or a file that was written to or cut"

Identity = tuple[int, int, int, int]
"""Of a file: device, inode, size in bytes, and when it was written to in nanoseconds."""


class ReadError(InvalidInputError):
    """Experts that cannot be read from their file."""


@dataclass(frozen=True)
class Run:
    """Bytes of one of a reader's files, and the address that they go to."""

    file: int
    offset: int
    length: int
    address: int


class Ticket:
    """A request that was submitted. Its memory is written to until `wait` returns or raises, or `drop` says True."""

    def __init__(self, reader: Reader, number: int, name: str) -> None:
        self._reader, self._number, self.name = reader, number, name

    def wait(self) -> None:
        """Return once all of it has been read.

        Raises:
            ReadError: the file was cut, written to, replaced or removed, or the system cannot read it; it names the
                file and what was to be read.
        """
        outcome, error, file, offset = self._reader.engine.wait(self._number)
        if outcome != "done":
            raise self._reader.failure(self.name, outcome, error, (file, offset))

    def settle(self) -> None:
        """Drop it, or wait until nothing is written any more; whether that failed is not said."""
        if not self.drop():
            self._reader.engine.wait(self._number)

    def hurry(self) -> None:
        """Have it read before what nobody waits for yet."""
        self._reader.engine.hurry(self._number)

    @property
    def has_ended(self) -> bool:
        """Whether `wait` would not wait."""
        ended: bool = self._reader.engine.has_ended(self._number)
        return ended

    def drop(self) -> bool:
        """Whether it had not begun, and now never will."""
        dropped: bool = self._reader.engine.drop(self._number)
        return dropped


class Reader:
    """Reads files past the page cache (O_DIRECT) where their filesystem takes that, and as usual where not.

    Args:
        threads: 1 to 8.
        direct: False to read through the page cache everywhere.

    Attributes:
        paths: the files, by their numbers.
        direct: whether every file is read past the page cache.

    Raises:
        InvalidInputError: another number of threads.
        UnsupportedError: an installation without the native engine.
    """

    def __init__(self, threads: int = THREADS, direct: bool = True) -> None:
        if not 1 <= threads <= MOST_THREADS:
            raise invalid_input(
                OPERATION, got=f"{threads} reading threads", needs=f"1 to {MOST_THREADS}", fix=f"Take {THREADS}."
            )
        if (missing := native.missing()) is not None:
            raise unsupported(
                OPERATION,
                got="experts that are read as they are needed, and no native engine",
                needs="its threads",
                fix=f"{missing[0].upper()}{missing[1:]}.",
            )
        self.threads, self.paths = threads, tuple[Path, ...]()
        self.direct, self._direct = True, direct
        self._kept: list[Any] = []
        try:
            self._reads = native.engine().Reads(threads)
        except (RuntimeError, MemoryError) as error:
            raise invalid_input(
                OPERATION,
                got=f"{threads} reading threads ({error})",
                needs="a system that starts them",
                fix="Raise its limits (`ulimit -u`, `ulimit -v`), or ask for fewer.",
            ) from error

    def keep(self, memory: Any) -> None:
        """Keep what is read into at least until no thread reads any more: a request may outlive who made it."""
        self._kept.append(memory)

    def __del__(self) -> None:
        self._reads = None  # which ends the threads, before the memory that they write to goes

    @property
    def engine(self) -> Any:
        """The threads of this process."""
        self.check_process()
        return self._reads

    def check_process(self) -> None:
        """Refuse a child that was forked: threads, and locks of the other threads, do not pass through a fork.

        Raises:
            UnsupportedError: so.
        """
        if not self._reads.is_here:
            raise unsupported(
                OPERATION,
                got="a process that was forked from the one that loaded the model",
                needs="the process whose threads read",
                fix="Load the model in each process.",
            )

    def add(self, path: Path, identity: Identity) -> int:
        """The number of a file, which has to stay what it was when its header was read.

        Raises:
            InvalidInputError: the system does not open it, or it is another file by now.
        """
        path = path.absolute()  # wherever the process goes later
        device, inode, size, modified = identity
        number: int = self.engine.open(str(path), device, inode, size, modified, self._direct)
        if number < 0:
            what = _OTHER if number == -errno.ESTALE else os.strerror(-number)
            raise self._changed(path, what, "its weights")
        self.paths = (*self.paths, path)
        self.direct &= self.engine.is_direct(number)
        return number

    @property
    def counts(self) -> dict[str, int]:
        """Since the start: requests, bytes that they asked for, bytes_from_files, system_calls that read, dropped."""
        found: dict[str, int] = self.engine.counts()
        return found

    def submit(self, runs: Sequence[Run], name: str, urgent: bool = True) -> Ticket:
        """Have runs read, those of demand before those of a guess; `name` says in errors what they are.

        Requests for the same memory, that a Ctrl-C left without anybody who waits for them, are dropped or waited for
        first.
        """
        given = [(run.file, run.offset, run.length, run.address) for run in runs]
        return Ticket(self, self.engine.submit(given, urgent), name)

    def failure(self, name: str, outcome: str, error: int, place: tuple[int, int]) -> MoestroError:
        """The error for a request that did not end well."""
        if outcome == "dropped":
            return invalid_input(
                OPERATION, got=f"a wait for {name}, which was dropped", needs="a request that stands", fix="Ask anew."
            )
        file, offset = place
        path = self.paths[file]
        reasons = {
            "system_error": f"{os.strerror(error)} at byte {offset}",
            "cut_off": f"its end at byte {offset}",
            "changed": _OTHER,
            "gone": "no file of its name any more",
        }
        return self._changed(path, reasons[outcome], name)

    def _changed(self, path: Path, what: str, name: str) -> MoestroError:
        error = invalid_input(
            OPERATION,
            got=f"{path}: {what}, on reading {name}",
            needs="the file as it was when the model was loaded",
            fix="Put the file back, or check its disk, and load the model again.",
        )
        return ReadError(str(error))
