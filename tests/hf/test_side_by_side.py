"""Both models' expert layers are seen in every family, each once a window, with what they are really given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moestro.hf
from hf.checkpoints import FAMILIES, IDS, logits
from moestro.hf.loading import load
from moestro.hf.side_by_side import SideBySide
from moestro.ops import dispatch
from moestro.quality.report import Row
from moestro.quality.score import Tally, windows

DOCUMENT = IDS.flatten()
CONTEXT = 8


def compared(model: Any, baseline: Any) -> tuple[Row, Tally]:
    pair = SideBySide(model, baseline)
    tally = Tally(pair.paths)
    for window in windows(DOCUMENT, CONTEXT):
        pair.read(*window, tally)
    return tally.rows(Row("float32"), Row("mxfp4"), num_bytes=1)[1], tally


@pytest.mark.parametrize("like", FAMILIES)
def test_every_family(made: Any, like: str) -> None:
    baseline = load(made.folder(like), dtype="float32")
    same, tally = compared(load(made.folder(like), dtype="float32"), baseline)
    layers = [layer.path for layer in moestro.hf.served(baseline)]
    read = sum(ids.numel() for ids, _ in windows(DOCUMENT, CONTEXT))
    config = baseline.config.get_text_config()
    top_k = config.ffn_config.moe_top_k if like == "dbrx" else config.num_experts_per_tok
    assert [layer.path for layer in same.layers] == layers
    assert tally.sums[:, 3].tolist() == [top_k * read] * len(layers)
    assert tally.sums[:, 1].min() > 0
    assert (same.expert_error, same.kl_mean, same.routing_changed) == (0.0, 0.0, 0.0)
    before = logits(baseline)
    found, _ = compared(load(made.folder(like), "fp8-e4m3-channel", dtype="float32"), baseline)
    assert all(0 < layer.error < 0.2 for layer in found.layers)
    assert found.kl_mean > 0
    assert torch.equal(logits(baseline), before)  # nothing is left in the model, or around it


def test_a_failure_leaves_nothing_behind(made: Any) -> None:
    baseline = load(made.folder("olmoe"), dtype="float32")
    model = load(made.folder("olmoe"), dtype="float32")
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        compared(model, baseline)
    assert not dispatch._OBSERVERS.get()
    assert not any(module._forward_pre_hooks for m in (model, baseline) for module in m.modules())
