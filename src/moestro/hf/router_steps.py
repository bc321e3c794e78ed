"""Routers of a served model for few tokens in one call of the engine, where Transformers has six operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moestro.hf.norms import any_floats
from moestro.hf.stand_in import KEPT, Kept, own_forward, plain_values, stand_in
from moestro.ops import native
from moestro.ops.dispatch import prepare
from moestro.ops.projection import PROJECTION
from moestro.ops.projection.cpu import linear
from moestro.ops.tensors import Layout, layout_key
from moestro.tolerances import disagreement

_TRIED = 128
"""Random rows on which a router is tried: half of them small, whose experts' weights are nearly equal."""

_CLEAR = 8
"""So many of them need a clear choice, whose last logit is that far above the next one that no rounding turns it."""


class Routes(Kept):
    """What one router was found to compute: by (rows, dtype, threads, plain values, class) a `Route`, or None."""

    def __init__(self) -> None:
        self.by_call: dict[tuple[Any, ...], Route | None] = {}


class Route:
    """The engine's call for one router whose parameters lie where they lay."""

    def __init__(
        self, engine: Any, layout: list[Layout], sizes: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        self.engine, self.layout, self.sizes, self.dtypes = engine, layout, sizes, dtypes

    def run(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Logits [T, E], weights and ids [T, K]; None for logits that only PyTorch's own operations take."""
        (experts, top_k), (logits_dtype, weights_dtype), tokens = self.sizes, self.dtypes, len(x)
        logits = torch.empty_strided((tokens, experts), (experts, 1), dtype=x.dtype, device=x.device)
        weights = torch.empty_strided((tokens, top_k), (top_k, 1), dtype=weights_dtype, device=x.device)
        ids = torch.empty_strided((tokens, top_k), (top_k, 1), dtype=torch.int64, device=x.device)
        to = logits.data_ptr(), ids.data_ptr(), weights.data_ptr(), native.FLOATS[weights_dtype]
        good = self.engine.run(torch.get_num_threads(), tokens, x.data_ptr(), x.stride(0), *to)
        return (logits.to(logits_dtype), weights, ids) if good else None


def serve_router_steps(model: nn.Module) -> None:
    """Have the engine score few tokens where a router's own code computes what the engine does, in place."""
    if native.missing() is None:
        for module in model.modules():
            if is_router(module):
                stand_in(module, _routed)


def is_router(module: nn.Module) -> bool:
    """Whether it looks like a router: a weight [E, H], maybe a bias [E], and how many experts it picks."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    alone = not module._modules and not module._buffers and set(module._parameters) <= {"weight", "bias"}
    if not type(module).__name__.endswith("Router") or not alone or weight is None or weight.dim() != 2:
        return False
    top_k = module.__dict__.get("top_k")
    return isinstance(top_k, int) and 0 < top_k <= len(weight) and (bias is None or bias.shape == weight.shape[:1])


def _routed(module: Any, forward: Any, x: Any, *others: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    if others or type(x) is not Tensor or not x.is_cpu or x.dim() not in (2, 3) or x.is_neg():
        return None
    if not x.numel() or x.stride(-1) != 1:
        return None
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    found = route_of(module, rows, x.dim())
    return None if found is None else found.run(rows)


def route_of(module: Any, rows: Tensor, dim: int) -> Route | None:
    """The engine's call that a router keeps for so many rows, which its own forward is given in `dim` dimensions; None
    where it has none."""
    kept = module.__dict__.get(KEPT)
    if not isinstance(kept, Routes):
        kept = module.__dict__[KEPT] = Routes()
    how = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), plain_values(module), type(module)
    key, layout = (len(rows), dim, rows.dtype, how), layout_key(parameters(module))
    found = kept.by_call.get(key)
    if key not in kept.by_call or (found is not None and found.layout != layout):
        found = kept.by_call[key] = _made(module, rows, dim, layout)
    return found


def parameters(module: nn.Module) -> list[Tensor]:
    """The tensors whose places a router's call knows."""
    return [tensor for tensor in module._parameters.values() if tensor is not None]


def _made(module: Any, rows: Tensor, dim: int, layout: list[Layout]) -> Route | None:
    """The first way to score that gives what the module's own forward gives for random rows, of one sequence where it
    is given sequences."""
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    if (
        not is_router(module)
        or rows.dtype != weight.dtype
        or rows.shape[1] != weight.shape[1]
        or (bias is not None and bias.dtype != rows.dtype)
    ):
        return None
    chosen = prepare(PROJECTION, rows, weight, bias).implementation
    isa = next((isa for isa in native.ISAS if f"cpu-{isa.name}" == chosen), None)
    if isa is None or (bias is not None and bias.stride(0) != 1):
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    probe = torch.randn(_TRIED, rows.shape[1], generator=generator, device="cpu", dtype=torch.float32)
    probe[::2] *= 0.02
    probe = probe.to(rows.dtype)
    wanted = own_forward(module)(module, probe if dim == 2 else probe[None])
    if not _is_routing(wanted, module.top_k, len(weight)):
        return None
    sizes = len(weight), module.top_k
    for router in _ways(module):
        made = native.engine().RoutingStep(
            isa=any_floats().index,
            logits=linear(isa, rows.dtype, weight, bias),
            router=router,
            top_k=module.top_k,
        )
        route = Route(made, layout, sizes, (wanted[0].dtype, wanted[1].dtype))
        found = route.run(probe)
        if found is not None and _agrees(found, wanted):
            return route
    return None


def _ways(module: nn.Module) -> Iterator[Any]:
    """Ways to get from logits to weights that families have, for the engine."""
    scales = (1.0, *(value for value in vars(module).values() if isinstance(value, float) and value > 0))
    for scale in dict.fromkeys(scales):
        for score, on_logits, renormalize in (
            ("softmax", True, False),
            ("softmax", False, False),
            ("sigmoid", False, True),
            ("sigmoid", False, False),
        ):
            yield native.engine().Router(
                score=native.SCORES[score],
                select_on_logits=on_logits,
                renormalize=renormalize,
                epsilon=0.0,
                floor=0.0,
                scale=scale,
                logit_scale=1.0,
            )


def _is_routing(found: Any, top_k: int, num_experts: int) -> bool:
    """Whether these are logits [T, E], weights [T, K] and ids [T, K]."""
    if not isinstance(found, tuple) or len(found) != 3 or not all(isinstance(each, Tensor) for each in found):
        return False
    logits, weights, ids = found
    shapes = logits.shape == (_TRIED, num_experts) and weights.shape == ids.shape == (_TRIED, top_k)
    return shapes and ids.dtype == torch.int64 and weights.dtype in native.FLOATS and weights.dtype != torch.float64


def _agrees(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    """Whether the logits are equal, and the weight of every expert is in each row whose choice is clear."""
    logits, weights, ids = wanted
    if disagreement(found[0], logits) is not None:
        return False
    clear = torch.ones(len(logits), dtype=torch.bool, device="cpu")
    if ids.shape[1] < logits.shape[1]:
        best = logits.float().topk(ids.shape[1] + 1).values
        clear = best[:, -2] - best[:, -1] > 4 * torch.finfo(logits.dtype).eps * best[:, -2:].abs().amax(1)
    mine, theirs = (
        torch.zeros(logits.shape, device="cpu").scatter_(1, each[2], each[1].float())[clear] for each in (found, wanted)
    )
    rows = zip(mine, theirs, strict=True)
    return len(mine) >= _CLEAR and all(disagreement(a, b, weights.dtype) is None for a, b in rows)
