"""How much of a mapped model stays in this process's memory."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress

from torch import Tensor

from moestro.checkpoint import Checkpoint
from moestro.errors import MoestroError
from moestro.machine import memory_bytes

SHARE = 0.75
"""Of the memory this process may hold: while it takes up more, layers give their mapped pages back after their use."""

LEAST_FETCHED = 1 << 30
"""Bytes of experts from which on pages are mapped ahead of their use; fewer are touched in hundredths of a second."""

LOOK_SECONDS = 0.02
"""While a process takes up less than its share, it is asked how much that is once in so many seconds: a token passes
through a layer in a few thousandths, of which asking takes a hundredth."""

_STATM = "/proc/self/statm"


class Residency:
    """Gives the pages of mapped experts back to the system while the process takes up more than its share.

    The system keeps pages that were given back in its cache as long as nobody needs the memory, and maps them again
    when they are touched; what is bounded is what this process holds. Layers run in turn, so the one that has just run
    is the one that will be needed last. Where the system does not say what a process takes up, nothing is given back.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._limit = int(SHARE * memory_bytes() / os.sysconf("SC_PAGE_SIZE")) if _is_measurable() else None
        self._last: Mapping[str, Tensor] = {}
        self._next_look = 0.0

    def fetch(self, names: Iterable[str]) -> threading.Thread | None:
        """Have the pages of these tensors mapped by a thread, so that the first tokens do not wait for each of them.

        Nothing happens, and None is returned, where they are few, or come with what the process holds to more than
        its share.
        """
        names = list(names)
        nbytes = sum(self._checkpoint.entry(name).nbytes for name in names)
        pages = nbytes // os.sysconf("SC_PAGE_SIZE")
        if nbytes < LEAST_FETCHED or self._limit is None or _resident_pages() + pages > self._limit:
            return None
        thread = threading.Thread(target=_fetch, args=(weakref.ref(self._checkpoint), names), daemon=True)
        thread.start()
        return thread

    def turn_to(self, tensors: Mapping[str, Tensor]) -> None:
        """Tell that a layer's tensors are used next."""
        last, self._last = self._last, tensors
        if last is tensors or self._limit is None or time.monotonic() < self._next_look:
            return
        if _resident_pages() <= self._limit:
            self._next_look = time.monotonic() + LOOK_SECONDS
            return
        for name, tensor in last.items():
            if tensor._version == 0:  # what was written to a mapped tensor is in its pages only
                self._checkpoint.release(name)


def _fetch(held: weakref.ref[Checkpoint], names: Iterable[str]) -> None:
    with suppress(MoestroError):  # whoever needs a file that has changed is told so
        for name in names:
            checkpoint = held()
            for _ in () if checkpoint is None else checkpoint.fetch(name):
                pass
            del checkpoint  # so that a model that has gone takes its files along


def _is_measurable() -> bool:
    return os.path.exists(_STATM)


def _resident_pages() -> int:
    with open(_STATM, "rb", buffering=0) as file:
        return int(file.read().split()[1])
