"""Peers from outside: engines that a user of PyTorch and Transformers could run instead, each on the same layers.

`moestro bench layer` finds them. To add one, write a file that makes its `Variant`s, and name them in `PEERS`. A peer
that computes on the layer's own numbers works on the very tensors of `Layer.stored`; one that stores them in its own
way says how in its `Numbers`.
"""

from __future__ import annotations

from peers.fp8 import FP8
from peers.ggml import GGML
from peers.installed import versions
from peers.kt import KT
from peers.onnx import ONNX
from peers.torch_packed import TORCH_PACKED
from peers.triton_kernels import TRITON_KERNELS
from peers.vllm import VLLM

__all__ = ["PEERS", "versions"]

PEERS = (*TRITON_KERNELS, *FP8, *VLLM, *GGML, *ONNX, *KT, *TORCH_PACKED)
