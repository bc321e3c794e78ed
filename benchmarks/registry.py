"""One benchmark for each operation under src/moestro/ops. A test holds that none is missing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro import reference
from moestro.bench.layers import LAYERS, expected_output, inputs, make_layer
from moestro.bench.peers import ours
from moestro.ops import dispatch, grouping
from moestro.ops.attention import ATTENTION
from moestro.ops.attention.reference import attention as reference_attention
from moestro.ops.dispatch import Operation, Prepared
from moestro.ops.expert_mlp import tuning
from moestro.ops.grouping import GROUPING
from moestro.ops.projection import PROJECTION
from moestro.ops.projection.reference import projection as reference_projection
from moestro.ops.topk import TOPK
from operations import OpBenchmark, OpCase

INPUTS = 4


def prepared(operation: Operation, *arguments: object) -> list[Prepared]:
    """Of every implementation that can run these arguments, in order of priority."""
    found = dispatch.candidates(operation, *arguments).values()
    return [entry for entry in found if isinstance(entry, Prepared)]


def topk(T: int, E: int, k: int) -> OpCase:
    """Every implementation of top-k against torch.topk, on distinct scores, where both have one answer."""
    generator = torch.Generator().manual_seed(0)
    scores = [torch.rand(T, E, generator=generator).argsort(-1).float() for _ in range(INPUTS)]
    calls = {"torch.topk": [partial(torch.topk, s, k) for s in scores]}
    outputs = {"torch.topk": lambda: (torch.topk(scores[0], k).indices,)}
    for entry in prepared(TOPK, scores[0], k):
        calls[entry.implementation] = [partial(entry, s, k) for s in scores]
        outputs[entry.implementation] = lambda entry=entry: (entry(scores[0], k),)
    return OpCase(f"T={T} E={E} k={k}", calls, outputs, (reference.topk(scores[0], k),))


def grouping_by_expert(T: int, E: int, K: int, B: int) -> OpCase:
    """Row order and offsets from a sort by hand, from every implementation, and from the schedule of blocks of B."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.rand(T, E, generator=generator).topk(K).indices for _ in range(INPUTS)]

    def by_hand(expert_ids: Tensor) -> tuple[Tensor, Tensor]:
        flat = expert_ids.reshape(-1)
        order = flat.argsort(stable=True)
        return order, torch.bincount(flat, minlength=E).cumsum(0)

    def rows_of_blocks() -> tuple[Tensor, Tensor]:
        schedule = grouping.block_schedule(ids[0], E, B)
        pairs = schedule.pair_ids.flatten()
        return pairs[pairs >= 0], schedule.counts.cumsum(0)

    def rows_of(entry: Prepared) -> tuple[Tensor, Tensor]:
        found = entry(ids[0], E)
        return found.token_ids * K + found.slots, found.offsets[1:]

    calls = {"sort and bincount": [partial(by_hand, i) for i in ids]}
    outputs = {"sort and bincount": partial(by_hand, ids[0])}
    for entry in prepared(GROUPING, ids[0], E):
        calls[entry.implementation] = [partial(entry, i, E) for i in ids]
        outputs[entry.implementation] = partial(rows_of, entry)
    calls[f"block_schedule-{B}"] = [partial(grouping.block_schedule, i, E, B) for i in ids]
    outputs[f"block_schedule-{B}"] = rows_of_blocks
    tokens, slots, offsets = reference.group_by_expert(ids[0], E)
    pairs = torch.tensor([t * K + s for t, s in zip(tokens, slots, strict=True)])
    return OpCase(f"T={T} E={E} K={K}", calls, outputs, (pairs, torch.tensor(offsets[1:])))


