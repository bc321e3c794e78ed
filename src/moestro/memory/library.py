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
from moestro.memory.waves import MemoryWeights, check_gradients, run
from moestro.ops.dispatch import leave_to_python
from moestro.types import Routing
from moestro.weights import OutputNorm


class Layer(Protocol):
    """What a handle stands for."""

    def weights_with(self, first: Tensor | None, second: Tensor | None, norm: OutputNorm | None) -> MemoryWeights:
        """The layer's experts as they are now, with these biases of gate_up and of down and this norm."""


_LAYERS: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, eq=False)
class TracedWeights:
    """The experts of a layer as a graph that is being traced has them, and eager code beside it may be given them.

    Attributes:
        handle: of the layer, from `register`. It is a tensor, so that layers which are alike share one graph.
        format: of gate_up.
        gate_up_bias, down_bias, output_norm: as in `ExpertWeights`.
    """

    handle: Tensor
    format: WeightFormat
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    output_norm: OutputNorm | None


def register(layer: Layer) -> Tensor:
    """The handle of a layer, which stands for nothing once the layer has gone: an integer [], never given twice."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def call(x: Tensor, routing: Routing, weights: MemoryWeights | TracedWeights, strategy: str) -> Tensor:
    """`moestro.memory.waves.run`, or the node where a graph is traced.

    Raises:
        UnsupportedError: a graph that is exported, an output norm or a tensor that requires a gradient in a graph;
            what `run` refuses.
    """
    if torch.compiler.is_compiling():
        return _traced(x, routing, weights, strategy)
    return _run(x, routing, weights, strategy)


def _run(x: Tensor, routing: Routing, weights: MemoryWeights | TracedWeights, strategy: str) -> Tensor:
    if isinstance(weights, TracedWeights):
        given = weights.gate_up_bias, weights.down_bias, weights.output_norm
        weights = _layer(weights.handle).weights_with(*given)
    return run(x, routing, weights, strategy)


leave_to_python(_run)


def _traced(x: Tensor, routing: Routing, weights: MemoryWeights | TracedWeights, strategy: str) -> Tensor:
    if torch.compiler.is_exporting():
        raise unsupported(
            OPERATION,
            got="experts within a memory budget and torch.export",
            needs="experts that a file of its own can hold",
            fix="Load the model without memory= to export it.",
        )
    if weights.output_norm is not None:
        raise unsupported(
            OPERATION,
            got="torch.compile of experts within a memory budget and with an output_norm",
            needs="none, for it is code that a graph cannot hold",
            fix="Keep the layer out of the graph (torch.compiler.disable).",
        )
    check_gradients(x, routing, weights)
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
    routing = Routing.unchecked(expert_ids, routing_weights, weight_on)
    return run(x, routing, _layer(handle).weights_with(gate_up_bias, down_bias, None), strategy)


def _layer(handle: Tensor) -> Layer:
    found = _LAYERS.get(int(handle))
    if found is None:
        raise invalid_input(
            OPERATION,
            got="a compiled graph of a model that is gone",
            needs="the model that was compiled, in the process that loaded it",
            fix="Keep the model as long as its graphs, or compile another.",
        )
    return found


@_node.register_fake
def _(x: Tensor, *given: Any) -> Tensor:
    return x.new_empty(x.shape)
