"""A peer for the process that tests start: the reference, and ways to fail."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from moestro.bench.layers import Layer, expected_output
from moestro.types import Routing

SECONDS = 0.02
TOO_MANY = 3


def right(layer: Layer) -> Callable[[Tensor, Tensor, Tensor], Callable[[], Tensor]]:
    """Computes the layer, after a while and after printing something; ends the process on `TOO_MANY` tokens."""

    def bind(x: Tensor, expert_ids: Tensor, routing_weights: Tensor) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            print("a peer that talks")
            time.sleep(SECONDS)
            if len(x) == TOO_MANY:
                os._exit(3)
            return expected_output(layer, x, Routing(expert_ids, routing_weights)).to(layer.dtype)

        return compute

    return bind


def failing(layer: Layer) -> Callable[[Tensor, Tensor, Tensor], Callable[[], Tensor]]:
    """Raises where it is prepared."""
    raise RuntimeError(f"no kernels for {layer.spec.name} with {torch.get_num_threads()} threads")
