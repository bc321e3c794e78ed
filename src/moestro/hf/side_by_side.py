"""Two models of one architecture on the same tokens: what their expert layers make of the same inputs and routing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from moestro.hf.serving import find
from moestro.ops.dispatch import Prepared, observed
from moestro.ops.expert_mlp import EXPERT_MLP, run
from moestro.quality.score import Tally, score
from moestro.types import Routing
from moestro.weights import ExpertWeights


class SideBySide:
    """A model and the baseline it is compared with, whose expert layers moestro serves in both.

    Of a layer nothing is kept but the routing: the model reads a window first, and the baseline, which reads it next,
    hands each layer's inputs to the model's experts on the way. Both are on one device.
    """

    def __init__(self, model: Any, baseline: Any) -> None:
        self._model, self._baseline = model, baseline
        self._layers = {id(m): find(m) for m in (model, baseline)}
        self.paths = tuple(layer.path for layer in self._layers[id(baseline)])

    @torch.inference_mode()
    def read(self, ids: Tensor, targets: Tensor, tally: Tally) -> None:
        """Add tokens [T], and those that the last of them predict, to a tally; logits have to be finite."""
        ids, targets = (tokens.to(self._baseline.device) for tokens in (ids, targets))
        calls: list[tuple[int, torch.dtype, Routing, ExpertWeights]] = []

        def note(layer: int, x: Tensor, routing: Routing, weights: ExpertWeights, y: Tensor) -> None:
            calls.append((layer, x.dtype, routing, weights))

        def compare(layer: int, x: Tensor, routing: Routing, weights: ExpertWeights, y: Tensor) -> None:
            noted, dtype, own_routing, own_weights = calls.pop(0)
            assert noted == layer
            outputs = run(x.to(dtype), routing, own_weights), y
            tally.add_layer(layer, outputs, (own_routing.expert_ids, routing.expert_ids))

        pairs = ((self._model, note), (self._baseline, compare))
        own, theirs = (self._logits(model, ids[None], see)[-targets.numel() :] for model, see in pairs)
        tally.scores.append(score(own, theirs, targets))

    def _logits(self, model: Any, ids: Tensor, see: Callable[..., None]) -> Tensor:
        """[T, vocabulary]; `see` is called with each layer's number, x [T, H], routing, weights, and output [T, H]."""
        current = 0

        def enter(layer: int) -> None:
            nonlocal current
            current = layer

        def tell(prepared: Prepared, arguments: tuple[Any, ...], result: Any) -> None:
            see(current, *arguments[:3], result)

        with ExitStack() as hooks, observed(EXPERT_MLP, tell):
            for number, layer in enumerate(self._layers[id(model)]):
                hooks.enter_context(layer.module.register_forward_pre_hook(lambda *_, number=number: enter(number)))
            found: Tensor = model(input_ids=ids, use_cache=False).logits[0]
        return found
