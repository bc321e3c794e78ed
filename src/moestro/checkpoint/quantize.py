"""Quantise the experts of a checkpoint, shard by shard, so that a run that was stopped can be continued."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from moestro.checkpoint.checksums import CHECKSUMS, Sums, read_checksums, write_checksums
from moestro.checkpoint.header import reading
from moestro.checkpoint.outputs import CHUNK_BYTES, METADATA, ExpertSource, Item, Outputs, plan_outputs
from moestro.checkpoint.read import Checkpoint
from moestro.checkpoint.resume import RECORD, Record, commit, followed, is_complete, open_partial
from moestro.checkpoint.scheme import MARK, METHOD, OPERATION, Scheme
from moestro.checkpoint.write import PARTIAL, explained, replace_text, replacing, write_file, write_index
from moestro.errors import invalid_input

SHARD_BYTES = 5 * 10**9
CONFIG = "config.json"
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".tflite"}
"""Endings of files that hold weights, or parts of them: they are not copied."""


@dataclass(frozen=True, eq=False)
class Job:
    """What is to be quantised, into what, and where to.

    Attributes:
        folder: the source: its config.json is rewritten, its weights are replaced, every other file of it is copied.
        checkpoint: the weights in it.
        experts: the projections among them that are quantised.
        destination: the folder to make.
        scheme: the formats.
        shard_bytes: the most tensor bytes of a file. A projection that is larger has a file of its own.
        checksums: whether to write the SHA-256 of every tensor beside the files, for `Checkpoint.verify`.
    """

    folder: Path
    checkpoint: Checkpoint
    experts: Sequence[ExpertSource]
    destination: Path
    scheme: Scheme
    shard_bytes: int = SHARD_BYTES
    checksums: bool = False


@dataclass(frozen=True)
class Progress:
    """How far a run is: bytes of tensors on the disk, those of earlier runs included, and of all.

    `tensor` is being written ("" before the first), to the file `shard`, counted from 1, of `num_shards`.
    """

    written: int
    total: int
    tensor: str
    shard: int
    num_shards: int


@dataclass(frozen=True)
class Report:
    """What a run made, or found made.

    Attributes:
        destination: the folder.
        complete_before: whether an earlier run had made all of it, so that this one wrote nothing.
        num_shards, num_resumed: files of weights, and how many of them earlier runs had finished.
        num_tensors: in them.
        formats: the number of projections in each format.
        bytes_before, bytes_after: of all tensors.
        expert_bytes_before, expert_bytes_after: of the experts, scales included.
        bits_per_weight: stored bits of an expert's weight, scales included, on average.
        seconds: of this run.
    """

    destination: Path
    complete_before: bool
    num_shards: int
    num_resumed: int
    num_tensors: int
    formats: Mapping[str, int]
    bytes_before: int
    bytes_after: int
    expert_bytes_before: int
    expert_bytes_after: int
    bits_per_weight: float
    seconds: float


OnProgress = Callable[[Progress], object]


def quantize_checkpoint(job: Job, on_progress: OnProgress | None = None) -> Report:
    """Quantise the experts of a checkpoint into a new folder; everything else in it is copied byte for byte.

    Everything that can be checked without reading weights is checked first, the free disk space included. The result
    is written to a folder beside the destination, with ".partial" after its name, and renamed when it is complete. A
    run that stops, for whatever reason, is continued by the same call: files that were complete are kept, and the
    result has the same bytes as one that never stopped. If the result is there already, nothing is written. One expert
    at a time is in memory.

    Args:
        job: what, and where to.
        on_progress: called when the first byte is about to be written, and after each piece.

    Raises:
        InvalidInputError: what `plan_outputs` refuses; a destination that is anything else than absent, empty or the
            result of the same job; too little disk space; a source that is not what its checksums say, if it has any;
            a weight that is not finite.
        OSError: the disk failed, or is full after all. What was finished is kept.
    """
    start = time.perf_counter()
    job = replace(job, destination=followed(job.destination))
    outputs = plan_outputs(job.checkpoint, job.experts, job.scheme, job.shard_bytes)
    _check_destination(job)
    config = _config(job)
    record = _record(job, outputs, config)
    if is_complete(job.destination, record):
        return _report(job, outputs, len(outputs.shards), start, complete_before=True)
    with open_partial(job.destination, record) as (partial, whole):
        sums = (read_checksums(partial) or {}) if job.checksums else {name: {} for name in whole}
        finished = {name: sums[name] for name in sums if name in whole}
        _check_space(job, outputs, partial, finished)
        job.checkpoint.verify()
        replace_text(partial / RECORD, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        _write(job, outputs, partial, finished, on_progress or (lambda progress: None))
        replace_text(partial / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        commit(partial, job.destination)
    return _report(job, outputs, len(finished), start)


def _check_destination(job: Job) -> None:
    source, destination = job.folder.resolve(), job.destination.resolve()
    there = destination.exists()
    flaws = {
        f"which is the source {source}": destination == source,
        f"which lies in the source {source}": destination.is_relative_to(source),
        f"which lies around the source {source}": source.is_relative_to(destination),
        "a file": there and not destination.is_dir(),
        "the working folder": there and os.path.samefile(destination, os.curdir),
        "where a disk is mounted": os.path.ismount(destination),
    }
    for flaw, found in flaws.items():
        if found:
            raise invalid_input(
                OPERATION,
                got=f"destination {destination}, {flaw}",
                needs="a folder beside the source that another can take the place of, once that is complete",
                fix="Name another folder.",
            )


def _config(job: Job) -> dict[str, Any]:
    """The config.json of the result."""
    config = _read_config(job.folder / CONFIG)
    before = None
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        before = part.pop("quantization_config", None) or before
    if isinstance(before, dict) and before.get("quant_method") == METHOD:
        before = before.get("rest")
    scheme = job.scheme.settled(source.target for source in job.experts)
    return {**config, **MARK, "quantization_config": scheme.as_config(before)}


def _read_config(path: Path) -> dict[str, Any]:
    """A config.json as Transformers reads it: with Infinity and NaN, and the last of several equal keys."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(config, ensure_ascii=False).encode()  # an escape can spell half a character
        reason = None if isinstance(config, dict) else f"it holds a JSON {type(config).__name__}"
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    if reason is not None:
        raise invalid_input(
            OPERATION,
            got=f"{path}, unreadable ({reason})",
            needs="a model's configuration",
            fix="Download the model again.",
        )
    return dict(config)


