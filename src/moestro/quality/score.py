"""What storing experts in fewer bits costs a language model: measures of its outputs against a baseline's.

Sums are float64 and taken in a fixed order, so the same outputs give the same numbers on every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.errors import invalid_input
from moestro.quality.report import Layer, Row
from moestro.types import EMPTY

CHUNK_ITEMS = 1 << 20
"""Logits that are in float64 at a time."""


def windows(document: Tensor, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens to read, `context` at most, and those that the last of them predict: all but the first, each once.

    From the second window on, a predicted token has at least half of the context before it.
    """
    scored, last = 0, document.numel() - 1
    while scored < last:
        start = max(scored - context // 2, 0)
        stop = min(start + context, last)
        yield document[start:stop], document[scored + 1 : stop + 1]
        scored = stop


class Scores(NamedTuple):
    """What one window says of each token, all [T] on the CPU; float64, but for `agrees`.

    Nats are negative log-likelihoods, the divergence is KL(baseline || model) over the vocabulary, and both models
    agree where they hold the same token for the likeliest.
    """

    nats: Tensor
    baseline_nats: Tensor
    divergence: Tensor
    agrees: Tensor


def score(logits: Tensor, baseline_logits: Tensor, targets: Tensor) -> Scores:
    """Compare two models' logits [T, vocabulary] before the same tokens [T] came, a few rows at a time.

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
    """How many of the baseline's choices [T, K] another routing of the same tokens does not make, and of how many."""
    chosen = baseline_ids != EMPTY
    missing = (baseline_ids[:, :, None] != expert_ids[:, None, :]).all(-1) & chosen
    return int(missing.sum()), int(chosen.sum())


def nearest_rank(values: Tensor, share: float) -> float:
    """The smallest of the values [N] that at least this share of them do not exceed."""
    return float(values.sort().values[max(math.ceil(share * values.numel()) - 1, 0)])


def likelihood(nats: Tensor, num_bytes: int) -> dict[str, Any]:
    """How well tokens with these nats [T], which stand for so many bytes of text, are predicted; names as in `Row`."""
    total, mean = float(nats.sum()), float(nats.mean())
    return {
        "bits_per_byte": total / math.log(2) / num_bytes,
        "bits_per_token": mean / math.log(2),
        "perplexity": math.exp(min(mean, 700.0)),
    }


class Tally:
    """Gathers what one window after the other says: its scores, and sums over all of them.

    `sums` are [layers, 4] in float64: squares of a layer's error and of the baseline's output, and how many of the
    baseline's choices were changed, and of how many.
    """

    def __init__(self, paths: tuple[str, ...]) -> None:
        """`paths` are names of the expert layers, in the order in which they run."""
        self._paths = paths
        self.scores: list[Scores] = []
        self.sums = torch.zeros(len(paths), 4, dtype=torch.float64)

    def add_layer(self, layer: int, outputs: tuple[Tensor, Tensor], expert_ids: tuple[Tensor, Tensor]) -> None:
        """The model's and the baseline's outputs [T, H] for the same inputs, and choices [T, K] in their own passes."""
        output, baseline = (values.double() for values in outputs)
        squares = [float((output - baseline).square_().sum()), float(baseline.square().sum())]
        self.sums[layer] += torch.tensor([*squares, *changed_choices(*expert_ids)], dtype=torch.float64)

    def rows(self, baseline: Row, row: Row, num_bytes: int) -> tuple[Row, Row]:
        """The rows of the baseline and of the model, which say how experts are stored, with what all windows say."""
        nats, baseline_nats, divergence, agrees = _joined(self.scores)
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
