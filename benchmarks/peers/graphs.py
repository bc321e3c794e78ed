"""A variant whose call is captured once as a CUDA graph and replayed: what is left is the time of the device."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moestro.bench.layers import Layer
from moestro.bench.peers.variant import Bind, Call, Variant
from moestro.errors import unsupported
from moestro.types import Routing

MOST_TOKENS = 64
"""For more the host is far ahead of the device, and a graph changes nothing."""
_CALLS_BEFORE = 2
GRAPH = "-graph"
"""What a graph's name has beyond that of the call."""


def graphed(variant: Variant, module: Any = torch.cuda) -> Variant:
    """The variant as a CUDA graph, named after it; `module` is torch.cuda.

    A call that cannot be captured, because it waits for the device, raises what PyTorch says of it.
    """
    return replace(variant, name=f"{variant.name}{GRAPH}", prepare=partial(_prepare, variant, module), device="cuda")


def _prepare(variant: Variant, module: Any, layer: Layer) -> Bind:
    bind = variant.prepare(layer)

    def bind_graph(x: Tensor, routing: Routing) -> Call:
        if x.shape[0] > MOST_TOKENS:
            raise unsupported(
                "bench layer",
                got=f"{x.shape[0]} tokens for a graph",
                needs=f"at most {MOST_TOKENS}, beyond which the host is far ahead",
                fix="Read the row without a graph.",
            )
        return captured(bind(x, routing), module)

    return bind_graph


def captured(call: Call, module: Any = torch.cuda) -> Call:
    """A call that replays this one, which returns the same tensor each time; `module` is torch.cuda.

    Kernels are compiled, and libraries find their memory, in calls on a stream of their own before the capture.
    `torch.cuda.graph` would collect garbage and hand memory back at each capture, of which there are many here.
    """
    stream, graph = module.Stream(), module.CUDAGraph()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        for _ in range(_CALLS_BEFORE):
            call()
        stream.synchronize()
        graph.capture_begin(pool=module.graph_pool_handle())
        captured = False
        try:
            output = call()
            captured = True
        finally:
            # Of a capture that broke, the end says only that: what the call raised is worth more.
            with contextlib.nullcontext() if captured else contextlib.suppress(RuntimeError):
                graph.capture_end()
    module.current_stream().wait_stream(stream)

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay
