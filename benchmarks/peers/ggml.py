"""llama.cpp's kernels: ggml's own graph of one layer, on weights in its formats, in a process of its own.

The graph is what llama.cpp builds for routed experts: one `mul_mat_id` for gate and up, the activation, one for down,
the products with the routing weights, and sums over slots. x and the sum are float32, as they are there. ggml's threads
are its own.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moestro.bench.layers import Layer, LayerSpec
from moestro.bench.peers.variant import Bind, Call, Numbers, Variant, cost
from moestro.errors import UnsupportedError, unsupported
from moestro.types import GPT_OSS_SWIGLU, Routing
from peers import installed, worker
from peers.bounds import QUANTISED
from peers.ggml_library import LIBRARIES, TYPES, Engine, engine, library

_DENSE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
REPACKED = {"q4_0": 4.5, "q4_K": 4.5, "mxfp4": 4.25}
"""Types that ggml rearranges on x86-64, and their bits of a weight."""

_COLUMNS = {"q4_K": 256, "q4_0": 32, "q8_0": 32, "mxfp4": 32}


@dataclass(frozen=True)
class _Graph:
    """The layer's computation for some number of tokens, its inputs, and its output."""

    graph: int
    x: int
    ids: int
    weights: int
    out: int


class _Weights:
    """A layer's weights in a type, in ggml's memory."""

    def __init__(self, layer: Layer, kind: str, repack: bool) -> None:
        self.spec, self.engine = layer.spec, engine(torch.get_num_threads())
        lib, spec, e = self.engine.library, layer.spec, layer.num_experts
        h, i = spec.hidden_size, spec.intermediate_size
        buffer_type = lib.backend_get_default_buffer_type(self.engine.backend)
        self.context, self.graphs = lib.context(4), {}
        self.matrices = [
            lib.new_tensor_3d(self.context, TYPES[kind], columns, rows, e) for rows, columns in ((2 * i, h), (h, i))
        ]
        if repack:
            buffer_type = lib.repacking(self.engine.backend)
            if buffer_type is None:
                raise _refused(kind, "a ggml that repacks")
        self.buffers = [lib.backend_alloc_ctx_tensors_from_buft(self.context, buffer_type)]
        for tensor, weight in zip(self.matrices, _separated(layer), strict=True):
            _put(self.engine, tensor, _encode(weight, kind))
        self.biases: list[int] = []
        if spec.bias:
            self._bias_context = lib.context(2)
            self.biases = [lib.new_tensor_2d(self._bias_context, TYPES["f32"], n, e) for n in (2 * i, h)]
            default = lib.backend_get_default_buffer_type(self.engine.backend)
            self.buffers.append(lib.backend_alloc_ctx_tensors_from_buft(self._bias_context, default))
            for tensor, bias in zip(self.biases, _separated_biases(layer), strict=True):
                _put(self.engine, tensor, bias)

    def __del__(self) -> None:
        lib = self.engine.library
        for context, allocator, _ in self.graphs.values():
            lib.gallocr_free(allocator)
            lib.free(context)
        for buffer in self.buffers:
            lib.backend_buffer_free(buffer)
        lib.free(self.context)
        if self.biases:
            lib.free(self._bias_context)

    graphs: dict[int, tuple[int, int, _Graph]]

    def graph(self, num_tokens: int) -> _Graph:
        """The graph for so many tokens, made once; its buffers hold one call's numbers."""
        if num_tokens not in self.graphs:
            lib = self.engine.library
            context = lib.context(32 + 4 * self.spec.top_k)
            graph = self._build(context, num_tokens)
            allocator = lib.gallocr_new(lib.backend_get_default_buffer_type(self.engine.backend))
            if not lib.gallocr_alloc_graph(allocator, graph.graph):
                raise _refused(f"a graph of {num_tokens} tokens", "memory that ggml can have")
            self.graphs[num_tokens] = context, allocator, graph
        return self.graphs[num_tokens][2]

    def _build(self, context: int, t: int) -> _Graph:
        lib, spec = self.engine.library, self.spec
        h, i, k = spec.hidden_size, spec.intermediate_size, spec.top_k
        x = lib.new_tensor_3d(context, TYPES["f32"], h, 1, t)
        ids = lib.new_tensor_2d(context, 26, k, t)  # int32
        weights = lib.new_tensor_3d(context, TYPES["f32"], 1, k, t)
        for tensor in (x, ids, weights):
            lib.set_input(tensor)
        rows = lib.mul_mat_id(context, self.matrices[0], x, ids)
        if self.biases:
            rows = lib.add_id(context, rows, self.biases[0], ids)
        if spec.activation == GPT_OSS_SWIGLU:
            step = 2 * i * 4
            halves = [lib.view_3d(context, rows, i, k, t, step, step * k, start) for start in (0, i * 4)]
            rows = lib.swiglu_oai(context, *halves, spec.activation.alpha, spec.activation.limit)
        else:
            rows = lib.swiglu(context, rows)
        rows = lib.mul_mat_id(context, self.matrices[1], rows, ids)
        if self.biases:
            rows = lib.add_id(context, rows, self.biases[1], ids)
        rows = lib.mul(context, rows, weights)
        slots = [lib.view_2d(context, rows, h, t, h * k * 4, slot * h * 4) for slot in range(k)]
        out = slots[0]
        for slot in slots[1:]:
            out = lib.add(context, out, slot)
        if k == 1:
            out = lib.cont(context, out)
        lib.set_output(out)
        graph = lib.new_graph(context)
        lib.build_forward_expand(graph, out)
        return _Graph(graph, x, ids, weights, out)


