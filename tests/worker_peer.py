"""A peer for the process that tests start: the reference, and ways to fail."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor

from moestro.bench.layers import Layer, expected_output
from moestro.bench.peers.variant import Bind, Call
from moestro.types import Routing

SECONDS = 0.02
TOO_MANY = 3


def right(layer: Layer) -> Bind:
    """Computes the layer, after a while and after printing something; ends the process on `TOO_MANY` tokens."""

    def bind(x: Tensor, routing: Routing) -> Call:
        def compute() -> Tensor:
            print("a peer that talks")
            time.sleep(SECONDS)
            if len(x) == TOO_MANY:
                os._exit(3)
            return expected_output(layer, x, routing).to(layer.dtype)

        return compute

    return bind


def failing(layer: Layer) -> Bind:
    """Raises where it is prepared."""
    raise RuntimeError(f"no kernels for {layer.spec.name} with {torch.get_num_threads()} threads")
