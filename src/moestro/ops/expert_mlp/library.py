"""torch.ops.moestro.expert_mlp: the primitive as one opaque node for torch.compile and torch.export.

Eager calls do not pass through here (a torch.library call costs microseconds that show at T = 1); what runs inside
the node is `moestro.ops.expert_mlp.run` all the same, so settings and strategies hold at run time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from moestro import formats, settings
from moestro.errors import unsupported
from moestro.formats import SplitTensor, StoredExperts
from moestro.formats.dense import DENSE_FORMATS
from moestro.ops import expert_mlp, gpu
from moestro.ops.expert_mlp import triton
from moestro.ops.expert_mlp.backward import SLOPES, expert_mlp_backward
from moestro.types import Activation, Routing, unchecked
from moestro.weights import ExpertWeights, Layout, Parts, unstacked_spans


def traced(x: Tensor, routing: Routing, weights: ExpertWeights, strategy: str) -> Tensor:
    """Record the node in the graph being traced; refuse what a graph cannot hold, and gradients that it has not."""
    if weights.activation.function is not None or weights.output_norm is not None:
        raise unsupported(
            "expert_mlp",
            got="torch.compile with a custom activation function or an output_norm",
            needs="an activation that is data",
            fix="Describe it with Activation's fields, or keep the layer out of the graph (torch.compiler.disable).",
        )
    gate_up, down = list(weights.gate_up.tensors), list(weights.down.tensors)
    layout = f"{write_layout(weights.gate_up)}|{write_layout(weights.down)}"
    if weights.input_format != "float":
        layout = f"{layout}|{weights.input_format}"
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (x, routing.routing_weights, *weights.tensors))
    _check_gradients(weights.activation.kind, layout, trains, any(t.requires_grad for t in (*gate_up, *down)))
    node = (
        torch.ops.moestro.expert_mlp_on_device if stays_on_device(x, routing, weights) else torch.ops.moestro.expert_mlp
    )
    tensors = routing.expert_ids, routing.routing_weights, gate_up, down, weights.gate_up_bias, weights.down_bias
    out: Tensor = node(x, *tensors, routing.weight_on, weights.activation.code, layout, strategy)
    return out


def stays_on_device(x: Tensor, routing: Routing, weights: ExpertWeights) -> bool:
    """Whether Triton's kernels, which read no ids on the host, will compute this: what `triton.prepare` will say."""
    if settings.current().implementation not in (None, gpu.IMPLEMENTATION):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, routing.routing_weights, *weights.tensors)):
        return False
    return gpu.runs_on(x.device.type, x.device.index) and triton.why_unsupported(x, routing, weights) is None


_TRAINED = frozenset(f"{a.name}|{b.name}" for a in DENSE_FORMATS for b in DENSE_FORMATS)
"""The layouts whose weights have gradients in a graph: one ordinary tensor a projection."""


def _check_gradients(kind: str, layout: str, of_any: bool, of_stored: bool) -> None:
    """Refuse what a graph has no gradient for: of any input, or of the stored weights."""
    _, _, *rows = layout.split("|")
    if of_any and kind not in SLOPES:
        raise unsupported(
            "expert_mlp",
            got=f"torch.compile with the activation {kind!r}, and a tensor that requires a gradient",
            needs=f"one of {', '.join(SLOPES)}, whose slopes are known in a graph",
            fix="Call it under torch.no_grad(), or keep the layer out of the graph (torch.compiler.disable).",
        )
    if of_any and rows:
        raise unsupported(
            "expert_mlp",
            got=f"torch.compile with {rows[0]} inputs, and a tensor that requires a gradient",
            needs="no gradient, which rounding does not have",
            fix="Call it under torch.no_grad(), or leave inputs as float.",
        )
    if of_stored and layout not in _TRAINED:
        raise unsupported(
            "expert_mlp",
            got=f"torch.compile with experts stored as {layout.replace('|', ' and ')} that require a gradient",
            needs="frozen experts, or all experts of a projection in one floating-point tensor",
            fix="Call requires_grad_(False) on them, or stack them and use ExpertWeights.from_dense.",
        )


def write_layout(stored: StoredExperts) -> str:
    """How the tensors of a projection make up its experts, as a string: "mxfp4", or "mxfp4/2" for two matrices each."""
    form = stored.format
    if not formats.is_registered(form):
        raise unsupported(
            "expert_mlp",
            got=f"torch.compile with weights stored as {form.name}",
            needs="a format of moestro.formats.FORMATS, which a graph can name",
            fix="Call it outside the graph.",
        )
    return f"{form.name}/{len(stored.matrices[0])}" if isinstance(stored, SplitTensor) else form.name


@functools.cache
def read_layout(text: str) -> Layout:
    """The `Layout` that `write_layout` wrote."""
    name, _, num_blocks = text.partition("/")
    return Layout(formats.find_format(name), int(num_blocks or 0))


_decode = functools.cache(Activation.decode)

_READS_IDS = (torch.Tag.cudagraph_unsafe,)
"""The walks read the ids on the host, which a captured CUDA graph cannot."""


