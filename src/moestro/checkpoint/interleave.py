"""Write a safetensors file whose tensors come interleaved: an expert's data, its scales, then the next expert's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from moestro.checkpoint.header import TensorSpec, in_file_order, render_header
from moestro.checkpoint.replace import replacing
from moestro.checkpoint.write import bytes_of

METADATA = {"format": "pt"}
"""What Transformers asks of every file."""


def file_size(specs: Sequence[TensorSpec]) -> int:
    """Bytes of the file that holds these tensors."""
    return len(render_header(in_file_order(specs), METADATA)) + sum(spec.nbytes for spec in specs)


def write_interleaved(path: Path, specs: Sequence[TensorSpec], pieces: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Write a file as the pieces of its tensors come; the same bytes as `write_file` writes.

    At most two pieces are in memory: the next one is made while the last one is hashed.

    Args:
        path: of the file, which is there only once it is complete and on the disk.
        specs: every tensor of it.
        pieces: a tensor's name and its next items. The pieces of one tensor come in order; those of others may lie
            between them.

    Returns:
        The SHA-256 of each tensor's bytes.

    Raises:
        InvalidInputError: the system does not let the file be written.
    """
    ordered = in_file_order(specs)
    header = render_header(ordered, METADATA)
    at, end, stop = {}, {}, len(header)
    for spec in ordered:
        at[spec.name], stop = stop, stop + spec.nbytes
        end[spec.name] = stop
    dtypes = {spec.name: spec.dtype for spec in ordered}
    sums = {spec.name: hashlib.sha256() for spec in ordered}
    hashing: Future[None] | None = None
    with replacing(path) as file, ThreadPoolExecutor(1, "moestro-sha256") as hasher:
        file.write(header)
        for name, piece in pieces:
            raw = bytes_of(piece)
            assert piece.dtype == dtypes[name], f"{name} is {piece.dtype}, not {dtypes[name]}"
            assert at[name] + len(raw) <= end[name], f"{name} is longer than planned"
            if hashing is not None:
                hashing.result()
            hashing = hasher.submit(sums[name].update, raw)
            file.write_at(at[name], raw)
            at[name] += len(raw)
        assert at == end, f"{[name for name in at if at[name] < end[name]]} are shorter than planned"
        if hashing is not None:
            hashing.result()
    return {name: found.hexdigest() for name, found in sums.items()}
