"""How logits become a choice of experts and their weights, as data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.errors import invalid_input
from moestro.ops.tensors import not_of
from moestro.types import WeightOn

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"]
SelectOn = Literal["scores", "logits"]

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, repr=False)
class Scoring:
    """What a router does with its logits z [T, E].

    In order: ``z * logit_scale``, then the soft-cap ``c * tanh(z / c)``, the score function, selection of the top k,
    division by a norm of the selected scores (`renormalize`), and `scale`.

    Attributes:
        score: "softmax", "sigmoid", "sqrtsoftplus" (``sqrt(log(1 + exp(z)))``, DeepSeek-V4) or "sparsemixer"
            (Phi-3.5-MoE at inference: slot after slot, a softmax over the experts not yet taken whose logit is within
            ``2 * tolerance`` of the selected one, relative to the larger magnitude; selects on logits).
        select_on: "scores": the function sees all experts, and its results (plus the correction bias) are ranked.
            "logits": the logits (plus the correction bias) are ranked, and the function sees the k selected ones.
            For softmax these are different models.
        renormalize: True divides a token's weights by their sum, a number p >= 1 by their p-norm, False leaves them.
        epsilon: added to that divisor.
        floor: least value of that divisor, so that k scores of zero give weights of zero.
        scale: factor on the weights, after everything else (DeepSeek's routed scaling factor).
        logit_scale: factor on the logits (an inverse temperature).
        logit_softcap: the cap c > 0, or None.
        weight_on: "output", or "input" for Llama 4's ``E(w * x)``.
        shared_experts: how many of the last logits belong to experts that every token uses. They take no part in the
            selection, get slots of their own behind the k selected, and count in the renormalisation (Inkling).
        tolerance: of "sparsemixer".

    Raises:
        InvalidInputError: a value is unknown or out of range.
    """

    score: ScoreFunction = "softmax"
    select_on: SelectOn = "scores"
    renormalize: bool | float = False
    epsilon: float = 0.0
    floor: float = TINY
    scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    weight_on: WeightOn = "output"
    shared_experts: int = 0
    tolerance: float = 0.01

    def __post_init__(self) -> None:
        for name, allowed in (("score", ScoreFunction), ("select_on", SelectOn), ("weight_on", WeightOn)):
            _require(getattr(self, name) in get_args(allowed), name, self, " or ".join(map(repr, get_args(allowed))))
        order = self.renormalize
        _require(isinstance(order, bool) or 1 <= order < float("inf"), "renormalize", self, "True, False or p >= 1")
        for name in ("epsilon", "floor", "tolerance", "shared_experts"):
            _require(0 <= getattr(self, name) < float("inf"), name, self, "a finite value of at least 0")
        for name in ("scale", "logit_scale"):
            _require(abs(getattr(self, name)) < float("inf"), name, self, "a finite value")
        cap = self.logit_softcap
        _require(cap is None or 0 < cap < float("inf"), "logit_softcap", self, "None or a finite cap above 0")
        if self.score == "sparsemixer":
            _require(self.select_on == "logits", "select_on", self, '"logits" for the score "sparsemixer"')

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, value: str | Scoring) -> Scoring:
        """The value itself, or the preset of that name (`PRESETS`).

        Raises:
            InvalidInputError: no preset has that name.
        """
        if isinstance(value, Scoring):
            return value
        if value not in PRESETS:
            raise invalid_input(
                "Scoring",
                got=f"{value!r}",
                needs=f"a Scoring or one of {', '.join(PRESETS)}",
                fix="dataclasses.replace(Scoring.of(name), scale=...) varies a preset.",
            )
        return PRESETS[value]

    def __repr__(self) -> str:
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Scoring({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    @property
    def takes_infinity(self) -> bool:
        """Whether a logit of +inf has a finite score."""
        return self.score == "sigmoid" or self.logit_softcap is not None


def why_unscored(logits: Tensor, scoring: Scoring, scores: Container[str]) -> str | None:
    """Why an implementation in float32 that has these scores cannot score the logits; None if it can."""
    reason = not_of((torch.float32,), logits, named="logits are")
    return reason or (None if scoring.score in scores else f"it has no score {scoring.score!r}")


def _require(ok: bool, name: str, scoring: Scoring, needs: str) -> None:
    if not ok:
        got = f"{name}={getattr(scoring, name)!r}"
        raise invalid_input("Scoring", got=got, needs=needs, fix="moestro.routing.PRESETS holds values in use.")


PRESETS = {
    "softmax": Scoring(),
    "softmax-renormalized": Scoring(renormalize=True),
    "softmax-topk": Scoring(select_on="logits"),
    "sigmoid": Scoring("sigmoid"),
    "sigmoid-renormalized": Scoring("sigmoid", renormalize=True, epsilon=1e-20),
    "sqrtsoftplus": Scoring("sqrtsoftplus", renormalize=True, epsilon=1e-20),
    "llama4": Scoring("sigmoid", select_on="logits", weight_on="input"),
    "sparsemixer": Scoring("sparsemixer", select_on="logits"),
}
"""The scorings in use, by name. Variations are `dataclasses.replace(Scoring.of(name), ...)`."""


def prepare(logits: Tensor, scoring: Scoring, masked: Tensor | None) -> Tensor:
    """Logits [T, E] after scale and soft-cap; the masked become the least finite value, never -inf."""
    z = logits
    if scoring.logit_scale != 1.0:
        z = z * scoring.logit_scale
    if scoring.logit_softcap is not None:
        z = scoring.logit_softcap * torch.tanh(z / scoring.logit_softcap)
    return z if masked is None else z.masked_fill(masked, torch.finfo(z.dtype).min)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: torch.softmax(z, dim=-1),
    "sigmoid": torch.sigmoid,
    # The clamp keeps the slope of the square root finite where softplus underflows.
    "sqrtsoftplus": lambda z: F.softplus(z).clamp(min=TINY).sqrt(),
}
"""Of all logits that a token has, or of the selected ones. "sparsemixer" looks at both (`score_selected`)."""


def score(z: Tensor, scoring: Scoring) -> Tensor:
    """The score function over the last dimension of prepared logits; same shape."""
    return _FUNCTIONS[scoring.score](z)


def score_selected(z: Tensor, ids: Tensor, scoring: Scoring) -> Tensor:
    """Scores [T, K] of experts selected by logits: the function sees the selected experts only."""
    if scoring.score == "sparsemixer":
        return _sparsemixer(z, ids, scoring.tolerance)
    return score(z.gather(-1, ids), scoring)


def _sparsemixer(z: Tensor, ids: Tensor, tolerance: float) -> Tensor:
    """Source: Phi-3.5-MoE (arXiv 2409.12136) at inference; ids [T, K] in order of falling logit."""
    taken = torch.zeros_like(z, dtype=torch.bool)
    least = torch.finfo(z.dtype).min
    weights = []
    for slot in torch.split(ids, 1, dim=-1):
        chosen = z.gather(-1, slot).detach()
        far = (chosen - z) / torch.maximum(z.abs(), chosen) > 2 * tolerance
        weights.append(torch.softmax(z.masked_fill(far | taken, least), dim=-1).gather(-1, slot))
        taken = taken.scatter(-1, slot, True)
    return torch.cat(weights, dim=-1)


def finish(weights: Tensor, scoring: Scoring) -> Tensor:
    """Renormalise and scale the weights [T, K] of each token."""
    if scoring.renormalize is True:
        weights = weights / (weights.sum(-1, keepdim=True) + scoring.epsilon).clamp(min=scoring.floor)
    elif scoring.renormalize is not False:
        norm = torch.linalg.vector_norm(weights, scoring.renormalize, dim=-1, keepdim=True)
        weights = weights / (norm + scoring.epsilon).clamp(min=scoring.floor)
    return weights if scoring.scale == 1.0 else weights * scoring.scale
