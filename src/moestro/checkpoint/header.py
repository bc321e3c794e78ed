"""What the header of a safetensors file says: parsed and checked in full, and written.

A file is the length of its header (8 bytes, little-endian), the header (a JSON object: a tensor's name -> its dtype,
shape and data_offsets), and the tensors' bytes, one after the other without gaps. The format's own page:
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from moestro.errors import InvalidInputError, invalid_input, unsupported

OPEN = "open_checkpoint"
WRITE = "write_file"
DOWNLOAD_AGAIN = "Download or save the file again."
MAX_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors library reads; the longest JSON file that is read."""

DTYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The header's names of dtypes, in the order in which the safetensors library lays tensors out."""

SUB_BYTE = ("F4", "F6_E2M3", "F6_E3M2")
METADATA = "__metadata__"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANK = {dtype: rank for rank, dtype in enumerate(_NAMES)}
_KNOWN = ", ".join(DTYPES)
_LENGTH = struct.Struct("<Q")
_START_BYTES = 64
_MOST_BYTES = 2**63 - 1
_MOST_DIMENSIONS = 64
_OTHER_FILES = {
    b"version https://git-lfs": "a git-lfs pointer, a few lines of text that stand for the file itself",
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"GGUF": "a GGUF file",
    b"<": "a web page, or other markup",
    b"{": "JSON text",
}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written, of a dtype that safetensors files hold; no sub-byte ones."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry(TensorSpec):
    """A tensor in a file, as the header describes it; `start` and `stop` are counted from the start of the file."""

    file: Path
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    @property
    def is_aligned(self) -> bool:
        """Whether its first byte lies at a multiple of its item size: if not, `Checkpoint.tensor` copies it."""
        return self.start % self.dtype.itemsize == 0


def shown(name: str) -> str:
    """A name as errors print it: in quotes, on one line, and not for pages."""
    return repr(name) if len(name) <= 200 else f"{name[:200]!r}... ({len(name)} characters)"


def damaged(file: Path, got: str, needs: str, fix: str = DOWNLOAD_AGAIN) -> InvalidInputError:
    """The error for a file that is not what it should be."""
    return invalid_input(OPEN, got=f"{file}: {got}", needs=needs, fix=fix)


def unreadable(path: Path, error: OSError) -> InvalidInputError:
    """The error for what the system will not read."""
    return damaged(path, f"{error.strerror or error}", "a file that can be read", "Check its permissions and its disk.")


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading inside the block; links are followed. Errors of the system are said in words."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise damaged(path, "a folder" if stat.S_ISDIR(mode) else "no regular file", "a file", "Name its files.")
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError as error:
        if os.path.islink(path):
            raise damaged(path, f"a link to {os.readlink(path)}, which is not there", "the file") from error
        raise damaged(path, "no such file", "the file", "Check the path, or download the file.") from error
    except OSError as error:
        raise unreadable(path, error) from error


def identity(file: BinaryIO) -> tuple[int, int, int, int]:
    """What changes when a path comes to name another file, or the file is written to."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def in_file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The order in which the safetensors library writes: by dtype, wide ones first, then by name."""
    specs = list(specs)
    for spec in specs:
        if spec.dtype not in _NAMES:
            raise unsupported(
                WRITE,
                got=f"tensor {shown(spec.name)} of {spec.dtype}",
                needs=f"one of {_KNOWN}",
                fix="Pass packed data as torch.uint8.",
            )
    return sorted(specs, key=lambda spec: (_RANK[spec.dtype], spec.name))


def render_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    """The first bytes of a file that holds these tensors, in the order given; a multiple of 8 bytes."""
    fields: dict[str, Any] = {}
    if metadata is not None:
        fields[METADATA] = dict(sorted(metadata.items()))
    stop = 0
    for spec in specs:
        start, stop = stop, stop + spec.nbytes
        if spec.name in fields or spec.name == METADATA:
            raise _unwritable(f"two tensors {shown(spec.name)}" if spec.name in fields else f"a tensor {METADATA!r}")
        fields[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, stop]}
    try:
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise _unwritable(f"a name or metadata that is not Unicode text ({error.reason})") from error
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise _unwritable(f"a header of {len(text)} bytes")
    return _LENGTH.pack(len(text)) + text


def _unwritable(got: str) -> InvalidInputError:
    needs = f"unique names other than {METADATA!r}, in Unicode, and a header of at most {MAX_HEADER_BYTES} bytes"
    return invalid_input(WRITE, got=got, needs=needs, fix="Rename the tensors, or write several files.")


def read_header(path: Path, file: BinaryIO, size: int) -> tuple[Entry, ...]:
    """The tensors of an open file of so many bytes, in the order of their bytes.

    Every byte must belong to one tensor, and each tensor have as many as its dtype and shape say.
    """
    length = _header_length(path, file.read(_START_BYTES), size)
    file.seek(_LENGTH.size)
    text = file.read(length)
    if text[:1] != b"{":
        raise damaged(path, f"a header that starts with {text[:8]!r}", "a JSON object")
    fields = parse_object(text, path, "a header")
    metadata = fields.pop(METADATA, None)
    named = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if not named and metadata is not None:
        raise damaged(path, f"{METADATA} {shown(str(metadata))}", "texts by name")
    begin = _LENGTH.size + len(text)
    entries = [_entry(name, value, path, begin) for name, value in fields.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop, entry.name))
    _check_cover(entries, path, begin, size)
    return tuple(entries)


