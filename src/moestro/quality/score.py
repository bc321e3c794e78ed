"""What storing experts in fewer bits costs a language model: measures of its outputs against a baseline's.

Sums are float64 and taken in a fixed order, so the same outputs give the same numbers on every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.errors import invalid_input
from moestro.quality.report import Layer, Row
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


class Scores(NamedTuple):
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
        if bool((values.isnan() | values.isposinf()).any()) or bool(values.isneginf().all(-1).any()):
            raise invalid_input(
                "quality",
                got=f"{name} with NaN or infinity",
                needs="finite predictions",
                fix="Compute in float32 or bfloat16, and look at the weights.",
            )
    height = max(CHUNK_ITEMS // max(logits.shape[1], 1), 1)
    pieces = zip(*(torch.split(values, height) for values in (logits, baseline_logits, targets)), strict=True)
    return _joined([_score(*piece) for piece in pieces])


def _joined(pieces: list[Scores]) -> Scores:
    return Scores(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def _score(logits: Tensor, baseline_logits: Tensor, targets: Tensor) -> Scores:
    log_q, log_p = (F.log_softmax(values.double(), -1) for values in (logits, baseline_logits))
    nats, baseline_nats = (-values.gather(1, targets[:, None])[:, 0] for values in (log_q, log_p))
    p = log_p.exp()
    divergence = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1).clamp_(min=0.0)
    agrees = logits.argmax(-1) == baseline_logits.argmax(-1)
    return Scores(*(values.cpu() for values in (nats, baseline_nats, divergence, agrees)))


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


def likelihood(nats: Tensor, num_bytes: int) -> dict[str, Any]:
    """How well a text is predicted, by the names that `Row` has for it.

    Args:
        nats: [T], negative log-likelihoods of its tokens.
        num_bytes: of UTF-8 that these tokens stand for.
    """
    total, mean = float(nats.sum()), float(nats.mean())
    return {
        "bits_per_byte": total / math.log(2) / num_bytes,
        "bits_per_token": mean / math.log(2),
        "perplexity": math.exp(min(mean, 700.0)),
    }


class Tally:
    """Gathers what one window after the other says.

    Args:
        paths: names of the expert layers, in the order in which they run.
    """

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._paths = paths
        self._scores: list[Scores] = []
        self.sums = torch.zeros(len(paths), 4, dtype=torch.float64)
        """Of each layer: squares of its error and of the baseline's output, changed choices and all of them."""

    def add_scores(self, scores: Scores) -> None:
        """The predictions of a window."""
        self._scores.append(scores)

    def add_outputs(self, layer: int, output: Tensor, baseline: Tensor) -> None:
        """A layer's outputs [T, H] for the same inputs and routing."""
        wide = baseline.double()
        self.sums[layer, 0] += (output.double() - wide).square_().sum().cpu()
        self.sums[layer, 1] += wide.square_().sum().cpu()

    def add_routing(self, layer: int, expert_ids: Tensor, baseline_ids: Tensor) -> None:
        """A layer's choices [T, K] in either model's own forward pass."""
        self.sums[layer, 2:] += torch.tensor(changed_choices(expert_ids, baseline_ids))

    def rows(self, baseline: Row, row: Row, num_bytes: int) -> tuple[Row, Row]:
        """The rows of the baseline and of the model with what all windows together say.

        Args:
            baseline, row: how either stores its experts.
            num_bytes: of UTF-8 that the scored tokens stand for.
        """
        nats, baseline_nats, divergence, agrees = _joined(self._scores)
        layers = tuple(
            Layer(path, _ratio(error, norm) ** 0.5, changed / max(choices, 1))
            for path, (error, norm, changed, choices) in zip(self._paths, self.sums.tolist(), strict=True)
        )
        total = float(baseline_nats.sum())
        return replace(baseline, **likelihood(baseline_nats, num_bytes)), replace(
            row,
            **likelihood(nats, num_bytes),
            change=float(nats.sum()) / total - 1 if total else 0.0,
            kl_mean=float(divergence.mean()),
            kl_p99=nearest_rank(divergence, 0.99),
            top1_agreement=int(agrees.sum()) / nats.numel(),
            expert_error=sum(layer.error for layer in layers) / max(len(layers), 1),
            routing_changed=sum(layer.changed for layer in layers) / max(len(layers), 1),
            layers=layers,
        )


def _ratio(error: float, norm: float) -> float:
    """0 where nothing differs, whatever the norm."""
    if error == 0.0:
        return 0.0
    return error / norm if norm else math.inf
