"""Triton's own launcher over a driver that writes down what it is handed: what later launches of a call give a GPU.

    TRITON_INTERPRET=0 python -m ops.launched FOLDER    (it holds libcuda.so.1, made of cuda_stub.c, and is written to)

Elsewhere a recorder stands where the launcher does; here its C code reads tensors at first, and then addresses.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro import ExpertWeights, Routing
from moestro.ops import dispatch, expert_mlp, gpu
from moestro.ops.expert_mlp import triton_maps

from .compiled import device, in_part, taken_for_a_gpu
from .stored import apart

CASES = [
    *(("bfloat16", num_tokens, 0) for num_tokens in (1, 70, 600)),
    ("bfloat16", 600, 1),
    ("mxfp4", 1, 0),
    ("mxfp4+apart", 1, 0),
    ("int8/int8", 70, 0),
]
"""Format, tokens, and whether the driver refuses maps whose strides do not grow: of 600 tokens there are maps, and of
nibbles in a stack while a graph is made."""


class Driver:
    """Triton's for CUDA, as far as a launch goes, on an H200."""

    get_current_stream = int

    def start(self) -> Any:
        """What it loads asks for the active driver, so that it must be that before."""
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        return self

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def case(form: str, num_tokens: int) -> tuple[torch.Tensor, Routing, ExpertWeights]:
    stored, _, rows = form.removesuffix("+apart").partition("/")
    weights = ExpertWeights.from_dense(torch.zeros(8, 256, 256), torch.zeros(8, 256, 128)).quantize(
        stored, input_format=rows or "float"
    )
    routing = Routing(torch.zeros(num_tokens, 2, dtype=torch.long), torch.zeros(num_tokens, 2))
    x = torch.zeros(num_tokens, 256).bfloat16()
    return x, routing, apart(weights) if form.endswith("+apart") else weights


def kinds_of(signature: Any) -> list[str]:
    """The types of a kernel's parameters as a driver is handed them: tuples in pieces, no compile-time values.

    A tensor map is handed over as itself, which the stub begins with its address, and its sizes and strides.
    """
    kinds: list[str] = []
    for kind in signature:
        if isinstance(kind, tuple | list):
            kinds += kinds_of(kind)
        elif kind.startswith("tensordesc"):
            rank = kind.partition("[")[2].partition("]")[0].count(",") + 1
            kinds += ["*map", *["i32"] * rank, *["i64"] * rank]
        else:
            kinds += [kind] * (kind != "constexpr")
    return kinds


def compared(first: list[Any], later: list[Any], own: set[int]) -> int:
    """Fail unless a call handed over what the first did, its own workspaces apart; returns how many values it did."""
    assert len(first) == len(later) >= 3, "every call launches gate_up, down and the sum over slots at least"
    found = {value for _, values in first for value, is_pointer in values if is_pointer}
    assert len(found & own) >= 5, "x, ids, routing weights and both projections are handed over as addresses"
    for (grid, before), (same_grid, after) in zip(first, later, strict=True):
        assert grid == same_grid
        assert len(before) == len(after) >= 5, "nothing of a launch was written down"
        for (u, is_pointer), (v, _) in zip(before, after, strict=True):
            is_workspace = is_pointer and u not in own
            assert v % 16 == 0 if is_workspace else u == v, (u, v)
    return sum(len(values) for _, values in later)


def main(folder: Path) -> None:
    """Print a line for each call that was compared."""
    library = ctypes.CDLL(str(folder / "libcuda.so.1"), ctypes.RTLD_GLOBAL)
    count = ctypes.c_int.in_dll(library, "num_values")
    refuses, made_maps = (ctypes.c_int.in_dll(library, name) for name in ("growing", "num_maps"))
    values, grid = (ctypes.c_uint64 * 256).in_dll(library, "values"), (ctypes.c_uint * 3).in_dll(library, "grid")
    import triton
    from triton.backends.nvidia.driver import CudaLauncher

    triton.knobs.nvidia.libcuda_path, triton.knobs.cache.dir = str(folder), str(folder / "cache")
    handed: list[Any] = []
    make, call = CudaLauncher.__init__, CudaLauncher.__call__

    def made(self: Any, source: Any, metadata: Any) -> None:
        make(self, source, metadata)
        self.kinds = kinds_of(source.signature.values())

    def told(self: Any, *arguments: Any) -> None:
        count.value = len(self.kinds)
        call(self, *arguments)
        pointers = [kind.startswith("*") for kind in self.kinds]
        found = [values[i] if is_pointer else values[i] & 0xFFFFFFFF for i, is_pointer in enumerate(pointers)]
        handed.append((tuple(grid), list(zip(found, pointers, strict=True))))

    driver = Driver()
    with pytest.MonkeyPatch.context() as patch, taken_for_a_gpu(), torch.no_grad():
        patch.setattr(triton.runtime.driver, "_active", driver)
        patch.setattr(gpu, "device_of", lambda tensor: device("sm_90"))
        in_part(patch)
        patch.setattr(CudaLauncher, "__init__", made)
        patch.setattr(CudaLauncher, "__call__", told)
        driver.start()
        patch.setattr(triton_maps, "_is_asked", lambda data: True)
        patch.setattr(triton_maps, "_driver", lambda: library)
        for form, num_tokens, growing in CASES:
            refuses.value, before = growing, made_maps.value
            call_twice(form, num_tokens, handed)
            if form == "mxfp4":
                with pytest.MonkeyPatch.context() as inside:
                    inside.setattr(gpu, "is_captured", lambda x: True)
                    call_twice(form, num_tokens, handed)
            print("maps", form, num_tokens, growing, made_maps.value - before, flush=True)


def call_twice(form: str, num_tokens: int, handed: list[Any]) -> None:
    """Print a line of what two calls handed over, which has to be the same.

    The first one of nibbles launches what is for graphs before, where none is made.
    """
    x, routing, weights = case(form, num_tokens)
    rounds: list[list[Any]] = []
    dispatch._KEPT.clear()
    for _ in range(2):
        expert_mlp.run(x, routing, weights)
        rounds.append(list(handed))
        handed.clear()
    own = {t.data_ptr() for t in (x, routing.expert_ids, routing.routing_weights, *weights.tensors)}
    first, later = rounds
    print("launched", form, num_tokens, len(later), compared(first[-len(later) :], later, own), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
