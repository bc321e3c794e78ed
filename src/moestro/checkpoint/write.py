"""Write safetensors files as their tensors come, plan which tensors share a file, and list them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from moestro.checkpoint.header import TensorSpec, in_file_order, render_header, shown
from moestro.checkpoint.replace import WRITE, Output, replace_text, replacing
from moestro.errors import InvalidInputError, invalid_input

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write_file(
    path: Path,
    tensors: Sequence[TensorSpec],
    produce: Callable[[TensorSpec], Iterable[Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Write one safetensors file, a piece of a tensor at a time; the same bytes as the safetensors library writes.

    The file is ``path + ".partial"`` until it is complete and on disk; then it takes its name, in place of a file that
    has it. The next piece is made while the last one is hashed, so that two are in memory.

    Args:
        path: the file's name.
        tensors: what it will hold, in any order; it is laid out by dtype, wide ones first, then by name.
        produce: called for each tensor in that order; the pieces of the tensor along its first dimension, one after the
            other, on any device. A tensor without items needs none.
        metadata: texts for the header; Transformers wants {"format": "pt"}. Written sorted; the library's own order
            changes from run to run.

    Returns:
        SHA-256 of each tensor's bytes, by name, in hexadecimal: for `write_checksums`.

    Raises:
        InvalidInputError: two tensors of one name, pieces of another dtype or shape than announced, or the system does
            not let the file be written (no folder, no permission, no space). No file is left under either name.
        UnsupportedError: a dtype that safetensors files cannot hold.
    """
    ordered = in_file_order(tensors)
    header = render_header(ordered, metadata)
    with replacing(path) as file, ThreadPoolExecutor(1, "moestro-sha256") as hasher:
        file.write(header)
        return {spec.name: _write_tensor(file, spec, produce(spec), hasher) for spec in ordered}


def _write_tensor(file: Output, spec: TensorSpec, pieces: Iterable[Tensor], hasher: ThreadPoolExecutor) -> str:
    digest = hashlib.sha256()
    hashing: Future[None] | None = None
    done = 0
    for piece in pieces:
        done += _checked(spec, piece, done)
        data = bytes_of(piece)
        if hashing is not None:
            hashing.result()
        hashing = hasher.submit(digest.update, data)
        file.write(data)
    if done != spec.nbytes:
        raise _wrong(spec, f"{done} bytes", f"{spec.nbytes} bytes")
    if hashing is not None:
        hashing.result()
    return digest.hexdigest()


def _checked(spec: TensorSpec, piece: Tensor, done: int) -> int:
    """Bytes of a piece that fits into what is left of the tensor."""
    if piece.dtype != spec.dtype:
        raise _wrong(spec, f"a piece of {piece.dtype}", f"{spec.dtype}")
    if piece.dim() != len(spec.shape) or piece.shape[1:] != spec.shape[1:]:
        got, rest = list(piece.shape), ", ".join(map(str, spec.shape[1:]))
        raise _wrong(
            spec, f"a piece of shape {got}", f"pieces of shape [n, {rest}]" if rest else f"{len(spec.shape)}D ones"
        )
    nbytes = piece.numel() * piece.element_size()
    if done + nbytes > spec.nbytes:
        raise _wrong(spec, f"{done + nbytes} bytes or more", f"{spec.nbytes} bytes")
    return nbytes


def _wrong(spec: TensorSpec, got: str, needs: str) -> InvalidInputError:
    return invalid_input(
        WRITE,
        got=f"{got} for tensor {shown(spec.name)}",
        needs=f"{needs}, for {spec.dtype} of shape {list(spec.shape)}",
        fix="Produce what was announced, in pieces along the first dimension.",
    )


def bytes_of(piece: Tensor) -> memoryview:
    """The bytes of a tensor as a file holds them; a copy only where the tensor is not contiguous or not on the CPU."""
    plain = piece.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def plan_shards(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Which tensors share a file: in the order given, each file as full as `max_bytes` of tensors allow.

    A tensor larger than that gets a file of its own.

    Raises:
        InvalidInputError: `max_bytes` below 1.
    """
    if max_bytes < 1:
        raise invalid_input(
            "plan_shards", got=f"max_bytes={max_bytes}", needs="at least 1", fix="5 * 10**9 is what hubs are used to."
        )
    shards: list[list[TensorSpec]] = []
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
