"""Values of a routing checked on a GPU in one launch that nobody waits for."""

from __future__ import annotations

from torch import Tensor

from moestro.ops import gpu

ASSERTING = (("debug", True), ("sanitize_overflow", False))
"""Options of a launch that keep a kernel's assertions on values, and add none on integers."""

_TILE = 512


def check(expert_ids: Tensor, routing_weights: Tensor | None, num_experts: int) -> bool:
    """Assert that ids lie in -1..num_experts-1 and weights of used slots are finite; False where it cannot look.

    A tensor on the CPU is none of its business, in the interpreter either: that keeps no assertion.
    """
    ids, weights = expert_ids, routing_weights
    given = [ids] if weights is None else [ids, weights]
    if not ids.is_cuda or any(gpu.unreadable(t.detach()) is not None or not t.is_contiguous() for t in given):
        return False
    launch(ids, weights, num_experts)
    return True


def launch(ids: Tensor, weights: Tensor | None, num_experts: int) -> None:
    """`check` of contiguous tensors where kernels run."""
    if ids.numel():
        values = (("HAS_WEIGHTS", weights is not None), ("TILE", _TILE))
        call = gpu.kept(gpu.kernels(__package__).check_kernel, values, ASSERTING, gpu.aligned(ids, weights))
        with gpu.on(ids):
            call(-(-ids.numel() // _TILE), ids, weights, ids.numel(), num_experts)
