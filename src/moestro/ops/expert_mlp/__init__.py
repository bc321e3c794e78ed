"""expert_mlp: the one primitive. Everything else rewrites its routing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from moestro import settings
from moestro.errors import invalid_input, several_devices
from moestro.ops import dispatch, gpu, gpu_checks, native
from moestro.ops.expert_mlp import cpu, plain, reference, triton
from moestro.ops.inputs import check_call
from moestro.ops.measured import measures
from moestro.ops.tensors import call_key
from moestro.types import Routing, make_up_a_routing, no_routing
from moestro.weights import ExpertWeights

__all__ = ["expert_mlp"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def expert_mlp(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> Tensor:
    """y[t] = sum over k of w[t, k] * E_{id[t, k]}(x[t]); an id of -1 adds nothing and costs nothing.

    Args:
        x: [T, H], float32, bfloat16, float16 or float64, on the device of the weights.
        routing: [T, K].
        weights: E experts of hidden size H, stored in any format. Packed experts are dequantised as they are used, a
            panel of rows at a time; no whole expert is ever written out. With `input_format="int8"` rows are rounded
            and integers multiplied (`moestro.reference.round_rows`), in float32 between the products.
        strategy: "auto" (by shape), "grouped", "blockwise" (or "blockwise-64" to set the block size), "selective"
            or "all_experts". All give the same result up to rounding.

    Returns:
        [T, H] in the dtype of x. Sums over slots are accumulated in float32 at least. Differentiable in x, the
        routing weights, the biases, and the weights of experts in a dense format.

    Raises:
        InvalidInputError: shapes, devices, dtypes, ids or weights do not fit; an unknown strategy.
        UnsupportedError: no implementation, or not the forced one, can run these arguments: an unknown format, packed
            weights that require a gradient, a gradient of anything with int8 inputs, meta tensors.
    """
    if torch.compiler.is_compiling():
        check_values(routing, weights.num_experts)
        return library.traced(x, routing, weights, strategy)
    check_call("expert_mlp", x, routing, weights)
    if routing.checked_for is None or routing.checked_for > weights.num_experts:
        check_arguments(x, routing, weights, strategy)  # first, for they say more than values do
        check_values(routing, weights.num_experts)
    y: Tensor = dispatch.call(EXPERT_MLP, x, routing, weights, strategy)
    return y


def run(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> Tensor:
    """`expert_mlp` below the public edge: an id outside 0..E-1 is an empty slot; no value is looked at."""
    if torch.compiler.is_compiling():
        return library.traced(x, routing, weights, strategy)
    y: Tensor = dispatch.call(EXPERT_MLP, x, routing, weights, strategy)
    return y


def check_values(routing: Routing, num_experts: int) -> None:
    """Check ids and weights: in one pass of the engine or one launch, where they lie so."""
    values = routing.expert_ids, routing.routing_weights, num_experts
    if native.ids_and_weights_fit(*values) or gpu_checks.check(*values):
        routing.mark_checked(num_experts)
    else:
        routing.check(num_experts, "expert_mlp")


def check_arguments(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> None:
    """Refuse shapes, dtypes and devices that do not belong together."""
    if x.dim() != 2 or x.shape[1] != weights.hidden_size or x.dtype not in _DTYPES:
        raise invalid_input(
            "expert_mlp",
            got=f"x {list(x.shape)} of {x.dtype}",
            needs=f"[num_tokens, {weights.hidden_size}] of float32, bfloat16, float16 or float64",
            fix="Flatten batch and sequence: x.reshape(-1, hidden_size).",
        )
    ids, routing_weights = routing.expert_ids, routing.routing_weights
    if not make_up_a_routing(ids, routing_weights):
        raise no_routing("expert_mlp", ids, routing_weights)
    if routing.num_tokens != x.shape[0]:
        raise invalid_input(
            "expert_mlp",
            got=f"{x.shape[0]} rows of x and a routing of {routing.num_tokens} tokens",
            needs="one row of ids for each row of x",
            fix="Route the same tokens that you pass.",
        )
    if not x.device == ids.device == weights.gate_up.device:
        raise several_devices("expert_mlp", x=x.device, routing=ids.device, weights=weights.gate_up.device)


def _look(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> dispatch.Looked | None:
    ids, routing_weights, parts = routing.expert_ids, routing.routing_weights, weights.parts
    given, words = call_key(x, ids, routing_weights), parts.call_key()
    if given is None or words is None:
        return None
    forced = settings.current()
    aligned = (x.is_cpu and forced.implementation != gpu.IMPLEMENTATION) or gpu.alignment(x, ids, routing_weights)
    deterministic = torch.are_deterministic_algorithms_enabled()
    where = forced.implementation, forced.strategy, strategy, deterministic, torch.get_num_threads(), measures()
    return ("expert_mlp", where, cpu.PIECES, routing.weight_on, aligned, given, words), parts.tensors


def _routed(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> Sequence[int] | None:
    parts = weights.parts
    return parts.read_by(set(chain.from_iterable(routing.expert_ids.tolist()))) if parts.unstacked else None


EXPERT_MLP = dispatch.register(
    dispatch.Operation(
        "expert_mlp",
        (
            *(
                dispatch.Implementation(f"cpu-{isa.name}", partial(cpu.prepare, isa))
                for isa in native.ISAS or (native.ABSENT,)
            ),
            dispatch.Implementation(gpu.IMPLEMENTATION, triton.prepare),
            dispatch.Implementation("torch", plain.prepare),
            dispatch.Implementation("reference", reference.prepare),
        ),
        check_arguments,
        _look,
        _routed,
    )
)

from moestro.ops.expert_mlp import library  # noqa: E402  (defines torch.ops.moestro.expert_mlp over `run`)
