"""Write safetensors files as the pieces of their tensors come, plan which tensors share a file, and list them.

Every file appears under its name whole, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import torch
from torch import Tensor

from moestro.checkpoint.header import WRITE, TensorSpec, in_file_order, render_header, shown
from moestro.errors import InvalidInputError, invalid_input

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PARTIAL = ".partial"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes its name only when the block ends: on disk by then, its folder's entry too.

    Until then it is ``path + ".partial"``. If the block raises, that is removed, and what had the name keeps it; if the
    process is killed, it stays, and the next one to write the file overwrites it. What the block writes itself, it
    writes inside `explained`, which raises the errors.
    """
    partial = path.with_name(path.name + PARTIAL)
    with explained(path):
        file = open(partial, "wb", opener=_open_no_link)  # noqa: SIM115 (closed below, where closing can fail too)
    try:
        try:
            yield file
            with explained(path):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with explained(path):
                file.close()
        with explained(path):
            os.replace(partial, path)
            sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _open_no_link(path: str, flags: int) -> int:
    """Open a file, but not what a link of its name leads to."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def replace_text(path: Path, text: str) -> Path:
    """Write a small text file in UTF-8, whole or not at all; returns its path. Errors as for `replacing`."""
    with replacing(path) as file, explained(path):
        file.write(text.encode())
    return path


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
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
        raise invalid_input(
            WRITE,
            got=f"{path}: {error.strerror or error}",
            needs="a folder that can be written to, with space for the file",
            fix="Free space on the disk, or write elsewhere; nothing was left under the file's name.",
        ) from error


def write_file(
    path: Path,
    tensors: Sequence[TensorSpec],
    pieces: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Write one safetensors file as the pieces of its tensors come; the same bytes as the safetensors library writes.

    The file is ``path + ".partial"`` until it is complete and on disk; then it takes its name, in place of a file that
    has it. The next piece is made while the last one is hashed, so that two are in memory.

    Args:
        path: the file's name.
        tensors: what it will hold, in any order; it is laid out by dtype, wide ones first, then by name.
        pieces: a tensor's name and its next rows, along its first dimension, on any device. The pieces of one tensor
            come in order; those of others may lie between them. A tensor without items needs none.
        metadata: texts for the header; Transformers wants {"format": "pt"}. Written sorted; the library's own order
            changes from run to run.

    Returns:
        SHA-256 of each tensor's bytes, by name, in hexadecimal: for `write_checksums`.

    Raises:
        InvalidInputError: two tensors of one name, pieces of another name, dtype or shape than announced, or the system
            does not let the file be written (no folder, no permission, no space). No file is left under either name.
        UnsupportedError: a dtype that safetensors files cannot hold.
    """
    ordered = in_file_order(tensors)
    header = render_header(ordered, metadata)
    specs, begin, stop = {spec.name: spec for spec in ordered}, {}, len(header)
    for name, spec in specs.items():
        begin[name], stop = stop, stop + spec.nbytes
    done = dict.fromkeys(specs, 0)
    sums = {name: hashlib.sha256() for name in specs}
    hashing: Future[None] | None = None
    with replacing(path) as file, ThreadPoolExecutor(1, "moestro-sha256") as hasher:
        with explained(path):
            file.write(header)
        for name, piece in pieces:
            if name not in specs:
                needs = "pieces of the tensors that were announced"
                raise invalid_input(WRITE, got=f"a piece of tensor {shown(name)}", needs=needs, fix="Announce it too.")
            data = _checked(specs[name], piece, done[name])
            if hashing is not None:
                hashing.result()
            hashing = hasher.submit(sums[name].update, data)
            with explained(path):
                file.seek(begin[name] + done[name])
                file.write(data)
            done[name] += len(data)
        for name, spec in specs.items():
            if done[name] != spec.nbytes:
                raise _wrong(spec, f"{done[name]} bytes", f"{spec.nbytes} bytes")
        if hashing is not None:
            hashing.result()
    return {name: found.hexdigest() for name, found in sums.items()}


def _checked(spec: TensorSpec, piece: Tensor, done: int) -> memoryview:
    """The bytes of a piece that fits into what is left of the tensor, as a file holds them.

    A copy only where the piece is not contiguous or not on the CPU.
    """
    if piece.dtype != spec.dtype:
        raise _wrong(spec, f"a piece of {piece.dtype}", f"{spec.dtype}")
    if piece.dim() != len(spec.shape) or piece.shape[1:] != spec.shape[1:]:
        rest = ", ".join(map(str, spec.shape[1:]))
        needs = f"pieces of shape [n, {rest}]" if rest else f"{len(spec.shape)}D ones"
        raise _wrong(spec, f"a piece of shape {list(piece.shape)}", needs)
    plain = piece.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().data
    if done + len(data) > spec.nbytes:
        raise _wrong(spec, f"{done + len(data)} bytes or more", f"{spec.nbytes} bytes")
    return data


def _wrong(spec: TensorSpec, got: str, needs: str) -> InvalidInputError:
    return invalid_input(
        WRITE,
        got=f"{got} for tensor {shown(spec.name)}",
        needs=f"{needs}, for {spec.dtype} of shape {list(spec.shape)}",
        fix="Produce what was announced, in pieces along the first dimension.",
    )


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_T = TypeVar("_T", bound=_Sized)


def plan_shards(specs: Sequence[_T], max_bytes: int) -> list[list[_T]]:
    """Which tensors share a file: in the order given, each file as full as `max_bytes` of tensors allow.

    A tensor larger than that gets a file of its own. Anything else that has `nbytes` is planned in the same way.

    Raises:
        InvalidInputError: `max_bytes` below 1.
    """
    if max_bytes < 1:
        raise invalid_input(
            "plan_shards", got=f"max_bytes={max_bytes}", needs="at least 1", fix="5 * 10**9 is what hubs are used to."
        )
    shards: list[list[_T]] = []
    free = 0
    for spec in specs:
        if not shards or spec.nbytes > free:
            shards.append([])
            free = max_bytes
        shards[-1].append(spec)
        free -= spec.nbytes
    return shards


def shard_names(count: int) -> tuple[str, ...]:
    """The file names of a checkpoint of `count` files: "model.safetensors", or "model-00001-of-00002.safetensors", ...

    Raises:
        InvalidInputError: `count` below 1.
    """
    if count < 1:
        raise invalid_input("shard_names", got=f"count={count}", needs="at least 1", fix="Write at least one file.")
    if count == 1:
        return (SINGLE,)
    return tuple(f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1))


def write_index(folder: Path, shards: Mapping[str, Sequence[TensorSpec]]) -> Path:
    """Write `model.safetensors.index.json`, whole or not at all, as Transformers does; returns its path.

    Args:
        folder: that of the files.
        shards: the tensors of each file, by file name.

    Raises:
        InvalidInputError: a tensor in two files, or the index cannot be written.
    """
    weight_map: dict[str, str] = {}
    for file, specs in shards.items():
        for spec in specs:
            if spec.name in weight_map:
                raise invalid_input(
                    "write_index",
                    got=f"tensor {shown(spec.name)} in {weight_map[spec.name]} and in {file}",
                    needs="each tensor in one file",
                    fix="Plan the files with plan_shards.",
                )
            weight_map[spec.name] = file
    total = sum(spec.nbytes for specs in shards.values() for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return replace_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
