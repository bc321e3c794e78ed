"""What no router takes, however it is computed."""

from __future__ import annotations

from dataclasses import replace

import torch

from moestro.routing import Scoring

REFUSED = [
    (torch.tensor([[0.0, torch.nan]]), "softmax", None, r"a logit of nan \(token 0, expert 1\)"),
    (torch.tensor([[0.0, 1.0], [torch.inf, 1.0]]), "softmax-topk", None, r"a logit of inf \(token 1, expert 0\)"),
    (torch.tensor([[torch.nan, torch.inf]]), "sigmoid", None, "a logit of nan"),
    (torch.zeros(1, 2), "sigmoid", torch.tensor([0.0, torch.nan]), "NaN or infinity in the correction bias"),
    (torch.full((1, 2), 3e38), replace(Scoring(), logit_scale=9.0), None, "NaN among scores"),
]
"""Logits, scoring, correction, and what the error says."""
