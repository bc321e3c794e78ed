"""Every load and store of Triton's kernels in its interpreter: counted, and held against the tensors given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch


@dataclass
class Watched:
    """What kernels loaded: for each load in order the addresses of the lanes that its mask lets through.

    Attributes:
        loads: arrays of addresses.
        ranges: [begin, end) of every tensor that a kernel was given, and whether it was written.
    """

    loads: list[np.ndarray[Any, Any]] = field(default_factory=list)
    ranges: dict[tuple[int, int], bool] = field(default_factory=dict)

    def of(self, tensor: torch.Tensor) -> list[np.ndarray[Any, Any]]:
        """The loads from a tensor, as indices of its items; loads of nothing are left out."""
        begin = tensor.data_ptr()
        inside = (a[(a >= begin) & (a < begin + tensor.untyped_storage().nbytes())] for a in self.loads)
        return [(a - begin) // tensor.element_size() for a in inside if len(a)]

    def check(self, addresses: np.ndarray[Any, Any], size: int) -> None:
        known = np.zeros(len(addresses), dtype=bool)
        for begin, end in self.ranges:
            known |= (addresses >= begin) & (addresses + size <= end)
        assert known.all(), f"{(~known).sum()} of {len(known)} addresses lie in no tensor"


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """While open, loads and stores are recorded, and one outside of every tensor is an AssertionError."""
    from triton.runtime import interpreter

    seen = Watched()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__

    def tell(arguments: Any) -> None:
        for value in arguments:
            if isinstance(value, torch.Tensor) and value.numel():
                storage = value.untyped_storage()
                seen.ranges[storage.data_ptr(), storage.data_ptr() + storage.nbytes()] = True
            elif isinstance(value, tuple | list):
                tell(value)
            elif hasattr(value, "block_shape"):
                tell([value.base])

    def watched_call(self: Any, *arguments: Any, **options: Any) -> Any:
        tell([*arguments, *options.values()])
        return call(self, *arguments, **options)

    def addresses(pointers: Any, mask: Any) -> np.ndarray[Any, Any]:
        lanes = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        found = pointers.data[lanes].astype(np.int64)
        seen.check(found, pointers.get_element_ty().primitive_bitwidth // 8)
        return found

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        seen.loads.append(addresses(pointers, mask))
        return load(self, pointers, mask, *rest, **options)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        addresses(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_masked_load", watched_load)
        patch.setattr(builder, "create_masked_store", watched_store)
        patch.setattr(executor, "__call__", watched_call)
        yield seen