def expert_mlp(T: int, H: int, I: int, E: int, K: int) -> OpCase:  # noqa: E741
    """The four strategies against auto, in bfloat16. `moestro bench layer` sets the operation against its peers."""
    spec = replace(LAYERS["olmoe"], hidden_size=H, intermediate_size=I, num_experts=E, top_k=K)
    layer = make_layer(spec, torch.bfloat16, E)
    x, routings = inputs(layer, T, INPUTS)
    calls = {
        strategy: [ours(strategy).prepare(layer)(x, routing) for routing in routings]
        for strategy in ("auto", *tuning.STRATEGIES)
    }
    outputs = {strategy: lambda call=made[0]: (call(),) for strategy, made in calls.items()}
    return OpCase(f"T={T} H={H} I={I} E={E} K={K}", calls, outputs, (expected_output(layer, x, routings[0]),))


def projection(T: int, N: int, K: int) -> OpCase:
    """Every implementation of a bfloat16 projection against torch's linear."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(N, K, generator=generator).mul_(K**-0.5).bfloat16() for _ in range(INPUTS)]
    x = torch.randn(T, K, generator=generator).bfloat16()
    calls = {"linear": [partial(torch.nn.functional.linear, x, w) for w in weights]}
    outputs = {"linear": lambda: (torch.nn.functional.linear(x, weights[0]),)}
    with torch.no_grad():
        each = [prepared(PROJECTION, x, w, None) for w in weights]  # which take the address of their weight
        for entries in zip(*each, strict=True):
            name = entries[0].implementation
            if name not in ("torch", "reference"):
                calls[name] = [partial(entry, x, w, None) for entry, w in zip(entries, weights, strict=True)]
                outputs[name] = lambda entry=entries[0]: (entry(x, weights[0], None),)
    return OpCase(f"T={T} N={N} K={K}", calls, outputs, (reference_projection(x, weights[0], None),))


def attention(B: int, H: int, G: int, T: int, D: int) -> OpCase:
    """Every implementation of one query's attention, in bfloat16, against torch's scaled_dot_product_attention."""
    generator = torch.Generator().manual_seed(0)

    def made() -> tuple[Tensor, ...]:
        shapes = (B, H, D), (B, G, T, D), (B, G, T, D)
        return tuple(torch.randn(shape, generator=generator).bfloat16() for shape in shapes)

    def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=H != G)
        return found[:, :, 0]

    each, rest = [made() for _ in range(INPUTS)], (D**-0.5, None, None)
    calls = {"scaled_dot_product_attention": [partial(fused, *three) for three in each]}
    outputs = {"scaled_dot_product_attention": lambda: (fused(*each[0]),)}
    for entry in prepared(ATTENTION, *each[0], *rest):
        if entry.implementation != "reference":
            calls[entry.implementation] = [partial(entry, *three, *rest) for three in each]
            outputs[entry.implementation] = lambda entry=entry: (entry(*each[0], *rest),)
    return OpCase(f"B={B} H={H} G={G} T={T} D={D}", calls, outputs, (reference_attention(*each[0], *rest),))


BENCHMARKS = {
    entry.op: entry
    for entry in (
        OpBenchmark("topk", ((1, 128, 8), (16, 128, 8), (512, 256, 8), (2048, 256, 8)), topk),
        OpBenchmark(
            "grouping", ((1, 64, 8, 16), (16, 64, 8, 16), (512, 64, 8, 64), (2048, 64, 8, 64)), grouping_by_expert
        ),
        OpBenchmark(
            "attention",
            (
                (1, 64, 8, 128, 64),
                (1, 64, 8, 2048, 64),
                (8, 64, 8, 512, 64),
                (1, 16, 16, 512, 128),
                (1, 32, 4, 2048, 128),
            ),
            attention,
        ),
        OpBenchmark("projection", ((1, 32768, 2880), (16, 32768, 2880), (128, 4096, 2880)), projection),
        OpBenchmark(
            "expert_mlp",
            # the first is all calls and no weights
            ((1, 64, 32, 64, 8), (1, 2048, 1024, 64, 8), (16, 2048, 1024, 64, 8), (128, 2048, 1024, 64, 8)),
            expert_mlp,
        ),
    )
}
