"""Safetensors files made by hand, sound ones and others."""

from __future__ import annotations

import json
import os
import re
import resource
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro.checkpoint import open_checkpoint
from moestro.checkpoint.header import DTYPES
from moestro.errors import MoestroError

FOUR_PARTS = re.compile(r"\[(?P<operation>[^\]]+)\] got (?P<got>.+?); needs (?P<needs>.+?)\. (?P<fix>\S.+)", re.DOTALL)


def packed(header: Any, data: bytes = b"") -> bytes:
    """A file: its header (a value for JSON, or bytes as they are) and what follows."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def described(start: int, stop: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    """A tensor in a header; of as many items as fit where no shape is given."""
    size = DTYPES[dtype].itemsize if dtype in DTYPES else 1
    return {
        "dtype": dtype,
        "shape": [(stop - start) // size] if shape is None else shape,
        "data_offsets": [start, stop],
    }


def written(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def index(**weight_map: Any) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


def refusal(source: Any) -> re.Match[str]:
    """The four parts of the error that opening raises."""
    with pytest.raises(MoestroError) as caught:
        open_checkpoint(source)
    return parts(caught.value)


def parts(error: BaseException) -> re.Match[str]:
    found = FOUR_PARTS.fullmatch(str(error))
    assert found is not None, str(error)
    return found


def every_dtype() -> dict[str, torch.Tensor]:
    """A tensor of each dtype, of all bit patterns of a byte where it has one byte; names sort other than dtypes."""
    tensors = {}
    for i, (name, dtype) in enumerate(DTYPES.items()):
        count = 256 if dtype.itemsize == 1 else 12
        data = torch.arange(count * dtype.itemsize, dtype=torch.int64).mul(37 + i).remainder(256).to(torch.uint8)
        data = data.remainder(2) if dtype == torch.bool else data
        tensors[f"{(7 * i) % 19:02d}.{name}"] = data.view(dtype).view(4, -1)
    return tensors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def sparse(path: Path, nbytes: int) -> Path:
    """A file of float32 zeros that takes no space."""
    text = json.dumps({"x": described(0, nbytes)}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(packed(text))
    os.truncate(path, 8 + len(text) + nbytes)
    return path
