"""Triton's kernels compiled for GPUs that are not here: what a launch would compile, and what that needs.

    TRITON_INTERPRET=0 python -m ops.compiled sm_90 bfloat16 mxfp4    (or without arguments: everything)
    TRITON_INTERPRET=0 python -m ops.compiled loops sm_90    (the instructions of loops with matrix products, too)
    TRITON_INTERPRET=0 python -m ops.compiled sm_90 fp8-e4m3-b128/fp8-e4m3    (rows rounded to 8-bit floats)
    TRITON_INTERPRET=0 python -m ops.compiled sm_90 mxfp4+apart    (unstacked experts)

A driver that answers for a GPU stands in for the one that is missing; kernels are compiled by the very calls that
launch them, and not run.
"""

from __future__ import annotations

import functools
import io
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import moestro
from moestro import Activation, ExpertWeights, Routing
from moestro.formats import FORMATS
from moestro.ops import dispatch, gpu
from moestro.ops.expert_mlp import triton as engine
from moestro.ops.expert_mlp import triton_tuning
from moestro.ops.gpu import Device, shared_memory
from moestro.types import GPT_OSS_SWIGLU

from . import problems
from .stored import apart
from .triton_calls import launch

ARCHITECTURES = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_120": 170}
"""Multiprocessors of a part of each: A100, RTX 3090, RTX 4090, H200, RTX 5090."""


SAID: dict[str, str] = {}
"""By the hash of a kernel: what ptxas has said."""


@functools.cache
def cache(whole: bool) -> tempfile.TemporaryDirectory[str]:
    """A folder of this process's own for what it compiles, whole or in part: a kernel found there was compiled here."""
    return tempfile.TemporaryDirectory()


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled for one GPU: its name, bytes of shared memory, registers, spilled bytes, PTX and code."""

    name: str
    shared: int
    registers: int
    spills: int
    ptx: str
    cubin: bytes

    @property
    def loop(self) -> int:
        """How many instructions its longest loop with a matrix product has, 0 where there is none."""
        from triton.backends.nvidia.compiler import get_ptxas

        tool = Path(get_ptxas(90).path).with_name("nvdisasm")
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            sass = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
        return longest_loop(sass)


class _Driver:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    get_current_stream = int  # which takes the number of a device, and is no function of Python's either


def device(architecture: str) -> Device:
    """The device that a name of `ARCHITECTURES` stands for."""
    number = int(architecture.removeprefix("sm_"))
    capability = divmod(number, 10)
    return Device(capability, ARCHITECTURES[architecture], shared_memory(capability))


def in_part(patch: pytest.MonkeyPatch) -> None:
    """Have kernels compiled as far as their launchers look at them, which is not to code."""
    from triton.backends.nvidia.compiler import CUDABackend

    def left_out(self: Any, source: Any, metadata: dict[str, Any], *_: Any) -> str:
        metadata |= dict.fromkeys(("shared", "tmem_size", "global_scratch_size", "profile_scratch_size"), 0)
        metadata |= {"name": "", "global_scratch_align": 1, "profile_scratch_align": 1}
        return ""

    for stage in ("make_llir", "make_ptx", "make_cubin"):
        patch.setattr(CUDABackend, stage, left_out)


@contextmanager
def launching(architecture: str) -> Iterator[list[tuple[Any, ...]]]:
    """While open, launches get as far as the driver for this architecture; what it would be handed is in the list."""
    handed: list[tuple[Any, ...]] = []
    with compiling(architecture, handed):
        yield handed


@contextmanager
def compiling(architecture: str, handed: list[tuple[Any, ...]] | None = None) -> Iterator[dict[str, Any]]:
    """While open, launches compile for this architecture, run nothing, and are kept in the dictionary.

    With a list for what the driver would be handed, launches are carried out up to there.
    """
    import triton
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    found: dict[str, Any] = {}
    run, told = JITFunction.run, [] if handed is None else handed

    def keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        with redirect_stdout(io.StringIO()) as log:
            kernel = found[self.fn.__name__] = run(self, *args, **{**kwargs, "warmup": handed is None})
        if log.getvalue():  # it is compiled once
            SAID[kernel.hash] = log.getvalue()
        return kernel

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", _Driver(int(architecture.removeprefix("sm_"))))
        patch.setattr(JITFunction, "run", keep)
        patch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
        patch.setattr(triton.knobs.cache, "dir", cache(handed is None).name)
        if handed is not None:
            in_part(patch)
        patch.setattr(gpu, "device_of", lambda tensor: device(architecture))
        patch.setattr(CompiledKernel, "_init_handles", lambda self: None)
        patch.setattr(CompiledKernel, "run", property(lambda self: lambda *a: told.append((self.src.name, *a))))
        yield found
    forget()


def forget() -> None:
    """Drop what has been compiled, and what launches it."""
    from triton.runtime.jit import JITFunction

    for module in list(sys.modules.values()):
        for value in list(vars(module).values()) if module and module.__name__.startswith("moestro.") else ():
            if isinstance(value, JITFunction):
                value.device_caches.clear()
    gpu.kept.cache_clear()
    dispatch._KEPT.clear()


def measured(name: str, kernel: Any) -> Compiled:
    """What ptxas has said of a kernel while it was compiled."""
    assert kernel.metadata.global_scratch_size == 0, "in_part takes it for granted"
    registers = int(re.findall(r"Used (\d+) registers", SAID[kernel.hash])[-1])
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", SAID[kernel.hash])))
    return Compiled(name, kernel.metadata.shared, registers, spills, kernel.asm["ptx"], kernel.asm["cubin"])


def copies(ptx: str) -> list[int]:
    """Bytes of each thread's asynchronous copies to shared memory, each size once."""
    return sorted({int(n, 0) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)})


