"""Triton's kernels compiled for GPUs that are not here: what a launch would compile, and what that needs.

    TRITON_INTERPRET=0 python -m ops.compiled sm_90 bfloat16 mxfp4    (or without arguments: everything)
    TRITON_INTERPRET=0 python -m ops.compiled sm_90 fp8-e4m3-b128/fp8-e4m3    (rows rounded to 8-bit floats)

A driver that answers for a GPU stands in for the one that is missing; kernels are compiled by the very calls that
launch them, and not run.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro import Activation, ExpertWeights, Routing
from moestro.formats import FORMATS
from moestro.ops import gpu
from moestro.ops.expert_mlp import triton as engine
from moestro.ops.expert_mlp import triton_tuning
from moestro.ops.gpu import Device, shared_memory
from moestro.types import GPT_OSS_SWIGLU

from . import problems

ARCHITECTURES = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_120": 170}
"""Multiprocessors of a part of each: A100, RTX 3090, RTX 4090, H200, RTX 5090."""


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled for one GPU: its name, bytes of shared memory, registers, spilled bytes, and its PTX."""

    name: str
    shared: int
    registers: int
    spills: int
    ptx: str


class _Driver:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def device(architecture: str) -> Device:
    """The device that a name of `ARCHITECTURES` stands for."""
    number = int(architecture.removeprefix("sm_"))
    capability = divmod(number, 10)
    return Device(capability, ARCHITECTURES[architecture], shared_memory(capability))


@contextmanager
def launching(architecture: str) -> Iterator[list[tuple[Any, ...]]]:
    """While open, launches compile for this architecture, and what the driver would be handed is kept in the list."""
    from triton.compiler import CompiledKernel

    handed: list[tuple[Any, ...]] = []
    with compiling(architecture, warmup=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledKernel, "_init_handles", lambda self: None)
        patch.setattr(CompiledKernel, "run", property(lambda self: lambda *a: handed.append((self.name, *a))))
        yield handed


@contextmanager
def compiling(architecture: str, warmup: bool = True) -> Iterator[dict[str, Any]]:
    """While open, launches compile for this architecture, run nothing, and are kept in the dictionary."""
    import triton
    from triton.runtime.jit import JITFunction

    found: dict[str, Any] = {}
    run, device_of, driver = JITFunction.run, gpu.device_of, triton.runtime.driver._active

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["warmup"] = warmup
        kernel = found[self.fn.__name__] = run(self, *args, **kwargs)
        return None if warmup else kernel

    triton.runtime.driver.set_active(_Driver(int(architecture.removeprefix("sm_"))))
    JITFunction.run, gpu.device_of = compile_only, lambda tensor: device(architecture)
    for module in list(sys.modules.values()):
        for value in vars(module).values() if module and module.__name__.startswith("moestro.") else ():
            if isinstance(value, JITFunction):
                value.device_caches.clear()
    try:
        yield found
    finally:
        JITFunction.run, gpu.device_of = run, device_of
        triton.runtime.driver._active = driver


