"""The layer as one would write it by hand on PyTorch's grouped matmul."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.bench.layers import Layer
from moestro.bench.peers.variant import Bind, Variant, cost
from moestro.reference import activate
from moestro.types import Routing


def _prepare(layer: Layer) -> Bind:
    stored, activation = layer.stored, layer.spec.activation
    gate_up, down = (t if layer.spec.transposed else t.transpose(1, 2) for t in (stored.gate_up, stored.down))

    every = torch.arange(layer.num_experts, device=layer.device)

    def call(x: Tensor, routing: Routing) -> Tensor:
        top_k = routing.top_k
        experts, order = routing.expert_ids.reshape(-1).sort()
        offsets = torch.searchsorted(experts, every, right=True, out_int32=True)  # waits for no device
        w = routing.routing_weights.reshape(-1)[order, None].to(x.dtype)
        rows = x[order // top_k]
        hidden = F.grouped_mm(rows * w if routing.weight_on == "input" else rows, gate_up, offs=offsets)
        if stored.gate_up_bias is not None:
            hidden += stored.gate_up_bias[experts]
        rows = F.grouped_mm(activate(hidden, activation), down, offs=offsets)
        if stored.down_bias is not None:
            rows += stored.down_bias[experts]
        if routing.weight_on == "output":
            rows = rows * w
        back = torch.empty_like(rows).index_copy_(0, order, rows)
        return back.view(-1, top_k, rows.shape[-1]).sum(1)

    return lambda x, routing: partial(call, x, routing)


TORCH_GROUPED = Variant("torch-grouped_mm", lambda spec, dtype: None, _prepare, cost)