class _Run:
    """One call of the layer, which times ggml's computation and nothing else: inputs are in place before."""

    def __init__(self, weights: _Weights, x: Tensor, routing: Routing) -> None:
        self.weights = weights
        self.inputs = (
            x.float().contiguous(),
            routing.expert_ids.int().contiguous(),
            routing.routing_weights.contiguous(),
        )

    def __call__(self) -> Tensor:
        self.seconds()
        lib, out = self.weights.engine.library, torch.empty_like(self.inputs[0])
        graph = self.weights.graph(len(out))
        lib.backend_tensor_get(graph.out, out.data_ptr(), 0, out.numel() * 4)
        return out

    def seconds(self) -> float:
        """Those of the graph.

        Raises:
            UnsupportedError: ggml could not compute it.
        """
        graph, found = self.weights.graph(len(self.inputs[0])), self.weights.engine
        for tensor, value in zip((graph.x, graph.ids, graph.weights), self.inputs, strict=True):
            _put(found, tensor, value)
        start = time.perf_counter()
        status = found.library.backend_graph_compute(found.backend, graph.graph)
        seconds = time.perf_counter() - start
        if status != 0:
            raise _refused(f"status {status}", "a graph that ggml computes")
        return seconds


def _refused(got: str, needs: str) -> UnsupportedError:
    return unsupported("bench layer", got=got, needs=needs, fix="Leave this peer out.")


def _put(found: Engine, tensor: int, value: Tensor) -> None:
    found.library.backend_tensor_set(tensor, value.data_ptr(), 0, value.numel() * value.element_size())


def _separated(layer: Layer) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2 * I, H], all of gate before all of up, and down."""
    gate_up, down = installed.matrices(layer)
    if layer.spec.activation.interleaved:
        gate_up = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], 1)
    return gate_up, down


def _separated_biases(layer: Layer) -> tuple[Tensor, Tensor]:
    gate_up, down = installed.biases(layer)
    assert gate_up is not None
    assert down is not None
    if layer.spec.activation.interleaved:
        gate_up = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], 1)
    return gate_up.contiguous(), down.contiguous()


def _encode(weight: Tensor, kind: str) -> Tensor:
    """[E, N, K] in one of ggml's types: a dense tensor, or bytes [E, N, row]; an expert at a time."""
    if kind in _DENSE:
        return weight.to(_DENSE[kind]).contiguous()
    lib = library()
    num_experts, rows, columns = weight.shape
    out = torch.empty(num_experts, rows, lib.row_size(TYPES[kind], columns), dtype=torch.uint8)

    def one(expert: int) -> None:
        wide = weight[expert].float().contiguous()
        lib.quantize_chunk(TYPES[kind], wide.data_ptr(), out[expert].data_ptr(), 0, rows, columns, None)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(one, range(num_experts)))
    return out


def _prepare(kind: str, repack: bool, layer: Layer) -> Bind:
    weights = _Weights(layer, kind, repack)

    def bind(x: Tensor, routing: Routing) -> Call:
        return _Run(weights, x, routing)

    return bind


def _refuses(kind: str, repack: bool, spec: LayerSpec, dtype: torch.dtype) -> str | None:
    exact = {"f32": (torch.float32,), "bf16": (torch.bfloat16,), "f16": (torch.float16, torch.bfloat16)}
    if dtype not in exact.get(kind, (dtype,)):
        return f"{dtype} does not fit into {kind}"
    columns = _COLUMNS.get(kind, 1)
    if spec.hidden_size % columns or spec.intermediate_size % columns:
        return f"{kind} needs rows whose length is a multiple of {columns}"
    if repack and (spec.hidden_size % 8 or spec.intermediate_size % 8):
        return "repacking takes rows in eights"
    return installed.refuses(spec)


def _absent() -> str | None:
    return next((why for name in LIBRARIES if (why := installed.missing("ggml", f"ggml/{name}")) is not None), None)


def _variant(kind: str, numbers: Numbers, repack: bool = False) -> Variant:
    name = f"ggml-{kind}{'-repacked' if repack else ''}"
    arguments = (kind, repack)
    prepare = partial(worker.prepare, partial(_prepare, *arguments))
    return Variant(name, partial(_refuses, *arguments), prepare, cost, "cpu", numbers, _absent)


def _numbers(kind: str, bits: int, stored: float) -> Numbers:
    prepared = stored + worker.LAYER_BITS
    if kind in _DENSE:
        return Numbers(kind, bits, stored, bits_to_prepare=prepared)
    return Numbers(kind, bits, stored, bound=QUANTISED[bits], products="int8", bits_to_prepare=prepared)


GGML = (
    *(
        _variant(kind, _numbers(kind, bits, stored))
        for kind, bits, stored in (
            ("f32", 32, 32.0),
            ("f16", 16, 16.0),
            ("bf16", 16, 16.0),
            ("q8_0", 8, 8.5),
            ("q4_0", 4, 4.5),
            ("q4_K", 4, 4.5),
            ("mxfp4", 4, 4.25),
        )
    ),
    *(_variant(kind, _numbers(kind, 4, stored), repack=True) for kind, stored in REPACKED.items()),
)
