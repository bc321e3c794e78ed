"""Record the routing of a served model while it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from moestro.errors import unsupported
from moestro.hf.serving import served
from moestro.memory import LayerSize, Recorder
from moestro.memory.waves import MemoryWeights
from moestro.ops.dispatch import Prepared, observed
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.types import Routing
from moestro.weights import ExpertWeights


class _Running(threading.local):
    """The layers that this thread is in; observers are told of calls of their own thread only."""

    def __init__(self) -> None:
        self.layers: list[int] = []


@contextmanager
def recorded(model: nn.Module, name: str) -> Iterator[Recorder]:
    """Inside, every call of the model's expert layers is added to the recorder, layers in the order of the model.

    Calls of other threads are not.

    Args:
        model: that moestro serves.
        name: of the model, for the trace.

    Raises:
        UnsupportedError: a model without expert layers that moestro serves.
    """
    paths = [layer.path for layer in served(model)]
    if not paths:
        raise unsupported(
            "trace",
            got=f"{name}, of which moestro serves no expert layer",
            needs="a model that moestro serves",
            fix="Call moestro.accelerate(model) first.",
        )
    recorder = Recorder(name)
    running = _Running()

    def begin(layer: int, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        running.layers.append(layer)

    def end(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        running.layers.pop()

    def tell(prepared: Prepared, arguments: tuple[Any, ...], result: Any) -> None:
        if running.layers:
            routing, weights = arguments[1], arguments[2]
            recorder.add(running.layers[-1], _size(routing, weights), routing.expert_ids.cpu().numpy().astype(np.int64))

    modules = [model.get_submodule(path) for path in paths]
    hooks = [module.register_forward_pre_hook(partial(begin, layer)) for layer, module in enumerate(modules)]
    hooks += [module.register_forward_hook(end, always_call=True) for module in modules]
    try:
        with observed(EXPERT_MLP, tell):
            yield recorder
    finally:
        for hook in hooks:
            hook.remove()


def _size(routing: Routing, weights: ExpertWeights) -> LayerSize:
    """Of a layer; layers share slots where formats and shapes are equal, or as they do where slots are."""
    if isinstance(weights, MemoryWeights) and weights.layer is not None:
        return weights.layer.plan.size
    stored = weights.gate_up, weights.down
    expert_bytes = sum(t.nbytes for s in stored for t in s.tensors) // weights.num_experts
    key = ", ".join(f"{s.format.name} {s.shape[1]} x {s.shape[2]}" for s in stored)
    return LayerSize(weights.num_experts, routing.top_k, expert_bytes, key)
