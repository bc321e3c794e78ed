"""What is counted of the experts' loads."""

from __future__ import annotations

import copy

import pytest
import torch

from moestro.hf.text_model import TextModel
from moestro.serve import metrics


def test_loads_are_of_their_layers_after_a_pass_that_failed(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_EVERY", 1)
    model = text_model.model
    layers = [model.get_submodule(layer.path) for layer in text_model.served]
    loads, ids = metrics.Loads(layers), torch.arange(2, 34)[None]
    with torch.no_grad(), loads.watched():
        model(ids)
        first = copy.deepcopy(loads._rows)
        loads._rows.clear()
        hook = layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            model(ids)
        hook.remove()
        loads._rows.clear()
        model(ids)
    assert len(first) == len(layers) > 1
    assert not torch.equal(first[0], first[1])
    assert {layer: rows.tolist() for layer, rows in loads._rows.items()} == {n: r.tolist() for n, r in first.items()}


def fail(*_: object) -> None:
    raise RuntimeError("in the middle")