def waits(ptx: str) -> list[str]:
    """How many of Hopper's products may go on where some are waited for, each number once."""
    return sorted(set(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", ptx)))


def longest_loop(sass: str) -> int:
    """Instructions of the longest loop that multiplies matrices and has no other such loop inside, as disassembled."""
    labels: dict[str, int] = {}
    code: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in map(str.strip, sass.splitlines()):
        if line.startswith(".L") and line.endswith(":"):
            labels[line[:-1]] = len(code)
        elif line.startswith("/*") and not line.startswith("/* 0x"):
            code.append(line)
            target = re.search(r"BRA.*`\((\.L\w+)\)", line)
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(code)))
    found = [(a, b) for a, b in loops if any("MMA" in line for line in code[a:b])]
    inner = [(a, b) for a, b in found if not any((a, b) != (c, d) and a <= c and d <= b for c, d in found)]
    # A wait for a tensor map's copies may lie behind its loop and jump back into it.
    whole = [(a, b) for a, b in inner if not any(c < a < d < b for c, d in inner)]
    return max((b - a for a, b in whole), default=0)


def layer(
    architecture: str, dtype: torch.dtype, form: str, num_tokens: int, activation: Activation = GPT_OSS_SWIGLU
) -> dict[str, Compiled]:
    """Everything that a call with 128 experts of sizes 2048 and 768 compiles; the stack has two of them here."""
    experts, hidden, inner, top_k = 2, 2048, 768, 8
    data = ExpertWeights.from_dense(
        torch.zeros(experts, 2 * inner, hidden), torch.zeros(experts, hidden, inner), None, None, activation
    )
    stored, _, rows = form.removesuffix("+apart").partition("/")
    weights = data.quantize(stored, input_format=rows or "float")  # type: ignore[arg-type]
    if form.endswith("+apart"):
        weights = apart(weights)
    x = torch.zeros(num_tokens, hidden, dtype=dtype)
    routing = Routing(torch.zeros(num_tokens, top_k, dtype=torch.long), torch.zeros(num_tokens, top_k))
    with compiling(architecture) as found:
        problem = triton_tuning.replace(engine.problem(x, routing, weights), num_experts=128)
        how = triton_tuning.choose(problem, device(architecture), ("auto", None), invariant=False)
        launch(x, routing, weights, how)
    return {name: measured(name, kernel) for name, kernel in found.items()}


@contextmanager
def taken_for_a_gpu() -> Iterator[None]:
    """While open, tensors of the CPU are taken as those of a GPU are, for calls that launch nothing."""
    with moestro.use(implementation=gpu.IMPLEMENTATION), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "unusable", lambda device: None)
        yield


def edges(architecture: str) -> None:
    """Compile a call of sizes that Triton specialises on, each with another activation, dtype, plan and extra."""
    shapes = ((1, 1, 1, 1, 1), (5, 1, 2, 3, 1), (2, 16, 1, 2, 2), (40, 24, 48, 4, 2), (3, 64, 64, 2, 2))
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for i, shape in enumerate((*shapes, *shapes[:1:-1])):
        sizes, dtype, activation = problems.Sizes(*shape), dtypes[i % 3], problems.ACTIVATIONS[::6][(i + i // 3) % 3]
        made = problems.weights(sizes, activation, dtype, bias=i % 2 == 0, transposed=i % 4 == 1)
        x = torch.zeros(sizes.num_tokens, sizes.hidden_size, dtype=dtype)
        routing = problems.routing(sizes, weight_on="input" if i % 3 == 0 else "output")
        strategy = (("auto", None), ("grouped", None), ("blockwise", 40), ("all_experts", None))[i % 4]
        if strategy[0] == "all_experts":
            routing = problems.routing(sizes)
        with compiling(architecture) as found:
            how = engine.plan(x, routing, made, strategy)
            launch(x, routing, made, how)
        print("edge", shape, activation.code, dtype, how.strategy, *sorted(found), flush=True)


def main(arguments: list[str]) -> None:
    """Print a line for each kernel of the chosen architectures, dtypes and formats, at several numbers of tokens."""
    architectures = [a for a in arguments if a in ARCHITECTURES] or list(ARCHITECTURES)
    if "edges" in arguments:
        for architecture in architectures:
            edges(architecture)
        return
    dtypes = [a for a in arguments if a in ("bfloat16", "float16", "float32")] or ["bfloat16"]
    forms = [
        a for a in arguments[:] if a.removesuffix("+apart").partition("/")[0] in FORMATS and a not in dtypes
    ] or dtypes
    tokens = [int(a) for a in arguments if a.isdigit()] or [1, 64, 512, 4096]
    for architecture, dtype, form, num_tokens in itertools.product(architectures, dtypes, forms, tokens):
        for kernel in layer(architecture, getattr(torch, dtype), form, num_tokens).values():
            print(
                f"{architecture} {dtype:8} {form:12} T={num_tokens:<5} {kernel.name:16} shared {kernel.shared:6} of "
                f"{device(architecture).shared_memory}  registers {kernel.registers:3}  spills {kernel.spills:4}  "
                f"{f'loop {kernel.loop:4}  ' if 'loops' in arguments else ''}"
                f"copies {','.join(map(str, copies(kernel.ptx))) or '-'}  "
                f"waits {','.join(waits(kernel.ptx)) or '-'}  "
                f"{'wgmma' if 'wgmma.mma' in kernel.ptx else 'mma' if 'mma.sync' in kernel.ptx else '-'}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
