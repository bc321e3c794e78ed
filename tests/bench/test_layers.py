from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moestro import reference
from moestro.bench.layers import (
    LAYERS,
    RESERVE_BYTES,
    active_experts,
    expected_output,
    experts_that_fit,
    flops,
    inputs,
    make_layer,
    named,
)
from moestro.bench.peers.variant import cost
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.types import GPT_OSS_SWIGLU, SWIGLU, Routing
from tolerances import assert_close

# H, I, E, K as the checkpoints' own config.json states them.
PUBLISHED = {
    "olmoe": (2048, 1024, 64, 8),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "deepseek-v3": (7168, 2048, 256, 8),
    "llama4-scout": (5120, 8192, 16, 1),
}


def test_layers_have_their_published_sizes() -> None:
    sizes = {n: (s.hidden_size, s.intermediate_size, s.num_experts, s.top_k) for n, s in LAYERS.items()}
    h, i, *experts = PUBLISHED["mixtral"]
    assert sizes == PUBLISHED | {"mixtral-half": (h // 2, i // 2, *experts)}
    assert {n: s.activation for n, s in LAYERS.items()} == {
        n: GPT_OSS_SWIGLU if n == "gpt-oss-20b" else SWIGLU for n in sizes
    }
    assert [n for n, s in LAYERS.items() if s.transposed] == ["gpt-oss-20b", "llama4-scout"]
    assert [n for n, s in LAYERS.items() if s.weight_on == "input"] == ["llama4-scout"]
    assert [n for n, s in LAYERS.items() if s.bias] == ["gpt-oss-20b"]


def test_unknown_layer_names_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match=r"\[bench layer\] got layer 'gpt5'; needs one of olmoe, .*llama4"):
        named("gpt5")


@pytest.mark.parametrize("name", PUBLISHED)
def test_expert_bytes_are_those_of_the_tensors(tiny, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = make_layer(tiny(name), dtype, 6)
        assert layer.spec.expert_bytes(dtype) == layer.weights.bytes_per_expert
        assert layer.dtype == dtype


def test_bytes_and_flops_by_hand(tiny) -> None:
    layer = make_layer(replace(tiny("olmoe"), top_k=2), torch.bfloat16, 6)
    ids = torch.tensor([[0, 3], [3, -1], [5, 0]])
    routing = Routing(ids, torch.ones(3, 2))
    assert active_experts(ids) == 3
    assert cost(layer, routing).nbytes == 3 * (2 * 16 * 24 + 24 * 16) * 2
    assert flops(layer.spec, routing) == 5 * (2 * 2 * 16 * 24 + 2 * 24 * 16)
    olmoe = 8 * 3 * 2048 * 1024 * 4
    assert 8 * LAYERS["olmoe"].expert_bytes(torch.float32) == olmoe == 201_326_592


def test_experts_that_fit() -> None:
    spec = LAYERS["deepseek-v3"]
    each = 3 * 7168 * 2048 * 2
    assert experts_that_fit(spec, torch.bfloat16, 1 << 40, 2048) == 256
    # One token of eight pairs works on at most 8 * 4 * (H + I) numbers.
    reserve = RESERVE_BYTES + 2 * 8 * 4 * (7168 + 2048) * 2
    assert experts_that_fit(spec, torch.bfloat16, reserve + 100 * each, 1) == 100
    assert experts_that_fit(spec, torch.bfloat16, reserve + 100 * each - 1, 1) == 99
    # Where not all fit, copies of as many bits again do; but at least the experts of one token stay.
    assert experts_that_fit(spec, torch.bfloat16, reserve + 100 * each, 1, copies=16) == 50
    assert experts_that_fit(spec, torch.bfloat16, reserve + 9 * each, 1, copies=16) == 8
    assert experts_that_fit(spec, torch.bfloat16, reserve + 256 * each, 1, copies=16) == 256
    # A transposed family needs room for both layouts.
    scout = LAYERS["llama4-scout"]
    reserve = RESERVE_BYTES + 2 * 4 * (5120 + 8192) * 4
    assert experts_that_fit(scout, torch.float32, reserve + 5 * 2 * 3 * 5120 * 8192 * 4, 1) == 5
    with pytest.raises(UnsupportedError, match=r"deepseek-v3 in bfloat16 with 2\.1 GB .* needs 2\.9 GB for the 8"):
        experts_that_fit(spec, torch.bfloat16, RESERVE_BYTES, 1)


def test_fewer_experts_are_said(tiny) -> None:
    layer = make_layer(tiny("deepseek-v3"), torch.float32, 5)
    assert layer.notes == ["5 of 6 experts: all of them need 0.0 GB in float32, without copies"]
    assert make_layer(tiny("deepseek-v3"), torch.float32, 6).notes == []
    assert "K-contiguous copy" in make_layer(tiny("llama4-scout"), torch.float32, 6).notes[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_stored_tensors_are_shared_or_their_transpose(tiny, name: str) -> None:
    layer = make_layer(tiny(name), torch.float32, 6)
    gate_up, down = layer.weights.gate_up.data, layer.weights.down.data
    assert gate_up.is_contiguous()
    assert down.is_contiguous()
    if layer.spec.transposed:
        assert torch.equal(layer.stored.gate_up, gate_up.transpose(1, 2))
        assert torch.equal(layer.stored.down, down.transpose(1, 2))
        assert layer.stored.gate_up.is_contiguous()
    else:
        assert layer.stored.gate_up.data_ptr() == gate_up.data_ptr()
        assert layer.stored.down.data_ptr() == down.data_ptr()
    assert (layer.stored.gate_up_bias is not None) == layer.spec.bias
    assert len({tuple(expert.flatten().tolist()) for expert in gate_up}) == 6  # no two experts are the same


def test_one_token_walks_all_experts_before_one_returns(tiny) -> None:
    layer = make_layer(replace(tiny("olmoe", 11), top_k=3), torch.float32, 11)
    _, routings = inputs(layer, 1, count=16)
    seen = torch.cat([r.expert_ids.flatten() for r in routings]).tolist()
    assert len(routings) == 3
    assert len(set(seen)) == len(seen) == 9


@pytest.mark.parametrize("num_tokens", [2, 7, 40])
def test_routings_are_valid_and_equal_work(tiny, num_tokens: int) -> None:
    layer = make_layer(replace(tiny("olmoe", 16), top_k=3), torch.bfloat16, 16)
    x, routings = inputs(layer, num_tokens, count=5)
    assert x.shape == (num_tokens, 24)
    assert x.dtype == torch.bfloat16
    assert 1 <= len(routings) <= 5
    assert len({active_experts(r.expert_ids) for r in routings}) == 1
    for routing in routings:
        routing.check(16)
        assert all(len(set(row)) == 3 for row in routing.expert_ids.tolist())
        assert torch.equal(routing.routing_weights, routing.routing_weights.bfloat16().float())
        assert_close(routing.routing_weights.sum(1), torch.ones(num_tokens), torch.bfloat16)


@pytest.mark.parametrize("name", PUBLISHED)
def test_expected_output_is_the_reference(tiny, name: str) -> None:
    layer = make_layer(tiny(name), torch.float32, 6)
    x, routings = inputs(layer, 9, count=2)
    for routing in routings:
        expected = reference.expert_mlp(x, routing, layer.weights)
        assert expected.std() > 1e-2
        assert_close(expected_output(layer, x, routing), expected)
