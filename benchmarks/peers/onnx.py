"""ONNX Runtime's fused layer: a graph of the one node `MoE` or `QMoE` of its CPU provider.

It routes by itself, so it is given logits whose softmax over the chosen experts are the routing weights; their sum,
which it divides by, is multiplied to its output. Its threads are its own, and so is its process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moestro.bench.layers import Layer, LayerSpec
from moestro.bench.peers.variant import Bind, Call, Numbers, Variant, cost
from moestro.errors import unsupported
from moestro.types import GPT_OSS_SWIGLU, Routing
from peers import installed, worker
from peers.bounds import QUANTISED

_NOT_CHOSEN = -6e4
"""A logit that float16 holds and whose exponential is 0."""

_BITS = 32 + worker.LAYER_BITS
"""Of a weight in the process while it prepares: the layer, and a projection in float32."""

_FOLDER = "python"
_NEEDS = "a graph that this ONNX Runtime can run"
_FIX = "Leave this peer out, or install the version that benchmarks/install_peers.py names."


@dataclass(frozen=True)
class _Stored:
    """What a graph stores: float32 or float16, or integers of `bits` bits with a scale for every `group` columns."""

    dtype: torch.dtype
    bits: int = 0
    group: int = 0


def _interleaved(weight: Tensor, layer: Layer) -> Tensor:
    """Rows of gate and up in turn, which is the only order that the node knows."""
    if layer.spec.activation.interleaved:
        return weight
    gate, up = weight.chunk(2, 1)
    return torch.stack([gate, up], 2).flatten(1, 2)


def _integers(weight: Tensor, stored: _Stored) -> tuple[Tensor, Tensor]:
    """uint8 codes [E, N, K * bits / 8] around half of their range, and scales [E, N, K / group], expert by expert."""
    e, rows, columns = weight.shape
    half = 1 << stored.bits - 1
    codes = torch.empty(e, rows, columns * stored.bits // 8, dtype=torch.uint8)
    scales = torch.empty(e, rows, columns // stored.group)
    for expert in range(e):
        groups = weight[expert].float().view(rows, -1, stored.group)
        scales[expert] = groups.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / (half - 1)
        own = (groups / scales[expert, :, :, None]).round_().add_(half).to(torch.uint8).view(rows, columns)
        codes[expert] = own if stored.bits == 8 else own[:, 0::2] | own[:, 1::2] << 4
    return codes, scales


def _tensors(layer: Layer, stored: _Stored) -> list[Tensor | None]:
    """The node's inputs after x and logits, in its order; None for what is left out."""
    found: list[Tensor | None] = []
    gate_up, down = installed.matrices(layer)
    gate_up_bias, down_bias = installed.biases(layer)
    if gate_up_bias is not None:
        gate_up_bias = _interleaved(gate_up_bias, layer)
    for weight, bias in ((_interleaved(gate_up, layer), gate_up_bias), (down, down_bias)):
        found += _integers(weight, stored) if stored.bits else [weight.to(stored.dtype).contiguous()]
        found.append(None if bias is None else bias.to(stored.dtype).contiguous())
    return found


def _attributes(spec: LayerSpec, stored: _Stored) -> dict[str, Any]:
    found: dict[str, Any] = {
        "k": spec.top_k,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": spec.activation.alpha,
        "activation_beta": spec.activation.up_offset,
        "normalize_routing_weights": 1,
    }
    if spec.activation == GPT_OSS_SWIGLU:
        found["swiglu_limit"] = spec.activation.limit
    if stored.bits:
        found |= {"expert_weight_bits": stored.bits, "block_size": stored.group}
    return found


