"""What storing experts in fewer bits costs a language model: measures of its outputs against a baseline's.

Sums are float64 and taken in a fixed order, so the same outputs give the same numbers on every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.errors import invalid_input
from moestro.types import EMPTY

CHUNK_ITEMS = 1 << 20
"""Logits that are in float64 at a time."""


@dataclass(frozen=True)
class Window:
    """A piece of a document: tokens start to stop - 1 are read, each predicts the next one.

    Attributes:
        start, stop: positions in the document.
        skip: how many of its predictions are not scored, since an earlier window made them.
    """

    start: int
    stop: int
    skip: int

    @property
    def num_scored(self) -> int:
        return self.stop - self.start - self.skip


def windows(num_tokens: int, context: int) -> Iterator[Window]:
    """Windows of at most `context` tokens that score every token of a document but the first, each once.

    From the second window on, a scored token has at least half of the context before it.
    """
    scored = 0
    while scored < num_tokens - 1:
        start = max(scored - context // 2, 0)
        stop = min(start + context, num_tokens - 1)
        yield Window(start, stop, scored - start)
        scored = stop


@dataclass(frozen=True, eq=False)
class Scores:
    """What one window says of each token, all [T] on the CPU.

    Attributes:
        nats, baseline_nats: float64, negative log-likelihood of the tokens by either model.
        divergence: float64, KL(baseline || model) of the distributions over the vocabulary, in nats.
        agrees: bool, whether both models hold the same token for the likeliest.
    """

    nats: Tensor
    baseline_nats: Tensor
    divergence: Tensor
    agrees: Tensor


def score(logits: Tensor, baseline_logits: Tensor, targets: Tensor) -> Scores:
    """Compare two models' predictions of the same tokens, a few rows at a time.

    Args:
        logits, baseline_logits: [T, vocabulary], any floating-point dtype, on one device.
        targets: [T], the tokens that came.

    Raises:
        InvalidInputError: logits with NaN or infinity, but for the minus infinity of an impossible token.
    """
    for name, values in (("logits", logits), ("baseline logits", baseline_logits)):
        _check_logits(name, values)
    height = max(CHUNK_ITEMS // max(logits.shape[1], 1), 1)
    pieces = [
        _score(*piece)
        for piece in zip(*(torch.split(values, height) for values in (logits, baseline_logits, targets)), strict=True)
    ]
    nats, baseline_nats, divergence, agrees = (torch.cat(parts).cpu() for parts in zip(*pieces, strict=True))
    return Scores(nats, baseline_nats, divergence, agrees)


def _check_logits(name: str, logits: Tensor) -> None:
    if bool((logits.isnan() | logits.isposinf()).any()) or bool(logits.isneginf().all(-1).any()):
        raise invalid_input(
            "quality",
            got=f"{name} with NaN or infinity",
            needs="finite predictions",
            fix="Compute in float32 or bfloat16, and look at the weights.",
        )


def _score(logits: Tensor, baseline_logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_q, log_p = (F.log_softmax(values.double(), -1) for values in (logits, baseline_logits))
    nats, baseline_nats = (-values.gather(1, targets[:, None])[:, 0] for values in (log_q, log_p))
    p = log_p.exp()
    divergence = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1).clamp_(min=0.0)
    return nats, baseline_nats, divergence, logits.argmax(-1) == baseline_logits.argmax(-1)


def changed_choices(expert_ids: Tensor, baseline_ids: Tensor) -> tuple[int, int]:
    """How many of the baseline's choices another routing of the same tokens does not make, and of how many.

    Args:
        expert_ids, baseline_ids: [T, K], in any order of slots; -1 is no choice.
    """
    chosen = baseline_ids != EMPTY
    missing = (baseline_ids[:, :, None] != expert_ids[:, None, :]).all(-1) & chosen
    return int(missing.sum()), int(chosen.sum())


def nearest_rank(values: Tensor, share: float) -> float:
    """The smallest of the values [N] that at least this share of them do not exceed."""
    return float(values.sort().values[max(math.ceil(share * values.numel()) - 1, 0)])


@dataclass(frozen=True)
class Likelihood:
    """How well a model predicts a text.

    Attributes:
        num_tokens: that were predicted.
        num_bytes: of UTF-8 that these tokens stand for.
        nats: their negative log-likelihood.
    """

    num_tokens: int
    num_bytes: int
    nats: float

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.num_bytes

    @property
    def bits_per_token(self) -> float:
        return self.nats / math.log(2) / self.num_tokens

    @property
    def perplexity(self) -> float:
        """e to the mean nats a token."""
        return math.exp(min(self.nats / self.num_tokens, 700.0))


@dataclass(frozen=True)
class LayerChange:
    """One expert layer against the baseline's.

    Attributes:
        path: its name in the model.
        error: L2 norm of the difference of both outputs over that of the baseline's, all tokens together, where both
            layers are given the baseline's inputs and routing.
        changed: share of the baseline's (token, slot) choices that the model does not make in its own forward pass.
    """

    path: str
    error: float
    changed: float


@dataclass(frozen=True)
class Change:
    """A model against its baseline.

    Attributes:
        likelihood, baseline: of the text.
        divergence, divergence_p99: mean and 99th percentile over tokens of KL(baseline || model), in nats.
        agreement: share of tokens for which both models hold the same token for the likeliest.
        layers: in the order in which they run.
    """

    likelihood: Likelihood
    baseline: Likelihood
    divergence: float
    divergence_p99: float
    agreement: float
    layers: tuple[LayerChange, ...]

    @property
    def expert_error(self) -> float:
        """Mean over the layers."""
        return sum(layer.error for layer in self.layers) / max(len(self.layers), 1)

    @property
    def changed_routing(self) -> float:
        """Mean over the layers."""
        return sum(layer.changed for layer in self.layers) / max(len(self.layers), 1)


class Tally:
    """Gathers `Change` from one window after the other.

    Args:
        paths: names of the expert layers, in the order in which they run.
    """

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._paths = paths
        self._scores: list[Scores] = []
        self._errors = [0.0] * len(paths)
        self._norms = [0.0] * len(paths)
        self._changed = [0] * len(paths)
        self._choices = [0] * len(paths)

    def add_scores(self, scores: Scores) -> None:
        """The predictions of a window."""
        self._scores.append(scores)

    def add_outputs(self, layer: int, output: Tensor, baseline: Tensor) -> None:
        """A layer's outputs [T, H] for the same inputs and routing."""
        wide = baseline.double()
        self._errors[layer] += float((output.double() - wide).square_().sum())
        self._norms[layer] += float(wide.square_().sum())

    def add_routing(self, layer: int, expert_ids: Tensor, baseline_ids: Tensor) -> None:
        """A layer's choices [T, K] in either model's own forward pass."""
        changed, choices = changed_choices(expert_ids, baseline_ids)
        self._changed[layer] += changed
        self._choices[layer] += choices

    def change(self, num_bytes: int) -> Change:
        """All windows together.

        Args:
            num_bytes: of UTF-8 that the scored tokens stand for.
        """
        nats, baseline_nats, divergence, agrees = (
            torch.cat([getattr(scores, name) for scores in self._scores])
            for name in ("nats", "baseline_nats", "divergence", "agrees")
        )
        n = nats.numel()
        return Change(
            likelihood=Likelihood(n, num_bytes, float(nats.sum())),
            baseline=Likelihood(n, num_bytes, float(baseline_nats.sum())),
            divergence=float(divergence.mean()),
            divergence_p99=nearest_rank(divergence, 0.99),
            agreement=int(agrees.sum()) / n,
            layers=tuple(
                LayerChange(path, _ratio(error, norm) ** 0.5, changed / max(choices, 1))
                for path, error, norm, changed, choices in zip(
                    self._paths, self._errors, self._norms, self._changed, self._choices, strict=True
                )
            ),
        )


def _ratio(error: float, norm: float) -> float:
    """0 where nothing differs, whatever the norm."""
    if error == 0.0:
        return 0.0
    return error / norm if norm else math.inf
