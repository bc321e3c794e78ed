"""What a layer's step ends with in one call of the engine: its router, the experts behind it, and the sum with what
came before them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moestro import settings
from moestro.hf.experts import serve, weights_of
from moestro.hf.pending import Later
from moestro.hf.router_steps import Route, is_router, parameters, route_of
from moestro.hf.stand_in import (
    KEPT,
    Kept,
    is_called_as_is,
    is_served,
    is_untouched,
    own_forward,
    plain_values,
    with_parts,
)
from moestro.ops import native
from moestro.ops.dispatch import is_unwatched, prepare
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.ops.measured import measures
from moestro.ops.tensors import Layout, layout_key
from moestro.types import Routing
from moestro.weights import ExpertWeights

EXPERTS = "experts"


@dataclass(frozen=True, eq=False)
class ExpertStep:
    """The engine's call for a block whose router and experts lie where they lay."""

    route: Route
    handle: Any
    weights: ExpertWeights
    layout: list[Layout]

    def is_current(self, router: nn.Module, weights: object) -> bool:
        """Whether both are those that the call was made for, and lie as they lay."""
        if weights is not self.weights or self.layout != layout_key(self.weights.parts.tensors):
            return False
        return self.route.layout == layout_key(parameters(router))

    def later(self, x: Tensor, residual: Tensor) -> Later:
        """The call that gives residual + the block's result for x, both [B, 1, H]; False of it for logits that only
        PyTorch's own operations take."""
        out = torch.empty_strided(x.shape, (x.stride(0), x.stride(0), 1), dtype=x.dtype, device=x.device)
        rounded, to = native.FLOATS[self.route.dtypes[1]], (residual.data_ptr(), out.data_ptr())
        given = torch.get_num_threads(), x.shape[0], x.data_ptr(), x.stride(0), self.handle, rounded, *to
        return Later(((self.route.engine.run_experts, given),), (out,), (self, x, residual))


class Block(Kept):
    """What was found of one block.

    Attributes:
        children: the modules it had then.
        router: that of them which is one, if the others are its experts.
        by_call: by (tokens, dtype, strategy, how PyTorch and moestro are set) the state it was found in, and a step or
            None.
    """

    def __init__(self, block: Any) -> None:
        self.children = tuple(block._modules.values())
        self.router = _router_of(block)
        self.by_call: dict[tuple[Any, ...], tuple[tuple[Any, ...], ExpertStep | None]] = {}


def expert_step_for(block: Any, x: Tensor) -> ExpertStep | None:
    """The step of a block whose forward is a router and the experts behind it, for contiguous tokens [B, 1, H] of the
    CPU, whose numbers are not looked at; None where it is something else, or somebody is to see its parts."""
    kept = block.__dict__.get(KEPT)
    if type(kept) is not Block or kept.children != tuple(block._modules.values()):
        kept = block.__dict__[KEPT] = Block(block)
    router = kept.router
    if router is None or not is_served(router) or not is_unwatched(EXPERT_MLP):
        return None
    if not is_untouched(block) or not is_untouched(router):
        return None
    experts = block._modules[EXPERTS]
    strategy = _strategy_of(experts)
    if strategy is None:
        return None
    how = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), settings.current(), measures()
    key = x.shape[0], x.dtype, strategy, how
    state = plain_values(block), plain_values(router), own_forward(block), type(router)
    known, weights = kept.by_call.get(key), weights_of(experts)
    if known is None or known[0] != state or not (known[1] is None or known[1].is_current(router, weights)):
        known = kept.by_call[key] = state, _made(block, router, weights, x, strategy)
    return known[1]


def _router_of(module: Any) -> nn.Module | None:
    """The router of a module that has nothing else but experts; None of every other module."""
    children = module._modules
    if len(children) != 2 or EXPERTS not in children or module._parameters or module._buffers:
        return None
    first, last = children.values()
    router = last if first is children[EXPERTS] else first
    return router if is_router(router) else None


def _strategy_of(experts: Any) -> str | None:
    """That of experts whose call is that of `serve` and nothing else."""
    own = experts.__dict__.get("forward")
    if type(own) is not partial or own.func is not serve or own.args != (experts,) or not is_called_as_is(experts):
        return None
    strategy = own.keywords.get("strategy")
    return strategy if type(strategy) is str and len(own.keywords) == 1 else None


def _made(block: Any, router: Any, weights: object, x: Tensor, strategy: str) -> ExpertStep | None:
    """The step of a block that does what it is taken for."""
    if type(weights) is not ExpertWeights or weights.parts.unstacked or weights.hidden_size != x.shape[2]:
        return None  # of unstacked experts the ones that are read have to be known before they are
    rows = x.view(len(x), -1)
    route = route_of(router, rows, 2)
    if route is None or not _passes_on(block, route, x):
        return None
    form, (experts, top_k) = weights.gate_up.format, route.sizes
    if (form.is_dense and form.storage != x.dtype) or weights.num_experts != experts:
        return None
    ids = torch.zeros(len(x), top_k, dtype=torch.int64, device=x.device)
    routing = Routing.unchecked(ids, torch.zeros(len(x), top_k, dtype=torch.float32, device=x.device), "output")
    handle = prepare(EXPERT_MLP, rows, routing, weights, strategy).handle
    return None if handle is None else ExpertStep(route, handle, weights, layout_key(weights.parts.tensors))


def _passes_on(block: Any, route: Route, x: Tensor) -> bool:
    """Whether a block's forward gives what its experts make of its router's choice, by random tokens, with something
    small in place of the experts: these, and who is told of them, are to see no random tokens."""
    generator = torch.Generator("cpu").manual_seed(0)
    probe = torch.randn(x.shape, generator=generator, device="cpu", dtype=torch.float32).to(x.dtype)
    routed, stand = route.run(probe.view(len(x), -1)), _Weighed()
    if routed is None:
        return False
    try:
        found = own_forward(block)(with_parts(block, **{EXPERTS: stand}), probe)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    y, wanted = found[0] if isinstance(found, tuple) else found, stand(probe.view(len(x), -1), routed[2], routed[1])
    return (
        isinstance(y, Tensor) and y.dtype == x.dtype and y.shape == x.shape and torch.equal(y.view_as(wanted), wanted)
    )


class _Weighed(nn.Module):
    """What stands for the experts of a block in a trial: its result depends on every id and weight."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        factors = (top_k_weights.float() * (top_k_index + 1)).sum(-1, keepdim=True)
        return (hidden_states.float() * factors).to(hidden_states.dtype)
