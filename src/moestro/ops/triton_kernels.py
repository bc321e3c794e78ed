"""Device code that several operations share: values of a routing, asserted where they lie."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_slots", "num_experts"])
def check_kernel(ids, weights, num_slots, num_experts, HAS_WEIGHTS: tl.constexpr, TILE: tl.constexpr):
    """A tile of slots: ids lie in -1..num_experts-1, and the weight of a slot that is not empty is finite."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < num_slots
    expert = tl.load(ids + place, mask=inside, other=-1)
    in_range = (expert >= -1) & (expert < num_experts)
    tl.device_assert(in_range, "[moestro] expert_ids must lie in -1..num_experts-1", mask=inside)
    if HAS_WEIGHTS:
        weight = tl.load(weights + place, mask=inside, other=0.0)
        finite = (tl.abs(weight) < float("inf")) | (expert == -1)
        tl.device_assert(finite, "[moestro] routing_weights must be finite", mask=inside)
