"""Run as a script: every array that the engine reads ends where a page begins that may not be touched.

Prints "whole" if every format and instruction set gave the bits that it gives from ordinary memory; reading one byte
too many ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import torch
from torch import Tensor

import moestro
from moestro.formats import PackedTensor
from moestro.ops import native
from moestro.types import GPT_OSS_SWIGLU, Routing
from ops import problems
from ops.engines import ROUNDING, RUNNING, STORED, TILED, run
from ops.rounding import INTEGER_FORMATS
from ops.stored import sizes_for
from tolerances import bit_equal

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
kept: list[mmap.mmap] = []


def at_the_edge(t: Tensor | None) -> Tensor | None:
    """The same values in memory of their own, whose last byte is the last of the readable pages."""
    if t is None:
        return None
    pages = -(-t.nbytes // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    kept.append(memory)
    start = pages * PAGE - t.nbytes
    memory[start : start + t.nbytes] = t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    view = torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=start).view(t.shape)
    guard = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages * PAGE
    assert LIBC.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), 0) == 0
    return view


def stack_at_the_edge(stored: PackedTensor) -> PackedTensor:
    parts = (stored.data, stored.scales, stored.zeros, stored.global_scales)
    data, *others = map(at_the_edge, parts)
    assert data is not None
    return PackedTensor(data, stored.format, *others)


def long_rows(name: str) -> None:
    """Rows of whole vectors of scales, of one, three and seven more, and of one less than a block or a half of it.

    With int8 inputs and in bfloat16.
    """
    group = sizes_for(name).hidden_size
    whole = ((1024, 1024 + group), (512 + group, 512), (512 + 7 * group, 512 + 3 * group))
    for hidden, intermediate in (*whole, (256 - group, 128 - group), (512 - group, 256 - group)):
        if hidden % group or intermediate % group or min(hidden, intermediate) <= 0:
            continue
        sizes = problems.Sizes(3, hidden, intermediate, 2, 2)
        plain = problems.weights(sizes, GPT_OSS_SWIGLU, torch.float32).quantize(name)
        edged = replace(plain, gate_up=stack_at_the_edge(plain.gate_up), down=stack_at_the_edge(plain.down))
        for num_tokens in (1, 3):
            x, routing = (
                torch.randn(num_tokens, hidden),
                problems.routing(replace(sizes, num_tokens=num_tokens), kind="full"),
            )
            for isa in ROUNDING:
                edge, expected = (run(isa, x, routing, replace(w, input_format="int8")) for w in (edged, plain))
                assert bit_equal(edge, expected), (isa.name, name, hidden)
            for isa in RUNNING:
                edge, expected = (run(isa, x.bfloat16(), routing, w) for w in (edged, plain))
                assert bit_equal(edge, expected), (isa.name, name, hidden)


def main() -> None:
    assert native.module is not None
    for name in STORED:
        for num_tokens, dtype in (
            (1, torch.float32),
            (40, torch.bfloat16),
            (3, torch.float16),
            (5, torch.bfloat16),
            (150, torch.bfloat16),
        ):
            torch.manual_seed(0)
            sizes = sizes_for(name, num_tokens=num_tokens)
            plain = problems.weights(sizes, GPT_OSS_SWIGLU, torch.float32, bias=True)
            plain = replace(plain.quantize(name), down_bias=plain.down_bias.bfloat16())
            x, routing = torch.randn(num_tokens, sizes.hidden_size).to(dtype), problems.routing(sizes, kind="full")
            weights = moestro.ExpertWeights(
                stack_at_the_edge(plain.gate_up),
                stack_at_the_edge(plain.down),
                at_the_edge(plain.gate_up_bias),
                at_the_edge(plain.down_bias),
                plain.activation,
            )
            routed = Routing(at_the_edge(routing.expert_ids), at_the_edge(routing.routing_weights))
            if name in INTEGER_FORMATS:
                for isa in ROUNDING:
                    edge = run(isa, at_the_edge(x), routed, replace(weights, input_format="int8"))
                    assert bit_equal(edge, run(isa, x, routing, replace(plain, input_format="int8"))), (isa.name, name)
            tiled = dtype == torch.bfloat16 and name not in ("float32", "float16")
            for isa in RUNNING + (TILED if tiled else []):
                edge = run(isa, at_the_edge(x), routed, weights)
                assert bit_equal(edge, run(isa, x, routing, plain)), (isa.name, name)
    for name in INTEGER_FORMATS:
        long_rows(name)
    print("whole")


if __name__ == "__main__":
    main()
