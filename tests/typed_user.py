"""What a user writes: `mypy` passes it with the package, but for the mistake in its last line. Nothing runs it."""

from __future__ import annotations

from typing import assert_type

import torch

import moestro
from moestro.hf import accelerate, load

moestro.load("folder", format="mxfp4")
load("folder")
assert_type(moestro.accelerate(torch.nn.ReLU()), torch.nn.ReLU)
assert_type(accelerate(torch.nn.ReLU()), torch.nn.ReLU)
ffn = moestro.FFN(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
x = torch.randn(3, 8)
moestro.explain(ffn, x)
with moestro.use(implementation="reference"):
    assert_type(moestro.topk(x, 2), tuple[torch.Tensor, torch.Tensor])
moestro.load("folder", no_such_argument=1)  # type: ignore[call-arg]
