"""What is timed: moestro as a user gets it, and what they would otherwise run.

To add a peer, write a file that makes its `Variant`s, and name them in `PEERS`. A peer that computes on the layer's own
numbers works on the very tensors of `Layer.stored`; one that stores them in its own way says how in its `Numbers`.
"""

from __future__ import annotations

from moestro.bench.peers.fp8 import FP8
from moestro.bench.peers.ggml import GGML
from moestro.bench.peers.kt import KT
from moestro.bench.peers.onnx import ONNX
from moestro.bench.peers.ours import ours
from moestro.bench.peers.torch_grouped import TORCH_GROUPED
from moestro.bench.peers.torch_packed import TORCH_PACKED
from moestro.bench.peers.transformers_experts import TRANSFORMERS
from moestro.bench.peers.triton_kernels import TRITON_KERNELS
from moestro.bench.peers.variant import DENSE, Bind, Call, Cost, Numbers, Variant
from moestro.bench.peers.vllm import VLLM
from moestro.errors import invalid_input

__all__ = ["DENSE", "PEERS", "Bind", "Call", "Cost", "Numbers", "Variant", "named_peers", "ours"]

_ON_GPUS = (*TRITON_KERNELS, *FP8)
PEERS = {p.name: p for p in (*TRANSFORMERS, TORCH_GROUPED, *_ON_GPUS, *VLLM, *GGML, *ONNX, *KT, *TORCH_PACKED)}
"""Every peer by name: all of Transformers' implementations first."""


def named_peers(names: list[str]) -> list[Variant]:
    """The peers of these names; "all" and "none" mean what they say.

    Raises:
        InvalidInputError: an unknown name.
    """
    if names in (["all"], ["none"]):
        return list(PEERS.values()) if names == ["all"] else []
    for name in names:
        if name not in PEERS:
            raise invalid_input(
                "bench layer", got=f"peer {name!r}", needs=f"one of {', '.join(PEERS)}", fix="Or 'all', or 'none'."
            )
    return [PEERS[name] for name in names]
