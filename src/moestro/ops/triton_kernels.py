"""Device code that several operations share."""

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


@triton.jit
def tanh(z):
    """Hyperbolic tangent; near 0 by its series, where the quotient would cancel."""
    e = tl.exp(-2.0 * tl.abs(z))
    far = (1.0 - e) / (1.0 + e)
    s = z * z
    near = z * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835)))))
    return tl.where(tl.abs(z) < 0.25, near, tl.where(z < 0, -far, far))