def _header_length(file: Path, start: bytes, size: int) -> int:
    """The length that the first bytes of a file claim for its header, if that is possible."""
    if not start:
        raise damaged(file, "an empty file", "a safetensors file")
    if len(start) < _LENGTH.size:
        raise damaged(file, f"{size} bytes", "a header length in the first 8 bytes")
    (length,) = _LENGTH.unpack_from(start)
    if length > MAX_HEADER_BYTES:
        refuse_other_kinds(file, start)
        needs = f"a header of at most {MAX_HEADER_BYTES} bytes"
        raise damaged(file, f"a header of {length} bytes by its first 8 bytes, which is no safetensors file", needs)
    missing = _LENGTH.size + length - size
    if missing > 0:
        needs = f"the {missing} bytes of the header that are missing"
        raise damaged(file, f"{size} bytes, cut off in its header", needs)
    return int(length)


def refuse_other_kinds(file: Path, start: bytes) -> None:
    """Raise if a file that cannot be read starts as one of the kinds that are often found in its place."""
    for magic, kind in _OTHER_FILES.items():
        if start.startswith(magic):
            fix = "Run `git lfs pull`, or download the file." if "lfs" in kind else DOWNLOAD_AGAIN
            raise damaged(file, kind, "a safetensors file", fix)


def read_object(path: Path, what: str, fix: str = DOWNLOAD_AGAIN) -> dict[str, Any]:
    """The JSON object in a file; `what` it is and the `fix` are said in errors, which are those of `parse_object`."""
    with reading(path) as file:
        text = file.read(MAX_HEADER_BYTES + 1)
    if len(text) > MAX_HEADER_BYTES:
        raise damaged(path, f"{what} of more bytes than that", f"at most {MAX_HEADER_BYTES} bytes", fix)
    if text[:1] != b"{":
        refuse_other_kinds(path, text)
    return parse_object(text, path, what, fix)


def parse_object(text: bytes, file: Path, what: str, fix: str = DOWNLOAD_AGAIN) -> dict[str, Any]:
    """A JSON object without duplicate keys; anything else is an error."""

    def wrong(flaw: str) -> InvalidInputError:
        return damaged(file, f"{what} {flaw}", "a JSON object in Unicode, each key once", fix)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise wrong(f"with {shown(twice)} twice")
        return fields

    def no_constant(name: str) -> None:
        raise wrong(f"with {name}, which is no number of JSON")

    try:
        found = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=no_constant)
        if b"\\u" in text:  # an escape can spell half a character
            json.dumps(found, ensure_ascii=False).encode()
    except InvalidInputError:
        raise
    except UnicodeDecodeError as error:
        raise wrong(f"that is not UTF-8 at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise wrong(f"that is not Unicode text: {error.object[error.start]!a}") from error
    except RecursionError as error:
        raise wrong("nested too deep") from error
    except ValueError as error:
        raise wrong(f"that is not JSON ({shown(str(error))})") from error
    if not isinstance(found, dict):
        raise wrong(f"that is a JSON {type(found).__name__}")
    return found


def _entry(name: str, value: Any, file: Path, begin: int) -> Entry:
    def wrong(got: str, needs: str) -> InvalidInputError:
        return damaged(file, f"tensor {shown(name)} {got}", needs)

    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise wrong(f"as {shown(str(value))}", "its dtype, shape and data_offsets")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if kind in SUB_BYTE:
        raise unsupported(
            OPEN,
            got=f"{file}: tensor {shown(name)} of {kind}, less than a byte an item",
            needs=f"one of {_KNOWN}",
            fix="Save packed data as U8, as gpt-oss and moestro do.",
        )
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise wrong(f"of dtype {shown(str(kind))}", f"one of {_KNOWN}")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        needs = f"a list of at most {_MOST_DIMENSIONS} integers, 0 or more each"
        raise wrong(f"of shape {shown(str(shape))}", needs)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"at data_offsets {shown(str(offsets))}", "[start, stop], start <= stop")
    if math.prod(max(n, 1) for n in shape) * dtype.itemsize > _MOST_BYTES:
        raise wrong(f"of shape {shown(str(shape))}", f"at most {_MOST_BYTES} bytes")
    entry = Entry(name, dtype, tuple(shape), file, begin + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        got = f"as {kind} of shape {shape} in {offsets[1] - offsets[0]} bytes"
        raise wrong(got, f"the {entry.nbytes} bytes of this dtype and shape")
    return entry


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_cover(entries: list[Entry], file: Path, begin: int, size: int) -> None:
    """Raise unless each tensor starts where the one before it stops, and the last stops where the file does."""
    stop, before = begin, "the header"
    for entry in entries:
        if entry.start != stop:
            kind = "overlaps" if entry.start < stop else f"leaves {entry.start - stop} bytes unused after"
            raise damaged(
                file,
                f"tensor {shown(entry.name)} at byte {entry.start}, which {kind} {before}",
                f"it at byte {stop}, where {before} ends",
            )
        stop, before = entry.stop, f"tensor {shown(entry.name)}"
    if stop > size:
        cut = [entry for entry in entries if entry.stop > size]
        others = f" and the {len(cut) - 1} tensors after it" if len(cut) > 1 else ""
        raise damaged(
            file,
            f"{size} bytes, cut off in tensor {shown(cut[0].name)}{others}",
            f"the {stop - size} bytes that are missing",
        )
    if stop < size:
        raise damaged(file, f"{size - stop} bytes after {before}", f"a file that ends there, at byte {stop}")
