"""Two models of one architecture on the same tokens: what their expert layers make of the same inputs and routing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moestro.bench.quality import Tally, Window, score
from moestro.hf.accelerate import Found, find
from moestro.ops.dispatch import Operation, Prepared, observed
from moestro.ops.expert_mlp import EXPERT_MLP, run
from moestro.types import Routing
from moestro.weights import ExpertWeights

Tap = Callable[[Tensor, Routing, ExpertWeights, Tensor], object]
"""Sees each expert_mlp of a forward pass: x [T, H], routing, weights, and the output [T, H]."""


@dataclass(frozen=True, eq=False)
class _Call:
    layer: int
    dtype: torch.dtype
    routing: Routing
    weights: ExpertWeights


class SideBySide:
    """A model and the baseline it is compared with, whose expert layers moestro serves in both.

    Of a layer nothing is kept but the routing: the model reads a window first, and the baseline, which reads it next,
    hands each layer's inputs to the model's experts on the way.

    Args:
        model, baseline: Transformers models of the same architecture, on one device.
    """

    def __init__(self, model: Any, baseline: Any) -> None:
        self._model, self._baseline = model, baseline
        self._layers = {id(m): find(m) for m in (model, baseline)}
        self.paths = tuple(layer.path for layer in self._layers[id(baseline)])

    @torch.inference_mode()
    def read(self, document: Tensor, window: Window, tally: Tally) -> None:
        """Add a window of a document's tokens [T] to a tally.

        Raises:
            InvalidInputError: logits that are not finite.
        """
        device = self._baseline.device
        ids = document[window.start : window.stop].to(device)[None]
        targets = document[window.start + window.skip + 1 : window.stop + 1].to(device)
        calls: list[_Call] = []
        logits = self._logits(
            self._model,
            ids,
            lambda layer, x, routing, weights, y: calls.append(_Call(layer, x.dtype, routing, weights)),
        )[window.skip :]
        left = iter(calls)

        def compare(layer: int, x: Tensor, routing: Routing, weights: ExpertWeights, y: Tensor) -> None:
            call = next(left)
            assert call.layer == layer
            tally.add_outputs(layer, run(x.to(call.dtype), routing, call.weights), y)
            tally.add_routing(layer, call.routing.expert_ids, routing.expert_ids)

        baseline_logits = self._logits(self._baseline, ids, compare)[window.skip :]
        tally.add_scores(score(logits, baseline_logits, targets))

    def _logits(self, model: Any, ids: Tensor, see: Callable[..., object]) -> Tensor:
        """[T, vocabulary]; `see` is called with a layer's number and what a `Tap` is called with."""
        current = 0

        def tap(x: Tensor, routing: Routing, weights: ExpertWeights, y: Tensor) -> None:
            see(current, x, routing, weights, y)

        def enter(layer: int) -> None:
            nonlocal current
            current = layer

        with _entered(self._layers[id(model)], enter), _tapped(tap):
            found: Tensor = model(input_ids=ids, use_cache=False).logits[0]
        return found


@contextmanager
def _entered(layers: list[Found], enter: Callable[[int], None]) -> Iterator[None]:
    """Say which layer runs."""
    hooks = [
        layer.module.register_forward_pre_hook(lambda *_, number=number: enter(number))
        for number, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _tapped(tap: Tap) -> Iterator[None]:
    """Show a tap every expert_mlp inside the block; those that it runs itself are not shown."""

    def see(operation: Operation, prepared: Prepared, arguments: tuple[Any, ...], result: Any) -> None:
        if operation is EXPERT_MLP:
            x, routing, weights, _ = arguments
            tap(x, routing, weights, result)

    with observed(see):
        yield
