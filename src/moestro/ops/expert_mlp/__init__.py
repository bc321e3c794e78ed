"""expert_mlp: the one primitive. Everything else rewrites its routing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moestro import formats, machine, settings
from moestro.errors import invalid_input
from moestro.formats.dense import DENSE_FORMATS
from moestro.ops import _select, gpu, gpu_checks, native
from moestro.ops.expert_mlp import cpu, plain, reference, triton, triton_known, tuning
from moestro.ops.grouping import choose_block_size
from moestro.types import EMPTY, Routing
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
            weights that require a gradient, a gradient of anything with rows as int8, meta tensors.
    """
    _check(x, routing, weights)
    fits = native.fits(routing, weights.num_experts) or gpu_checks.check(
        routing.expert_ids, routing.routing_weights, weights.num_experts
    )
    if not fits:
        routing.check(weights.num_experts, "expert_mlp")
    return run(x, routing, weights, strategy)


def run(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> Tensor:
    """`expert_mlp` without the checks, for a routing that is known to fit."""
    if torch.compiler.is_compiling():
        return library.traced(x, routing, weights, strategy)
    y = _again(x, routing, weights, strategy)
    return _carry_out(_chosen(x, routing, weights), x, routing, weights, strategy) if y is None else y


def run_any(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> Tensor:
    """`run` for a routing whose ids at or beyond the number of experts stand for empty slots.

    They are made -1 for implementations to which they are not: two launches that a GPU's kernels do without.
    """
    if torch.compiler.is_compiling():
        stays = library.stays_on_device(x, routing, weights)
        return library.traced(x, routing if stays else _within(routing, weights.num_experts), weights, strategy)
    if native.fits(routing, weights.num_experts):
        return run(x, routing, weights, strategy)
    y = _again(x, routing, weights, strategy)
    if y is not None:
        return y
    chosen = _chosen(x, routing, weights)
    if chosen.name != gpu.IMPLEMENTATION:
        routing = _within(routing, weights.num_experts)
    return _carry_out(chosen, x, routing, weights, strategy)


def _within(routing: Routing, num_experts: int) -> Routing:
    ids = routing.expert_ids
    return routing.with_ids(ids.masked_fill(ids >= num_experts, EMPTY))


def _again(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> Tensor | None:
    """What a GPU's kernels compute where they have computed a call like this one; else None."""
    if x.is_cuda or settings.current().implementation == gpu.IMPLEMENTATION:
        return triton.again(x, routing, weights, strategy)
    return None


def _chosen(x: Tensor, routing: Routing, weights: ExpertWeights) -> _select.Implementation:
    return _select.select("expert_mlp", x, routing, weights)


def _carry_out(
    chosen: _select.Implementation, x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str
) -> Tensor:
    if not torch.is_autocast_enabled("cpu" if x.is_cpu else x.device.type):
        return cast(Tensor, chosen.call(x, routing, weights, strategy))
    with torch.autocast(x.device.type, enabled=False):  # the dtypes of x and the weights say what is computed in
        return cast(Tensor, chosen.call(x, routing, weights, strategy))


def resolve_strategy(routing: Routing, weights: ExpertWeights, strategy: str) -> tuple[tuning.Choice, int | None]:
    """The strategy that will run and why, and the block size if one was named."""
    name, block_size, reason = _named_strategy(strategy)
    if name != "auto":
        return tuning.Choice(name, reason), block_size
    return tuning.choose_strategy(routing.expert_ids.numel(), weights.num_experts), None


def explain_strategy(name: str, x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> tuning.Choice:
    """How the implementation of this name would walk the work, and why."""
    if name != gpu.IMPLEMENTATION:
        return resolve_strategy(routing, weights, strategy)[0]
    asked, block_size, by = _named_strategy(strategy)
    plan = triton.plan(x, routing, weights, (asked, block_size))
    return tuning.Choice(asked if asked == "all_experts" else plan.strategy, f"{by}; {plan}" if by else str(plan))


def _named_strategy(strategy: str) -> tuple[str, int | None, str]:
    """The strategy that the caller or the settings name, with its block size and by whom; "auto" if none is."""
    asked, block_size = tuning.parse_strategy(strategy)
    if asked != "auto":
        return asked, block_size, "asked for by the caller"
    forced = settings.current().strategy
    if forced is None:
        return "auto", None, ""
    return *tuning.parse_strategy(forced), f"forced by moestro.use or {settings.STRATEGY_VARIABLE}"


def _run_plain(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> Tensor:
    if weights.input_format != "float" and x.dtype in (torch.bfloat16, torch.float16):
        return _run_plain(x.float(), routing, weights, strategy).to(x.dtype)
    choice, block_size = resolve_strategy(routing, weights, strategy)
    if routing.expert_ids.numel() == 0:
        return plain.nothing(x, routing, weights)
    if choice.strategy == "selective":
        return plain.selective(x, routing, weights)
    if choice.strategy == "grouped":
        return plain.grouped(x, routing, weights)
    if choice.strategy == "all_experts":
        return plain.all_experts(x, routing, weights)
    size = block_size or measured_block_size(x, routing, weights)
    return plain.blockwise(x, routing, weights, size)


def measured_block_size(x: Tensor, routing: Routing, weights: ExpertWeights) -> int:
    """The block size for this shape on this machine, from its measured roof (about a second, once a process)."""
    roof = machine.roof(x.dtype, x.device.type)
    bytes_per_weight = weights.gate_up.format.bits / 8
    return choose_block_size(routing.expert_ids.numel(), weights.num_experts, roof.balance, bytes_per_weight)


def _run_cpu(isa: native.Isa, x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> Tensor:
    name, block_size, _ = _named_strategy(strategy)
    return cpu.run(isa, x, routing, weights, (name, block_size))


def _run_triton(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> Tensor:
    name, block_size, _ = _named_strategy(strategy)
    return triton.run(x, routing, weights, (name, block_size), triton_known.facts(x, routing, strategy))


def _run_reference(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> Tensor:
    resolve_strategy(routing, weights, strategy)
    return reference.expert_mlp(x, routing, weights).to(x.dtype)


def _check(x: Tensor, routing: Routing, weights: ExpertWeights) -> None:
    if x.dim() != 2 or x.shape[1] != weights.hidden_size or x.dtype not in _DTYPES:
        raise invalid_input(
            "expert_mlp",
            got=f"x {list(x.shape)} of {x.dtype}",
            needs=f"[num_tokens, {weights.hidden_size}] of float32, bfloat16, float16 or float64",
            fix="Flatten batch and sequence: x.reshape(-1, hidden_size).",
        )
    if routing.num_tokens != x.shape[0]:
        raise invalid_input(
            "expert_mlp",
            got=f"{x.shape[0]} rows of x and a routing of {routing.num_tokens} tokens",
            needs="one row of ids for each row of x",
            fix="Route the same tokens that you pass.",
        )
    if not x.device == routing.expert_ids.device == weights.gate_up.device:
        raise invalid_input(
            "expert_mlp",
            got=f"x on {x.device}, routing on {routing.expert_ids.device}, weights on {weights.gate_up.device}",
            needs="one device",
            fix="Move the tokens to the weights with .to(device).",
        )


def _plain_supports(x: Tensor, routing: Routing, weights: ExpertWeights) -> str | None:
    for name, stored in (("gate_up", weights.gate_up), ("down", weights.down)):
        form = stored.format
        if form not in DENSE_FORMATS:
            if formats.FORMATS.get(form.name) != form:
                return f"it reads the formats of moestro.formats.FORMATS, and {name} is stored as {form.name}"
            if torch.is_grad_enabled() and any(t.requires_grad for t in stored.tensors):
                return f"experts stored as {form.name} are not trained, and a tensor of {name} requires a gradient"
    if weights.input_format != "float" and _wants_gradient((x, routing.routing_weights, *weights.tensors)):
        return (
            f"rows rounded to {weights.input_format} have no gradient, and a tensor requires one: "
            "call it under torch.no_grad()"
        )
    return "meta tensors hold no values to compute with" if x.device.type == "meta" else None


def _wants_gradient(tensors: Iterable[Tensor]) -> bool:
    """Whether a derivative of what is computed from these is being asked for, forward or backward."""
    return forward_ad._current_level >= 0 or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


_select.register(
    "expert_mlp",
    [
        *(
            _select.Implementation(
                f"cpu-{isa.name}", partial(cpu.supports, isa), partial(_run_cpu, isa), partial(cpu.excludes, isa)
            )
            for isa in native.ISAS or (native.ABSENT,)
        ),
        _select.Implementation(gpu.IMPLEMENTATION, triton.supports, _run_triton),
        _select.Implementation("torch", _plain_supports, _run_plain),
        _select.Implementation("reference", _plain_supports, _run_reference),
    ],
)

from moestro.ops.expert_mlp import library  # noqa: E402  (defines torch.ops.moestro.expert_mlp over `run`)