@functools.lru_cache(maxsize=512)
def _experts_of(layout: str, num_gate_up: int, num_down: int, height: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """E, and `Parts.unstacked`, of so many tensors of a layout whose first has that many entries."""
    first, last = (read_layout(text) for text in layout.split("|")[:2])
    num_experts = first.num_experts(num_gate_up, height)
    counts = (num_gate_up, first.num_blocks > 0), (num_down, last.num_blocks > 0)
    return num_experts, unstacked_spans(counts, num_experts)


class GraphWeights:
    """Expert weights as a graph hands them over, tensor by tensor; the value is made when more than the parts is asked.

    `words` are the code of the activation and the layout.
    """

    def __init__(
        self,
        gate_up: list[Tensor],
        down: list[Tensor],
        biases: tuple[Tensor | None, Tensor | None],
        words: tuple[str, str],
    ) -> None:
        self._given = gate_up, down, biases, words
        first, last = biases
        tensors = (*gate_up, *down, *[bias for bias in biases if bias is not None])
        num_experts, spans = _experts_of(words[1], len(gate_up), len(down), gate_up[0].shape[0])
        key = ("graph", words, num_experts, first is not None, last is not None)
        self.parts = Parts(tensors, key, num_experts, spans)

    @functools.cached_property
    def value(self) -> ExpertWeights:
        """The weights."""
        gate_up, down, biases, (activation, layout) = self._given
        first, last, *rows = layout.split("|")
        stored = (read_layout(first).build(gate_up), read_layout(last).build(down))
        input_format: Any = rows[0] if rows else "float"
        fields = dict(zip(("gate_up", "down", "gate_up_bias", "down_bias"), (*stored, *biases), strict=True))
        return unchecked(ExpertWeights, **fields, activation=_decode(activation), input_format=input_format)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)


def _given(expert_ids: Tensor, routing_weights: Tensor, *stored: Any) -> tuple[Routing, Any]:
    """The routing and the weights of a node, from what follows x in `_GIVEN`."""
    gate_up, down, gate_up_bias, down_bias, weight_on, activation, layout = stored
    weights = GraphWeights(gate_up, down, (gate_up_bias, down_bias), (activation, layout))
    return Routing.unchecked(expert_ids, routing_weights, weight_on), weights


def _expert_mlp_node(x: Tensor, *given: Any) -> Tensor:
    *stored, strategy = given
    return expert_mlp.run(x, *_given(*stored), strategy)


def _on_device_node(x: Tensor, *given: Any) -> Tensor:
    *stored, strategy = given
    routing, weights = _given(*stored)
    found = triton.prepare(x, routing, weights, strategy) if gpu.is_captured(x) else None
    if isinstance(found, str):
        raise unsupported(
            "expert_mlp",
            got="a CUDA graph that is captured, and a call of its that the triton implementation cannot run",
            needs=f"one that it can: {found}",
            fix="Change what the sentence names, or leave the layer out of the graph.",
        )
    return expert_mlp.run(x, routing, weights, strategy)


def _like_x(x: Tensor, *given: Any) -> Tensor:
    return x.new_empty(x.shape)


_GIVEN = (
    "Tensor x, Tensor expert_ids, Tensor routing_weights, Tensor[] gate_up, Tensor[] down, Tensor? gate_up_bias, "
    "Tensor? down_bias, str weight_on, str activation, str layout"
)
_NODE: dict[str, Any] = {"mutates_args": (), "schema": f"({_GIVEN}, str strategy) -> Tensor"}

_expert_mlp = torch.library.custom_op("moestro::expert_mlp", _expert_mlp_node, **_NODE, tags=_READS_IDS)
_expert_mlp.register_fake(_like_x)

_on_device = torch.library.custom_op("moestro::expert_mlp_on_device", _on_device_node, **_NODE)
_on_device.register_fake(_like_x)
"""The same where nothing is read on the host, so that a CUDA graph can hold it; without gradients."""


@torch.library.custom_op(
    "moestro::expert_mlp_backward",
    mutates_args=(),
    tags=_READS_IDS,
    schema=f"(Tensor grad, {_GIVEN}, bool[] needed) -> Tensor[]",
)
def _expert_mlp_backward(grad: Tensor, x: Tensor, *given: Any) -> list[Tensor]:
    *stored, needed = given
    routing, weights = _given(*stored)
    with torch.autocast(x.device.type, enabled=False):
        found = expert_mlp_backward(grad, x, routing, weights.value, needed)
    return [t.contiguous() for t in found if t is not None]


@_expert_mlp_backward.register_fake
def _(grad: Tensor, x: Tensor, expert_ids: Tensor, *rest: Any) -> list[Tensor]:
    routing_weights, gate_up, down, *biases = rest[:5]
    inputs = (x, routing_weights, gate_up[0], down[0], *biases)
    wanted = [t for t, want in zip(inputs, rest[-1], strict=True) if want]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in wanted]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ids, routing_weights, gate_up, down, gate_up_bias, down_bias = inputs[:7]
    ctx.save_for_backward(x, ids, routing_weights, gate_up_bias, down_bias, *gate_up, *down)
    ctx.num_gate_up, ctx.num_down = len(gate_up), len(down)
    ctx.words = inputs[7:10]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, ids, routing_weights, gate_up_bias, down_bias, *stored = ctx.saved_tensors
    gate_up, down = stored[: ctx.num_gate_up], stored[ctx.num_gate_up :]
    wants = ctx.needs_input_grad
    needed = [wants[0], wants[2], any(wants[3]), any(wants[4]), wants[5], wants[6]]
    _check_gradients(_decode(ctx.words[1]).kind, ctx.words[2], True, needed[2] or needed[3])
    grads = iter(
        torch.ops.moestro.expert_mlp_backward(
            grad, x, ids, routing_weights, gate_up, down, gate_up_bias, down_bias, *ctx.words, needed
        )
    )
    of_x, of_routing, of_gate_up, of_down, *of_biases = (next(grads) if want else None for want in needed)
    gate_up_grads = [of_gate_up] + [None] * (ctx.num_gate_up - 1)
    down_grads = [of_down] + [None] * (ctx.num_down - 1)
    return (of_x, None, of_routing, gate_up_grads, down_grads, *of_biases, None, None, None, None)


_expert_mlp.register_autograd(_backward, setup_context=_setup_context)
