"""The kernels of top-k, grouping and routing compiled for GPUs that are not here, and what they need.

TRITON_INTERPRET=0 python -m ops.compiled_routing sm_90    (or without arguments: every architecture)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from moestro.ops import gpu_checks, topk
from moestro.ops.grouping import triton as grouping
from moestro.routing import GroupLimit, Scoring, route

from . import ordered
from .compiled import ARCHITECTURES, Compiled, compiling, device, measured, taken_for_a_gpu

ROUTERS = (
    ("softmax-renormalized", 128, 8, None),
    ("softmax-topk", 32, 4, None),
    ("sigmoid-renormalized", 256, 8, GroupLimit(8, 4)),
    ("sqrtsoftplus", 384, 6, None),
    ("sparsemixer", 16, 2, None),
    (replace(Scoring(), renormalize=2.0, logit_softcap=30.0), 2048, 10, None),
    (replace(Scoring("sigmoid"), shared_experts=1), 257, 6, None),
)


def kernels(architecture: str) -> Iterator[tuple[str, Compiled]]:
    """What is compiled and with what it was called, for every shape and scoring here."""
    for called, call in calls():
        with compiling(architecture) as found, taken_for_a_gpu():
            call()
        for name, kernel in found.items():
            yield called, measured(name, kernel)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that launch every kernel, and their names."""
    for num_pairs, num_experts in ((8, 8), (1 << 17, 128), (4096, 2048)):
        ids, name = torch.zeros(num_pairs, 1, dtype=torch.long), f"TK={num_pairs} E={num_experts}"
        yield name, partial(ordered.rows, ids, num_experts, 64)
        yield name, partial(grouping.group_by_expert, ids, num_experts)
        yield name, partial(grouping.block_schedule, ids, num_experts, 64)
    for dtype, num_experts, k in ((torch.float32, 128, 8), (torch.bfloat16, 128, 8), (torch.float32, 4096, 64)):
        scores = torch.zeros(9, num_experts, dtype=dtype)
        yield f"E={num_experts} K={k} {dtype}", partial(topk.run, scores, k)
    slots = torch.zeros(9, 8)
    yield "T=9 K=8", partial(gpu_checks.launch, slots.long(), slots, 128)
    for scoring, num_experts, k, groups in ROUTERS:
        logits, correction = torch.zeros(9, num_experts), None if groups is None else torch.zeros(num_experts)
        yield f"{scoring} E={num_experts}", partial(route, logits, k, scoring, correction, groups)


def main(arguments: list[str]) -> None:
    """Print a line for each kernel."""
    for architecture in arguments or list(ARCHITECTURES):
        for called, kernel in kernels(architecture):
            most = device(architecture).shared_memory
            print(
                f"{architecture} {kernel.name} ({called}) shared {kernel.shared} of {most} "
                f"registers {kernel.registers} spills {kernel.spills} asserts {kernel.ptx.count('call.uni')} "
                f"vectors {kernel.ptx.count('ld.global.v')}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
