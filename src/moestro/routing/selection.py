"""From logits to a Routing: a pure function, without control flow on data."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro import settings
from moestro.errors import invalid_input
from moestro.ops import dispatch, gpu, topk
from moestro.ops.tensors import call_key
from moestro.routing import cpu, triton
from moestro.routing.groups import GroupLimit
from moestro.routing.scoring import Scoring, finish, prepare, score, score_selected
from moestro.types import EMPTY, Routing

# Below any real score, and far enough from the least float32 that the sum of several is finite.
_LOW = -1e30


def route(
    logits: Tensor,
    top_k: int,
    scoring: str | Scoring = "softmax-renormalized",
    correction: Tensor | None = None,
    groups: GroupLimit | None = None,
) -> Routing:
    """Select top_k experts a token and weigh them.

    A logit of -inf masks an expert: it is never selected, and where fewer than top_k are left the slots are empty
    (id -1, weight 0). The order of slots is that of falling choice; of equal ones the larger index comes first.
    Differentiable in the logits; traceable by torch.compile(fullgraph=True) and torch.export with dynamic T.

    Args:
        logits: [T, E]; with scoring.shared_experts S, [T, E + S]. Computed in float32, or float64 if it is float64.
        top_k: K, 1 <= K <= E.
        scoring: a `Scoring` or the name of a preset.
        correction: [E] added to what is ranked; it never reaches the weights (DeepSeek-V3's correction bias).
        groups: group-limited selection, or None.

    Returns:
        Routing with expert_ids int64 and routing_weights float32 (float64), [T, K + S].

    Raises:
        InvalidInputError: shapes, dtypes or sizes do not fit, or a logit is NaN (or +inf, unless the score of +inf
            is finite). On an accelerator and under torch.compile the check of values is an assertion on the device.
    """
    scoring = Scoring.of(scoring)
    _check_sizes(logits, top_k, scoring, correction, groups)
    logits = as_routed(logits)
    routing: Routing = dispatch.run(ROUTE, logits, top_k, scoring, correction, groups)
    return routing.mark_checked(logits.shape[-1])  # by construction


def _plain(
    logits: Tensor, top_k: int, scoring: Scoring, correction: Tensor | None, groups: GroupLimit | None
) -> Routing:
    """`route` in plain PyTorch, by whichever implementation of top-k is chosen."""
    masked = check_values(logits, scoring)
    num_routed = logits.shape[-1] - scoring.shared_experts
    z = prepare(logits, scoring, masked)
    ranked = score(z, scoring) if scoring.select_on == "scores" else z
    choice = ranked.detach()[:, :num_routed]
    if correction is not None:
        _check_correction(correction)
        choice = choice + correction.to(choice.dtype)
    if masked is not None:
        choice = choice.masked_fill(masked[:, :num_routed], -torch.inf)
    if groups is not None:
        choice = _limit(choice, groups)
    ids = best_indices(choice, top_k)
    empty = None if masked is None else choice.gather(-1, ids) == -torch.inf
    if scoring.shared_experts:
        shared = torch.arange(num_routed, logits.shape[-1], device=ids.device).expand(ids.shape[0], -1)
        ids = torch.cat([ids, shared], dim=-1)
        empty = None if empty is None else F.pad(empty, (0, scoring.shared_experts))
    return _weighted(z, ranked, ids, empty, scoring)


def as_routed(logits: Tensor) -> Tensor:
    """The logits in the dtype that routing is computed in: float32, or float64 if they are."""
    return logits if logits.dtype == torch.float64 else logits.float()


def weigh(logits: Tensor, expert_ids: Tensor, scoring: str | Scoring = "softmax-renormalized") -> Routing:
    """The routing whose experts were chosen elsewhere (by a table of token ids, for one) and only want weights.

    Args:
        logits: [T, E], as for `route`.
        expert_ids: [T, K]; -1 is an empty slot.
        scoring: as for `route`; `select_on` says which experts the score function sees.

    Raises:
        InvalidInputError: as for `route`, or an id is outside -1..E-1.
    """
    scoring = Scoring.of(scoring)
    _check_sizes(logits, 1, scoring, None, None)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    masked = check_values(logits, scoring)
    Routing(expert_ids, torch.ones_like(expert_ids, dtype=logits.dtype)).check(logits.shape[-1], "weigh")
    z = prepare(logits, scoring, masked)
    empty = expert_ids == EMPTY
    ids = expert_ids.long().masked_fill(empty, 0)
    ranked = score(z, scoring) if scoring.select_on == "scores" else z
    return _weighted(z, ranked, ids, empty, scoring).mark_checked(logits.shape[-1])


def _weighted(z: Tensor, ranked: Tensor, ids: Tensor, empty: Tensor | None, scoring: Scoring) -> Routing:
    weights = ranked.gather(-1, ids) if scoring.select_on == "scores" else score_selected(z, ids, scoring)
    if empty is not None:
        weights = weights.masked_fill(empty, 0.0)
        ids = ids.masked_fill(empty, EMPTY)
    return Routing(ids, finish(weights, scoring), scoring.weight_on)


def _limit(choice: Tensor, groups: GroupLimit) -> Tensor:
    """Exclude the experts of all but each token's best groups; a masked expert (-inf) stays masked."""
    by_group = choice.view(choice.shape[0], groups.num_groups, choice.shape[-1] // groups.num_groups).clamp(min=_LOW)
    best = by_group.topk(min(groups.best, by_group.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best_indices(best, groups.top_groups), True)
    excluded = ~kept.unsqueeze(-1).expand_as(by_group).flatten(-2) & (choice > -torch.inf)
    return choice.masked_fill(excluded, groups.excluded)


def _check_correction(correction: Tensor) -> None:
    finite = torch.isfinite(correction).all()
    if torch.compiler.is_compiling() or correction.device.type != "cpu":
        torch._assert_async(finite, "[route] the correction bias must be finite")
    elif not finite:
        raise invalid_input(
            "route",
            got="NaN or infinity in the correction bias",
            needs="a finite bias for every expert",
            fix="Mask an expert with a logit of -inf, or prune_experts.",
        )


def best_indices(choice: Tensor, k: int) -> Tensor:
    """Indices [T, k] of the largest of choice [T, E], in the order of `moestro.topk`, which also meets NaN."""
    if torch.compiler.is_compiling() or choice.device.type != "cpu":
        torch._assert_async((choice == choice).all(), "[route] scores plus correction must not be NaN")
    return topk.run(choice, k)


def _check_sizes(
    logits: Tensor, top_k: int, scoring: Scoring, correction: Tensor | None, groups: GroupLimit | None
) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise invalid_input(
            "route",
            got=f"logits {list(logits.shape)} of {logits.dtype}",
            needs="floating-point logits [num_tokens, num_experts]",
            fix="Flatten batch and sequence into num_tokens.",
        )
    num_experts = logits.shape[-1] - scoring.shared_experts
    if not 1 <= top_k <= num_experts:
        raise invalid_input(
            "route",
            got=f"top_k={top_k} with {num_experts} experts to select from",
            needs="1 <= top_k <= num_experts",
            fix="Lower top_k.",
        )
    if correction is not None and correction.shape != (num_experts,):
        raise invalid_input(
            "route",
            got=f"correction {list(correction.shape)}",
            needs=f"[{num_experts}], one value an expert",
            fix="Shared experts have none.",
        )
    if groups is not None:
        groups.check(num_experts, top_k)


def check_values(logits: Tensor, scoring: Scoring) -> Tensor | None:
    """Refuse NaN, and +inf unless its score is finite; say which logits are -inf, or None if none is.

    Where reading a value is not free (off the CPU, under torch.compile) the refusal is an assertion on the device and
    the mask is always there.
    """
    bound = "NaN" if scoring.takes_infinity else "NaN or +inf"
    if torch.compiler.is_compiling() or logits.device.type != "cpu":
        allowed = logits <= torch.inf if scoring.takes_infinity else logits < torch.inf  # false for NaN
        torch._assert_async(allowed.all(), f"[route] logits must not be {bound}")
        return logits == -torch.inf
    if logits.numel() == 0:
        return None
    low, high = (float(v) for v in torch.aminmax(logits.detach()))  # NaN if there is one
    if high != high or (high == torch.inf and not scoring.takes_infinity):
        token, expert = (~(logits < torch.inf)).nonzero()[0].tolist()
        raise invalid_input(
            "route",
            got=f"a logit of {logits[token, expert].item()} (token {token}, expert {expert})",
            needs=f"logits that are not {bound} (-inf masks an expert)",
            fix="Look for NaN or infinity in the router's input and weight.",
        )
    return logits == -torch.inf if low == -torch.inf else None


def _look(
    logits: Tensor, top_k: int, scoring: Scoring, correction: Tensor | None, groups: GroupLimit | None
) -> dispatch.Looked | None:
    given = (logits,) if correction is None else (logits, correction)
    tensors = call_key(*given)
    if tensors is None:
        return None
    aligned = logits.is_cpu or gpu.alignment(*given)
    where = settings.current().implementation, torch.get_num_threads()
    return ("route", where, top_k, scoring, groups, aligned, tensors), ()


def _prepare_plain(name: str, *arguments: Any) -> dispatch.Prepared:
    return dispatch.Prepared(name, _plain)


ROUTE = dispatch.register(
    dispatch.Operation(
        "route",
        (
            dispatch.Implementation("cpu-native", partial(cpu.prepare, _plain)),
            dispatch.Implementation("triton", partial(triton.prepare, _plain)),
            # What is forced here is the implementation of the top-k inside.
            *(
                dispatch.Implementation(name, partial(_prepare_plain, name))
                for name in ("torch", "branchless", "reference")
            ),
        ),
        look=_look,
    )
)
