"""ktransformers' CPU kernels: the compiled extension of the `kt-kernel` wheel, in a process of its own.

Its pool has as many threads as PyTorch, and two more that spin while they hand out work; hence the process.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moestro.bench.layers import Layer, LayerSpec
from moestro.bench.peers.variant import Bind, Call, Numbers, Variant, cost
from moestro.types import SWIGLU, Routing
from peers import installed, worker
from peers.bounds import INT4_ROWS, QUANTISED

_VARIANTS = {
    "amx": {"avx512f", "avx512bw", "amx_tile", "amx_int8"},
    "avx512_bf16": {"avx512f", "avx512bw", "avx512_bf16"},
    "avx512_vnni": {"avx512f", "avx512bw", "avx512_vnni"},
    "avx512_base": {"avx512f", "avx512bw"},
}
"""Of the wheel's extensions the first whose features are there."""
_CLASSES = {"bf16": "AMXBF16_MOE", "int8": "AMXInt8_MOE", "int4": "AMXInt4_MOE"}
_MOST_TOKENS = 1 << 14
_BITS = 48.0
"""Of a weight in the process while it prepares: the layer in float32, its halves in bfloat16."""


def _library() -> str | None:
    """The extension that the wheel would load here, whatever Python it was built for."""
    features = installed.features()
    name = next((name for name, needs in _VARIANTS.items() if needs <= features), None)
    if name is None:
        return None
    found = installed.folder()
    files = [] if found is None else sorted(found.glob(f"kt/kt_kernel/_kt_kernel_ext_{name}.*.so"))
    return f"kt/kt_kernel/{files[0].name}" if files else f"kt/kt_kernel/_kt_kernel_ext_{name}.so"


def _absent() -> str | None:
    file = _library()
    return "kt-kernel has no kernels for this processor" if file is None else installed.missing("kt-kernel", file)


def _module() -> Any:
    file = _library()
    assert file is not None
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", installed.path(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Layer:
    """A layer in one of the kernels' formats, in the process that computes it."""

    def __init__(self, kind: str, layer: Layer) -> None:
        kt, spec = _module(), layer.spec
        pool = kt.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [torch.get_num_threads()]
        self.infer = kt.CPUInfer(pool)
        gate_up, down = (weight.bfloat16() for weight in installed.matrices(layer))
        halves = (part.contiguous() for part in gate_up.chunk(2, 1))
        self.source = dict(zip(("gate", "up", "down"), (*halves, down), strict=True))
        e, self.top_k = layer.num_experts, spec.top_k
        config = kt.moe.MOEConfig(e, spec.top_k, spec.hidden_size, spec.intermediate_size, 0)
        config.pool, config.max_len = self.infer.backend_, _MOST_TOKENS
        for name, weight in self.source.items():
            setattr(config, f"{name}_proj", weight.data_ptr())
            if kind == "bf16":
                setattr(config, f"{name}_projs", [[expert.data_ptr() for expert in weight]])
        self.moe = getattr(kt.moe, _CLASSES[kind])(config)
        order = torch.arange(e)
        self._do(self.moe.load_weights_task(order.data_ptr()))
        self.source.clear()  # the kernels have made their own

    def _do(self, task: Any) -> None:
        self.infer.submit(task)
        self.infer.sync()

    def bind(self, x: Tensor, routing: Routing) -> Call:
        """The computation of one set of inputs."""
        rows, ids = x.bfloat16().contiguous(), routing.expert_ids.long().contiguous()
        weights = routing.routing_weights.contiguous()
        out, count = torch.empty_like(rows), torch.tensor([len(rows)], dtype=torch.int32)

        def compute() -> Tensor:
            addresses = (ids.data_ptr(), weights.data_ptr(), rows.data_ptr(), out.data_ptr())
            self._do(self.moe.forward_task(count.data_ptr(), self.top_k, *addresses, False))
            return out

        return compute


def _open(kind: str, layer: Layer) -> Bind:
    return _Layer(kind, layer).bind


def _refuses(kind: str, spec: LayerSpec, dtype: torch.dtype) -> str | None:
    if kind == "bf16" and dtype != torch.bfloat16:
        return f"it has no weights of {dtype}"
    if spec.bias:
        return "it has no biases"
    if spec.hidden_size % 256 or spec.intermediate_size % 256:
        return "it needs sizes that are multiples of 256"
    return installed.refuses(spec, (SWIGLU,))


def _variant(kind: str, numbers: Numbers) -> Variant:
    prepare = partial(worker.prepare, partial(_open, kind))
    return Variant(f"kt-{kind}", partial(_refuses, kind), prepare, cost, "cpu", numbers, _absent)


KT = (
    _variant("bf16", Numbers("bfloat16", 16, 16, bits_to_prepare=_BITS)),
    _variant("int8", Numbers("int8", 8, 8.03, bound=QUANTISED[8], products="int8", bits_to_prepare=_BITS)),
    _variant("int4", Numbers("int4", 4, 4.03, bound=INT4_ROWS, products="int8", bits_to_prepare=_BITS)),
)