class _Session:
    """A session of ONNX Runtime on one layer; the weights lie beside the graph, which holds but their names."""

    def __init__(self, layer: Layer, stored: _Stored) -> None:
        onnx, runtime = installed.module("onnx"), installed.module("onnxruntime")
        helper, proto = onnx.helper, onnx.TensorProto
        codes = {torch.float32: proto.FLOAT, torch.float16: proto.FLOAT16, torch.uint8: proto.UINT8}
        tensors = _tensors(layer, stored)
        names = ["" if tensor is None else f"w{i}" for i, tensor in enumerate(tensors)]
        initializers = []
        for name, tensor in zip(names, tensors, strict=True):
            if tensor is not None:
                own = proto(name=name, data_type=codes[tensor.dtype], dims=tensor.shape, data_location=proto.EXTERNAL)
                own.external_data.add(key="location", value="in memory")
                initializers.append(own)
        spec, element = layer.spec, codes[stored.dtype]
        node = helper.make_node(
            "QMoE" if stored.bits else "MoE",
            ["x", "logits", *names],
            ["y"],
            domain="com.microsoft",
            **_attributes(spec, stored),
        )
        sizes = (("x", spec.hidden_size), ("logits", layer.num_experts), ("y", spec.hidden_size))
        infos = [helper.make_tensor_value_info(name, element, ["T", size]) for name, size in sizes]
        graph = helper.make_graph([node], "layer", infos[:2], infos[2:], initializer=initializers)
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        values = [runtime.OrtValue.ortvalue_from_numpy(t.numpy()) for t in tensors if t is not None]
        options.add_external_initializers([name for name in names if name], values)
        self.values = values  # what the session reads
        self.dtype = stored.dtype
        try:
            self.session = runtime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except runtime.capi.onnxruntime_pybind11_state.Fail as error:
            raise unsupported("bench layer", got=f"{node.op_type} ({error})", needs=_NEEDS, fix=_FIX) from None


class _Run:
    """One call, which times the session's run."""

    def __init__(self, session: _Session, x: Tensor, routing: Routing) -> None:
        self.session, self.x = session, x
        weights = routing.routing_weights
        num_experts = session.session.get_inputs()[1].shape[1]
        logits = torch.full((len(x), num_experts), _NOT_CHOSEN).scatter_(1, routing.expert_ids.long(), weights.log())
        self.feeds = {name: t.to(session.dtype).numpy() for name, t in (("x", x), ("logits", logits))}
        self.total = weights.sum(-1, keepdim=True)

    def __call__(self) -> Tensor:
        return self._run()[1].float() * self.total

    def seconds(self) -> float:
        """Those of the session's run."""
        return self._run()[0]

    def _run(self) -> tuple[float, Tensor]:
        start = time.perf_counter()
        [found] = self.session.session.run(None, self.feeds)
        seconds = time.perf_counter() - start
        return seconds, torch.from_numpy(found)


def _prepare(stored: _Stored, layer: Layer) -> Bind:
    session = _Session(layer, stored)

    def bind(x: Tensor, routing: Routing) -> Call:
        return _Run(session, x, routing)

    return bind


def _refuses(stored: _Stored, spec: LayerSpec, dtype: torch.dtype) -> str | None:
    if not stored.bits and dtype.itemsize != stored.dtype.itemsize:
        return f"{dtype} has a peer of its own bits"
    if stored.bits and (spec.hidden_size % stored.group or spec.intermediate_size % stored.group):
        return f"it needs sizes that are multiples of {stored.group}"
    return installed.refuses(spec)


def _absent() -> str | None:
    return installed.missing("ONNX Runtime", f"{_FOLDER}/onnxruntime")


def _variant(name: str, stored: _Stored, numbers: Numbers) -> Variant:
    prepare = partial(worker.prepare, partial(_prepare, stored))
    return Variant(name, partial(_refuses, stored), prepare, cost, "cpu", numbers, _absent)


def _quantised(bits: int, group: int) -> Variant:
    numbers = Numbers(f"int{bits}-g{group}", bits, bits + 32 / group, bound=QUANTISED[bits], bits_to_prepare=_BITS)
    return _variant(f"ort-int{bits}-g{group}", _Stored(torch.float32, bits, group), numbers)


ONNX = (
    _variant("ort-f32", _Stored(torch.float32), Numbers("float32", 32, 32, bits_to_prepare=_BITS)),
    _variant("ort-f16", _Stored(torch.float16), Numbers("float16", 16, 16, bits_to_prepare=_BITS)),
    *(_quantised(bits, group) for bits in (8, 4) for group in (32, 128)),
)
