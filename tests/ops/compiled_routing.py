"""The kernels of top-k, grouping and routing compiled for GPUs that are not here, and what they need.

TRITON_INTERPRET=0 python -m ops.compiled_routing sm_90    (or without arguments: every architecture)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from moestro.ops import gpu, gpu_checks
from moestro.ops.grouping import triton as grouping
from moestro.ops.topk import triton as topk
from moestro.routing import GroupLimit, Scoring
from moestro.routing import triton as routing

from .compiled import ARCHITECTURES, Compiled, compiling, device, measured

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
    for num_pairs, num_experts in ((8, 8), (512, 128), (1 << 17, 128), (4096, 2048)):
        ids = torch.zeros(num_pairs, 1, dtype=torch.long)
        calls = {
            "rows_kernel": lambda: grouping.group_rows(ids, num_experts, 64),  # noqa: B023
            "order_kernel": lambda: grouping.group_by_expert(ids, num_experts),  # noqa: B023
            "schedule_kernel": lambda: grouping.block_schedule(ids, num_experts, 64),  # noqa: B023
        }
        for name, call in calls.items():
            yield f"TK={num_pairs} E={num_experts}", one(architecture, name, call)
    for dtype, num_experts, k in ((torch.float32, 128, 8), (torch.bfloat16, 128, 8), (torch.float32, 4096, 64)):
        scores = torch.zeros(9, num_experts, dtype=dtype)
        yield f"E={num_experts} K={k} {dtype}", one(architecture, "topk_kernel", lambda: topk.topk(scores, k))  # noqa: B023
    ids, weights = torch.zeros(9, 8, dtype=torch.long), torch.zeros(9, 8)
    yield "T=9 K=8", one(architecture, "check_kernel", lambda: gpu_checks.launch(ids, weights, 128))
    for scoring, num_experts, k, groups in ROUTERS:
        logits, correction = torch.zeros(9, num_experts), None if groups is None else torch.zeros(num_experts)
        given = (logits, k, Scoring.of(scoring), correction, (1, 1, 1, 0.0) if groups is None else groups.sizes)
        yield f"{scoring} E={num_experts}", one(architecture, "route_kernel", lambda: routing.launch(*given))  # noqa: B023


def one(architecture: str, name: str, call: object) -> Compiled:
    """The kernel of this name that a call compiles."""
    gpu.kept.cache_clear()
    with compiling(architecture) as found:
        call()  # type: ignore[operator]
    return measured(name, found[name], architecture)


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
