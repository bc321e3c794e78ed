"""How fast experts come from their files."""

from __future__ import annotations

import ctypes
import time

from moestro.checkpoint import Checkpoint
from moestro.memory.reader import Reader, Run

SIZE = 4 << 20
"""Bytes of a read, about those of an expert."""
READS = 64


def read_rate(checkpoint: Checkpoint) -> float:
    """Bytes per second of reads spread over the largest file, past the page cache where the filesystem allows that.

    0.0 where files are too small to tell: then experts are not planned to be read as needed.
    """
    path = max(checkpoint.files, key=lambda file: file.stat().st_size)
    size = path.stat().st_size
    reads = min(READS, size // SIZE)
    if reads < 2:
        return 0.0
    reader = Reader()
    number = reader.add(path, checkpoint.identities[path])
    room = ctypes.create_string_buffer(reads * SIZE + 4096)
    reader.keep(room)
    first = -(-ctypes.addressof(room) // 4096) * 4096
    step = (size - SIZE) // max(reads - 1, 1) // 4096 * 4096
    runs = [Run(number, i * step, SIZE, first + i * SIZE) for i in range(reads)]
    start = time.perf_counter()
    for ticket in [reader.submit([run], "a sample of the experts") for run in runs]:
        ticket.wait()
    return reads * SIZE / (time.perf_counter() - start)
