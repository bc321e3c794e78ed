"""What a call costs the host on a CPU: microseconds of processor time around experts so small that nothing else counts.

    python benchmarks/host_calls.py

`empty` routes every slot to no expert. Launches on a GPU are measured by tests/ops/host_calls.py, with a recorder in
the place of the launcher.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import moestro
from moestro import Experts, ExpertWeights, MoE, Routing, TopKRouter
from moestro.formats import SplitTensor

H, I, E, K = 32, 32, 8, 2  # noqa: E741
REPEATS, ROUNDS = 1000, 15
FORMATS = ("bfloat16", "mxfp4", "mxfp4, unstacked")


def microseconds(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Of processor time a call, the median of rounds."""
    for _ in range(repeats // 10):
        call()
    spent = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(repeats):
            call()
        spent.append((time.process_time() - start) / repeats * 1e6)
    return statistics.median(spent)


def weights_in(name: str) -> ExpertWeights:
    """Random experts in a format, stacked or not."""
    dense = ExpertWeights.from_dense(torch.randn(E, 2 * I, H).bfloat16(), torch.randn(E, H, I).bfloat16())
    weights = dense.quantize(name.partition(",")[0])
    if "unstacked" not in name:
        return weights
    split = [SplitTensor(tuple((each[e],) for e in range(E))) for each in (weights.gate_up, weights.down)]
    return ExpertWeights(*split)


def main() -> None:
    """Print a line for each format and number of tokens."""
    torch.set_num_threads(1)
    with torch.no_grad():
        for name in FORMATS:
            weights = weights_in(name)
            moe = MoE(TopKRouter(H, E, K), Experts.from_weights(weights)).eval()
            for num_tokens in (1, 64):
                x = torch.randn(num_tokens, H).bfloat16()
                ids = torch.rand(num_tokens, E).argsort(1)[:, :K].contiguous()
                routing = Routing(ids, torch.rand(num_tokens, K))
                empty = routing.with_ids(torch.full_like(ids, -1))
                calls = {
                    "expert_mlp, empty": lambda x=x, r=empty, w=weights: moestro.expert_mlp(x, r, w),
                    "expert_mlp": lambda x=x, r=routing, w=weights: moestro.expert_mlp(x, r, w),
                    "router": lambda x=x, moe=moe: moe.router(x),
                    "MoE": lambda x=x, moe=moe: moe(x),
                }
                found = ", ".join(f"{what} {microseconds(call):.1f}" for what, call in calls.items())
                print(f"{name}, T = {num_tokens}: {found} us", flush=True)


if __name__ == "__main__":
    main()
