"""Balance in training: losses that even out the load of experts, and DeepSeek's bias, which does so without a loss.

All are functions of what a router gives: scores or logits [T, E], and the `Routing` [T, K] before any rewrite. What is
never selected has no gradient but through the scores, so the counts are constants and the scores are not. Sums and
results are float32 whatever the dtype of the scores (float64 if that is theirs): float16 cannot count beyond 65,504.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.errors import invalid_input
from moestro.routing.selection import as_routed
from moestro.types import Routing


def switch_balance_loss(scores: Tensor, routing: Routing, num_sequences: int = 1) -> Tensor:
    """E * sum over e of f[e] * P[e]: the share of tokens that select an expert, times its mean score there.

    The mean of all sequences; K where all experts have the same load and score. Source: Switch Transformers, Fedus,
    Zoph and Shazeer 2021, arXiv:2101.03961, equations 4 to 6. Transformers has it as
    `switch_transformers.load_balancing_loss_func`.

    Args:
        scores: probabilities [T, E], for softmax routers ``logits.softmax(-1)``.
        routing: of the same tokens.
        num_sequences: T is so many sequences of one length, each of which is balanced by itself; 1 for the whole batch.

    Returns:
        A scalar, differentiable in scores.

    Raises:
        InvalidInputError: sizes do not fit.
    """
    _check("switch_balance_loss", scores, routing)
    tokens, num_experts = scores.shape
    if num_sequences < 1 or tokens % num_sequences:
        raise invalid_input(
            "switch_balance_loss",
            got=f"num_sequences={num_sequences} for {tokens} tokens",
            needs="a number of sequences that divides the tokens",
            fix="Leave it out to balance the whole batch.",
        )
    scores = as_routed(scores)
    used = selected(routing, num_experts).view(num_sequences, -1, num_experts)
    shares = used.to(scores.dtype).sum(1), scores.reshape(num_sequences, -1, num_experts).sum(1)
    share, mean = (total / max(tokens // num_sequences, 1) for total in shares)
    return num_experts * (share * mean).sum(-1).mean()


def olmoe_balance_loss(scores: Sequence[Tensor], routings: Sequence[Routing], counted: Tensor | None = None) -> Tensor:
    """E * sum over e of f[e] * P[e], where rows and scores of all layers are pooled before they are multiplied.

    Of one layer and one sequence it is Switch's. Source: OLMoE, Muennighoff et al. 2024, arXiv:2409.02060, equation 3,
    as Transformers computes it for Mixtral, OLMoE, Qwen and others: `olmoe.load_balancing_loss_func`.

    Args:
        scores: probabilities [T, E] of each layer.
        routings: of each layer.
        counted: bool [T], False for tokens that do not count, such as padding; None for all.

    Returns:
        A scalar, differentiable in scores.

    Raises:
        InvalidInputError: sizes do not fit, or no layer.
    """
    operation = "olmoe_balance_loss"
    if not scores or len(scores) != len(routings) or len({each.shape for each in scores}) != 1:
        raise invalid_input(
            operation,
            got=f"scores of {len(scores)} layers and {len(routings)} routings",
            needs="one routing for the scores of each layer, all [num_tokens, num_experts]",
            fix="Pass lists: [scores], [routing] for one layer.",
        )
    for layer, routing in zip(scores, routings, strict=True):
        _check(operation, layer, routing, counted)
    scores = [as_routed(layer) for layer in scores]
    tokens, num_experts = scores[0].shape
    weight = scores[0].new_ones(tokens) if counted is None else counted.to(scores[0].dtype)
    total = (weight.sum() * len(scores)).clamp(min=1)
    rows = scores[0].new_zeros(num_experts + 1)
    for routing in routings:
        ids = _inside(routing, num_experts)
        rows = rows.scatter_add(0, ids.reshape(-1), weight.repeat_interleave(ids.shape[1]))
    pooled = torch.stack([(layer * weight[:, None]).sum(0) for layer in scores]).sum(0)
    return num_experts * (rows[:num_experts] / total * (pooled / total)).sum()


def router_z_loss(logits: Tensor, counted: Tensor | None = None) -> Tensor:
    """Mean over tokens of (log sum exp of the logits)^2, which keeps logits small, and with them errors of rounding.

    Source: ST-MoE, Zoph et al. 2022, arXiv:2202.08906, equation 5. Transformers has it as
    `switch_transformers.router_z_loss_func`.

    Args:
        logits: [T, E].
        counted: bool [T], False for tokens that do not count; None for all.

    Raises:
        InvalidInputError: sizes do not fit.
    """
    _check("router_z_loss", logits, None, counted)
    squares = torch.logsumexp(as_routed(logits), -1).square()
    weight = torch.ones_like(squares) if counted is None else counted.to(squares.dtype)
    return (squares * weight).sum() / weight.sum().clamp(min=1)


def balanced_bias(bias: Tensor, counts: Tensor, rate: float = 1e-3) -> Tensor:
    """The correction bias after a step: `rate` more for experts with fewer rows than the mean, `rate` less for others.

    The bias takes part in the selection only, never in the weights. Source: Wang et al. 2024, "Auxiliary-Loss-Free Load
    Balancing Strategy for Mixture-of-Experts", arXiv:2408.15664, algorithm 1, as DeepSeek-V3 trains.

    Args:
        bias: [E], a router's `correction_bias`.
        counts: rows of each expert in the step, [E]; those of all ranks where tokens are spread.
        rate: of the update; DeepSeek-V3's is 0.001.

    Raises:
        InvalidInputError: shapes differ.
    """
    if bias.dim() != 1 or bias.shape != counts.shape:
        raise invalid_input(
            "balanced_bias",
            got=f"bias {list(bias.shape)} and counts {list(counts.shape)}",
            needs="both [num_experts]",
            fix="expert_counts(routing, num_experts) counts rows.",
        )
    counts = counts.to(bias.device, torch.float64 if counts.is_floating_point() else torch.int64)
    few = torch.sign(counts.sum() - len(counts) * counts)  # of the mean less each; of integers it rounds nothing
    return bias + rate * few.to(bias)


@dataclass(frozen=True)
class BiasUpdate:
    """The `balance` of a layer that balances by `balanced_bias`: rows are counted, and `update_biases` does the rest.

    Attributes:
        rate: of an update, above 0.
    """

    rate: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise invalid_input(
                "BiasUpdate", got=f"rate={self.rate}", needs="a number above 0", fix="DeepSeek-V3 takes 0.001."
            )


def _inside(routing: Routing, num_experts: int) -> Tensor:
    """Ids [T, K] of which those of no expert are num_experts."""
    ids = routing.expert_ids
    return torch.where((ids >= 0) & (ids < num_experts), ids, num_experts).long()


def selected(routing: Routing, num_experts: int) -> Tensor:
    """Bool [T, E]: which experts each token uses; empty slots use none."""
    ids = _inside(routing, num_experts)
    found = torch.zeros(len(ids), num_experts + 1, dtype=torch.bool, device=ids.device)
    return found.scatter(1, ids, True)[:, :num_experts]


def _check(operation: str, scores: Tensor, routing: Routing | None, counted: Tensor | None = None) -> None:
    fits = scores.dim() == 2 and scores.is_floating_point()
    fits = fits and (routing is None or routing.num_tokens == len(scores))
    if not fits or (counted is not None and counted.shape != scores.shape[:1]):
        said = "" if routing is None else f" and a routing of {routing.num_tokens} tokens"
        said += "" if counted is None else f", counted {list(counted.shape)}"
        raise invalid_input(
            operation,
            got=f"{list(scores.shape)} of {scores.dtype}{said}",
            needs="floating-point [num_tokens, num_experts], of the tokens that were routed",
            fix="Flatten batch and sequence into num_tokens.",
        )