def measured(name: str, kernel: Any, architecture: str) -> Compiled:
    """What ptxas says of a compiled kernel."""
    from triton.backends.nvidia.compiler import get_ptxas

    number = int(architecture.removeprefix("sm_"))
    target = f"{architecture}a" if number >= 90 else architecture
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        command = [get_ptxas(number).path, "-v", f"--gpu-name={target}", str(source), "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.findall(r"Used (\d+) registers", said)[-1])
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return Compiled(name, kernel.metadata.shared, registers, spills, kernel.asm["ptx"])


def layer(
    architecture: str, dtype: torch.dtype, form: str, num_tokens: int, activation: Activation = GPT_OSS_SWIGLU
) -> dict[str, Compiled]:
    """Everything that a call with 128 experts of sizes 2048 and 768 compiles; the stack has two of them here."""
    experts, hidden, inner, top_k = 2, 2048, 768, 8
    data = ExpertWeights.from_dense(
        torch.zeros(experts, 2 * inner, hidden), torch.zeros(experts, hidden, inner), None, None, activation
    )
    stored, _, rows = form.partition("/")
    weights = data.quantize(stored, row_format=rows or "float")  # type: ignore[arg-type]
    x = torch.zeros(num_tokens, hidden, dtype=dtype)
    routing = Routing(torch.zeros(num_tokens, top_k, dtype=torch.long), torch.zeros(num_tokens, top_k))
    with compiling(architecture) as found:
        problem = triton_tuning.replace(engine.problem(x, routing, weights), num_experts=128)
        how = triton_tuning.choose(problem, device(architecture), ("auto", None), invariant=False)
        engine.launch(x, routing, weights, how)
    return {name: measured(name, kernel, architecture) for name, kernel in found.items()}


def tensors_of(arguments: Any) -> Iterator[torch.Tensor]:
    """Every tensor among them, those of tuples included."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple | list):
            yield from tensors_of(argument)


def relaunched(architecture: str, num_tokens: int) -> None:
    """Fail unless later launches of each kernel hand the driver what the first did, for their own tensors."""
    weights, other = (
        ExpertWeights.from_dense(torch.zeros(3, 64, 64).bfloat16(), torch.zeros(3, 64, 32).bfloat16()) for _ in "ab"
    )
    x = torch.zeros(num_tokens, 64).bfloat16()
    routing = Routing(torch.zeros(num_tokens, 2, dtype=torch.long), torch.zeros(num_tokens, 2))

    def values(argument: Any) -> Any:
        if isinstance(argument, tuple | list):
            return [values(a) for a in argument]
        if isinstance(argument, torch.Tensor):
            return argument.dtype, argument.shape
        return getattr(argument, "value", None if hasattr(argument, "base") else argument)

    with launching(architecture) as handed:
        for layer in (weights, weights, other):
            engine.run(x, routing, layer, ("auto", None))
        kinds = engine._launches()._COMPILED
        known = len(kinds)
        engine.run(torch.zeros(num_tokens * 64 + 1).bfloat16()[1:].view(-1, 64), routing, other, ("auto", None))
        assert len(kinds) == known + 1, "a kernel that was compiled for multiples of 16 takes other pointers"
    count = len(handed) // 4
    first, second, third = (handed[i * count : (i + 1) * count] for i in range(3))
    assert [a[0] for a in first] == [a[0] for a in second] == [a[0] for a in third], "other kernels"
    for layer, calls in ((weights, first), (weights, second), (other, third)):
        given = [t.data_ptr() for call in calls for t in tensors_of(call)]
        assert layer.gate_up.data.data_ptr() in given
        assert layer.down.data.data_ptr() in given
    for a, b in [*zip(first, second, strict=True), *zip(first, third, strict=True)]:
        assert len(a) == len(b), a[0]
        for i, (u, v) in enumerate(zip(a[1:], b[1:], strict=True)):
            told = type(u).__name__ == "LazyDict" == type(v).__name__  # what hooks are told of a launch
            assert told or values(u) == values(v), f"{a[0]}, argument {i}: {u}, then {v}"
        print("relaunched", a[0], len(a))


def edges(architecture: str) -> None:
    """Compile a call of sizes that Triton specialises on, each with another activation, dtype, plan and extra."""
    shapes = ((1, 1, 1, 1, 1), (5, 1, 2, 3, 1), (2, 16, 1, 2, 2), (40, 24, 48, 4, 2), (3, 64, 64, 2, 2))
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for i, (shape, activation) in enumerate(itertools.product(shapes, problems.ACTIVATIONS[::6])):
        sizes, dtype = problems.Sizes(*shape), dtypes[i % 3]
        made = problems.weights(sizes, activation, dtype, bias=i % 2 == 0, transposed=i % 4 == 1)
        x = torch.zeros(sizes.num_tokens, sizes.hidden_size, dtype=dtype)
        routing = problems.routing(sizes, weight_on="input" if i % 3 == 0 else "output")
        strategy = (("auto", None), ("grouped", None), ("blockwise", 40), ("all_experts", None))[i % 4]
        if strategy[0] == "all_experts":
            routing = problems.routing(sizes)
        with compiling(architecture) as found:
            how = engine.plan(x, routing, made, strategy)
            engine.launch(x, routing, made, how)
        print("edge", shape, activation.code, dtype, how.strategy, *sorted(found), flush=True)


def main(arguments: list[str]) -> None:
    """Print a line for each kernel of the chosen architectures, dtypes and formats, at several numbers of tokens."""
    if "relaunch" in arguments:
        for architecture, num_tokens in itertools.product([a for a in arguments if a in ARCHITECTURES], (1, 100)):
            relaunched(architecture, num_tokens)
        return
    architectures = [a for a in arguments if a in ARCHITECTURES] or list(ARCHITECTURES)
    if "edges" in arguments:
        for architecture in architectures:
            edges(architecture)
        return
    dtypes = [a for a in arguments if a in ("bfloat16", "float16", "float32")] or ["bfloat16"]
    forms = [a for a in arguments[:] if a.partition("/")[0] in FORMATS and a not in dtypes] or dtypes
    tokens = [int(a) for a in arguments if a.isdigit()] or [1, 64, 512, 4096]
    for architecture, dtype, form, num_tokens in itertools.product(architectures, dtypes, forms, tokens):
        for kernel in layer(architecture, getattr(torch, dtype), form, num_tokens).values():
            print(
                f"{architecture} {dtype:8} {form:12} T={num_tokens:<5} {kernel.name:16} shared {kernel.shared:6} of "
                f"{device(architecture).shared_memory}  registers {kernel.registers:3}  spills {kernel.spills:4}  "
                f"{'wgmma' if 'wgmma.mma' in kernel.ptx else 'mma' if 'mma.sync' in kernel.ptx else '-'}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
