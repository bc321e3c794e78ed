"""torch.ops.moestro.expert_mlp_within_memory: a layer whose experts are in slots, as one opaque node of torch.compile.

A graph holds neither experts nor slots but a handle of their layer, so that it keeps no model alive. What runs inside
the node is `moestro.memory.waves.run`, with the layer's experts of that moment.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moestro.errors import invalid_input, unsupported
from moestro.formats import WeightFormat
from moestro.memory.reader import OPERATION
from moestro.memory.waves import MemoryWeights, check_rows, run
from moestro.types import Routing


class Layer(Protocol):
    """What a handle stands for."""

    def weights_with(self, gate_up_bias: Tensor | None, down_bias: Tensor | None) -> MemoryWeights:
        """The layer's experts as they are now, with these biases."""


_LAYERS: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, eq=False)
class TracedWeights:
    """The experts of a layer as a graph that is being traced has them.

    Attributes:
        handle: of the layer, from `register`. It is a tensor, so that layers which are alike share one graph.
        format: of gate_up.
        gate_up_bias, down_bias: as in `ExpertWeights`.
    """

    handle: Tensor
    format: WeightFormat
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def register(layer: Layer) -> Tensor:
    """The handle of a layer, which stands for nothing once the layer has gone: an integer [], never given twice."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def traced(x: Tensor, routing: Routing, weights: TracedWeights, strategy: str) -> Tensor:
    """Record the node in the graph being traced.

    Raises:
        UnsupportedError: a graph that is exported, a tensor that requires a gradient, or another device than the CPU.
    """
    if torch.compiler.is_exporting():
        raise unsupported(
            OPERATION,
            got="experts within a memory budget and torch.export",
            needs="experts that a file of its own can hold",
            fix="Load the model without memory= to export it.",
        )
    check_rows(x, routing, weights)
    out: Tensor = torch.ops.moestro.expert_mlp_within_memory(
        x,
        routing.expert_ids,
        routing.routing_weights,
        weights.gate_up_bias,
        weights.down_bias,
        weights.handle,
        routing.weight_on,
        strategy,
    )
    return out


@torch.library.custom_op(
    "moestro::expert_mlp_within_memory",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
    schema="(Tensor x, Tensor expert_ids, Tensor routing_weights, Tensor? gate_up_bias, Tensor? down_bias, "
    "Tensor layer, str weight_on, str strategy) -> Tensor",
)
def _node(x: Tensor, expert_ids: Tensor, routing_weights: Tensor, *given: Any) -> Tensor:
    gate_up_bias, down_bias, handle, weight_on, strategy = given
    layer = _LAYERS.get(int(handle))
    if layer is None:
        raise invalid_input(
            OPERATION,
            got="a compiled graph of a model that is gone",
            needs="the model that was compiled, in the process that loaded it",
            fix="Keep the model as long as its graphs, or compile another.",
        )
    routing = Routing.unchecked(expert_ids, routing_weights, weight_on)
    return run(x, routing, layer.weights_with(gate_up_bias, down_bias), strategy)


@_node.register_fake
def _(x: Tensor, *given: Any) -> Tensor:
    return x.new_empty(x.shape)