def other_files(folder: Path) -> list[Path]:
    """Files of a model's folder that belong to the model beside weights and configuration, relative to it, sorted.

    Tokenizers, templates, generation settings, code, the model card and the like: everything that is not weights, an
    index or checksums of them, config.json, hidden, or unfinished. Links to folders are not followed, those to files
    outside the folder refused, other than those a cache of the hub is made of.
    """
    found = []
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        named = str(relative) in (CONFIG, CHECKSUMS, RECORD) or path.name.endswith((".index.json", PARTIAL))
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not named and not hidden and path.suffix not in WEIGHTS:
            _check_inside(folder, path)
            found.append(relative)
    return sorted(found)


def _check_inside(folder: Path, path: Path) -> None:
    """Refuse a link out of a model's folder: what it names is no part of the model."""
    here, there = folder.resolve(), path.resolve()
    blobs = here.parent.parent / "blobs" if here.parent.name == "snapshots" else here  # as the hub's cache has them
    if not there.is_relative_to(here) and there.parent != blobs:
        raise invalid_input(
            OPERATION,
            got=f"{path}, a link to {there}, outside the source",
            needs="files that lie in the source",
            fix="Put a copy of the file in its place, or remove the link.",
        )


def _record(job: Job, outputs: Outputs, config: Mapping[str, Any]) -> Record:
    """What the result depends on, as plain values: two jobs with equal records make the same bytes."""
    tensors = [[file, [[s.name, str(s.dtype), list(s.shape)] for s in specs]] for file, specs in outputs.specs.items()]
    return {
        "version": 2,
        "format": job.scheme.format,
        "search": job.scheme.search,
        "overrides": [list(pair) for pair in job.scheme.overrides.items()],
        "checksums": job.checksums,
        "shard size": job.shard_bytes,
        "source": {path.name: _identity(path) for path in job.checkpoint.files},
        "files": {str(path): _identity(job.folder / path) for path in other_files(job.folder)},
        "configuration": _hash(config),
        "tensors": _hash(tensors),
        "shards": dict(outputs.sizes),
    }


def _identity(path: Path) -> list[int]:
    """Size in bytes, and time of the last change in nanoseconds."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _check_space(job: Job, outputs: Outputs, partial: Path, finished: Container[str]) -> None:
    missing = sum(size for name, size in outputs.sizes.items() if name not in finished)
    missing += sum((job.folder / path).stat().st_size for path in other_files(job.folder))
    free = shutil.disk_usage(partial).free
    if free < missing:
        raise invalid_input(
            OPERATION,
            got=f"{free / 1e9:.2f} GB ({free} bytes) free where {partial} lies",
            needs=f"{missing / 1e9:.2f} GB ({missing} bytes) for what is still to be written",
            fix="Free the space, or name a folder on another disk.",
        )


def _write(job: Job, outputs: Outputs, partial: Path, finished: Sums, on_progress: OnProgress) -> None:
    """Everything but the configuration: the shards that are not finished, and all else, which is small, every time.

    Checksums are those of what was written: they are on the disk from shard to shard.
    """
    specs, total, number = outputs.specs, outputs.nbytes, len(outputs.shards)
    written = sum(spec.nbytes for name in finished for spec in specs[name])
    on_progress(Progress(written, total, "", len(finished), number))

    def pieces(items: Sequence[Item], shard: int) -> Iterator[tuple[str, Tensor]]:
        nonlocal written
        for item in items:
            for name, piece in item.pieces(job.checkpoint, job.scheme.search):
                yield name, piece
                written += piece.nbytes
                on_progress(Progress(written, total, name, shard, number))
            for name in item.reads:
                job.checkpoint.release(name)

    sums = dict(finished)
    for i, (name, items) in enumerate(outputs.shards.items(), 1):
        if name not in finished:
            sums[name] = write_file(partial / name, specs[name], pieces(items, i), METADATA)
            if job.checksums:
                write_checksums(partial, sums)
    if number > 1:
        write_index(partial, specs)
    for path in other_files(job.folder):
        target = partial / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with reading(job.folder / path) as file, replacing(target) as copy:
            while chunk := file.read(CHUNK_BYTES):
                with explained(target):
                    copy.write(chunk)


def _report(job: Job, outputs: Outputs, resumed: int, start: float, complete_before: bool = False) -> Report:
    projections = outputs.projections
    stored = [p.source.stored for p in projections]
    after = sum(p.nbytes for p in projections)
    weights = sum(math.prod(s.shape) for s in stored)
    return Report(
        destination=job.destination,
        complete_before=complete_before,
        num_shards=len(outputs.shards),
        num_resumed=resumed,
        num_tensors=sum(map(len, outputs.specs.values())),
        formats=dict(sorted(Counter(p.format.name for p in projections).items())),
        bytes_before=job.checkpoint.nbytes,
        bytes_after=outputs.nbytes,
        expert_bytes_before=sum(s.nbytes for s in stored),
        expert_bytes_after=after,
        bits_per_weight=8 * after / max(weights, 1),
        seconds=time.perf_counter() - start,
    )
