"""Experts in formats other than a dense tensor: as a value that is quantised, and as a module that holds them."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import pytest
import torch

import moestro
from moestro import Experts, ExpertWeights, MoE, Routing, TopKRouter, reference
from moestro.errors import InvalidInputError
from moestro.formats import FORMATS, PackedTensor, SplitTensor, dequantize, quantize
from moestro.types import GPT_OSS_SWIGLU
from moestro.weights import Layout
from tolerances import assert_close, bit_equal


def layer(dtype: torch.dtype = torch.float32) -> ExpertWeights:
    e, h, i = 4, 128, 128
    gate_up, down = torch.randn(e, 2 * i, h) / 11, torch.randn(e, h, i) / 11
    biases = torch.randn(e, 2 * i), torch.randn(e, h)
    return ExpertWeights.from_dense(gate_up.to(dtype), down.to(dtype), *biases, GPT_OSS_SWIGLU)


def apart(weights: ExpertWeights) -> ExpertWeights:
    """Each expert's gate and up, and its down, as matrices of their own."""

    def cut(stored: PackedTensor, parts: int) -> SplitTensor:
        n = stored.shape[1] // parts
        experts = range(stored.shape[0])
        return SplitTensor(tuple(tuple(stored[e].rows(p * n, p * n + n) for p in range(parts)) for e in experts))

    return replace(weights, gate_up=cut(weights.gate_up, 2), down=cut(weights.down, 1))


def tokens(num_tokens: int = 7) -> tuple[torch.Tensor, Routing]:
    return torch.randn(num_tokens, 128), Routing(torch.randint(-1, 4, (num_tokens, 2)), torch.rand(num_tokens, 2))


@pytest.mark.parametrize("search", ["nearest", "mse"])
@pytest.mark.parametrize("name", FORMATS)
def test_quantising_is_that_of_each_expert(name, search):
    weights = layer()
    for source in (weights, apart(weights)):
        packed = source.quantize(name, search)
        for stored, plain in ((packed.gate_up, weights.gate_up), (packed.down, weights.down)):
            assert isinstance(stored, PackedTensor)
            assert stored.format is FORMATS[name]
            for e in (0, 3):
                expected = quantize(plain.data[e], name, search)
                assert all(bit_equal(a, b) for a, b in zip(stored[e].tensors, expected.tensors, strict=True))
        assert packed.gate_up_bias is weights.gate_up_bias
        assert packed.activation is weights.activation


def test_quantising_takes_over_what_is_in_the_format_and_stacks_what_lies_apart():
    packed = layer().quantize("mxfp4")
    assert packed.quantize("mxfp4").gate_up is packed.gate_up
    assert isinstance(apart(packed).quantize("mxfp4").down, PackedTensor)
    again = packed.quantize("int8")
    assert_close(dequantize(again.down), dequantize(packed.quantize("bf16").quantize("int8").down))
    assert bit_equal(packed.quantize("float32").down.data, dequantize(packed.down))


def test_quantising_refuses_in_words():
    weights = layer()
    with pytest.raises(InvalidInputError, match="mxfp5"):
        weights.quantize("mxfp5")
    narrow = ExpertWeights.from_dense(torch.randn(2, 48, 32), torch.randn(2, 32, 24))
    with pytest.raises(InvalidInputError, match=r"quantize down.*multiple of 32"):
        narrow.quantize("mxfp4")
    weights.gate_up.data[2, 5, 7] = torch.nan
    with pytest.raises(InvalidInputError, match=r"nan at \[5, 7\] of gate_up\[2\]"):
        weights.quantize("int8")


@pytest.mark.parametrize("split", [False, True], ids=["stacked", "apart"])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4-g32-zp", "fp8-e4m3-b128", "bfloat16"])
def test_a_module_over_stored_experts(name, split):
    weights = layer().quantize(name)
    weights = apart(weights) if split else weights
    experts = Experts.from_weights(weights, "grouped")
    x, routing = tokens()
    assert_close(experts(x, routing), reference.expert_mlp(x, routing, weights))
    assert (experts.num_experts, experts.hidden_size, experts.intermediate_size) == (4, 128, 128)
    stored = [*experts.weights.gate_up.tensors, *experts.weights.down.tensors]
    originals = [*weights.gate_up.tensors, *weights.down.tensors]
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(stored, originals, strict=True))
    if split or name != "bfloat16":
        assert not any(t.requires_grad for t in stored)
        assert {n for n, _ in experts.named_parameters()} == {"gate_up_bias", "down_bias"}
        assert f"gate_up={name}" in str(experts)
    moe = MoE(TopKRouter(128, 4, 2), experts)
    assert_close(moe(x), reference.expert_mlp(x, moe.route(x), weights))


def test_buffers_are_named_after_projection_and_part():
    packed = layer().quantize("int4-g32-zp")
    names = [f"{p}_{part}" for p in ("gate_up", "down") for part in ("data", "scales", "zeros")]
    assert [n for n, _ in Experts.from_weights(packed).named_buffers()] == names
    split = [n for n, _ in Experts.from_weights(apart(layer())).named_buffers()]
    assert split[:3] == ["gate_up_data_0_0", "gate_up_data_0_1", "gate_up_data_1_0"]
    assert split[-1] == "down_data_3_0"


@pytest.mark.parametrize(
    ("name", "split"),
    [("mxfp4", False), ("fp8-e4m3-channel", False), ("nvfp4", False), ("nvfp4", True), ("float32", True)],
)
def test_casts_leave_stored_experts_alone_and_moves_take_them_along(name, split):
    weights = layer().quantize(name)
    experts = Experts.from_weights(apart(weights) if split else weights)
    before = {n: t.clone() for n, t in experts.named_buffers()}
    for cast in (Experts.half, Experts.bfloat16, Experts.double, lambda m: m.to(torch.float16), Experts.float):
        cast(experts)
        assert experts.gate_up_bias.dtype == experts.down_bias.dtype
        assert all(bit_equal(t, before[n]) for n, t in experts.named_buffers())
    x, routing = tokens()
    y = experts(x, routing)
    halves = experts.bfloat16()(x.bfloat16(), routing)
    assert_close(halves, y, torch.bfloat16)
    meta = copy.deepcopy(experts).to("meta", torch.float16)
    assert {t.device.type for t in meta.weights.tensors} == {"meta"}
    assert {n: t.dtype for n, t in meta.named_buffers()} == {n: t.dtype for n, t in before.items()}
    assert meta.gate_up_bias.dtype == torch.float16
    empty = meta.to_empty(device="cpu").bfloat16()
    empty.load_state_dict(experts.state_dict())
    assert bit_equal(empty(x.bfloat16(), routing), halves)


@pytest.mark.parametrize("split", [False, True], ids=["stacked", "apart"])
def test_state_round_trips(split):
    x, routing = tokens()
    made = [layer().quantize("mxfp4") for _ in range(2)]
    one, other = (Experts.from_weights(apart(w) if split else w) for w in made)
    assert not torch.equal(one(x, routing), other(x, routing))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert bit_equal(other(x, routing), one(x, routing))
    for assign in (False, True):
        fresh = Experts.from_weights(apart(layer().quantize("mxfp4")) if split else layer().quantize("mxfp4"))
        fresh(x, routing)
        fresh.load_state_dict(one.state_dict(), assign=assign)
        assert bit_equal(fresh(x, routing), one(x, routing))
    assert bit_equal(copy.deepcopy(one)(x, routing), one(x, routing))


def test_state_of_another_format_is_refused():
    mxfp4, int4, fp4 = (Experts.from_weights(layer().quantize(n)) for n in ("mxfp4", "int4-g32", "fp4-g32"))
    with pytest.raises(RuntimeError, match=r"gate_up_scales: torch\.uint8, here torch\.float16"):
        int4.load_state_dict(mxfp4.state_dict())
    with pytest.raises(RuntimeError, match=r"int4-g32.* here .*fp4-g32"):
        fp4.load_state_dict(int4.state_dict())  # tensors of the same names, dtypes and shapes
    with pytest.raises(RuntimeError, match=r"Missing key.*gate_up_data"):
        mxfp4.load_state_dict(Experts.from_weights(layer()).state_dict())


def test_dense_experts_are_parameters_as_before():
    experts = Experts.from_weights(layer())
    assert set(experts.state_dict()) == {"gate_up", "down", "gate_up_bias", "down_bias"}
    assert not list(experts.buffers())
    assert experts.state_dict()._metadata[""] == {"version": 1}


def test_a_module_is_quantised_into_another():
    torch.manual_seed(0)
    experts = Experts(4, 64, 32, strategy="selective")
    small = experts.quantize("int8", "mse")
    assert small.strategy == "selective"
    x, routing = torch.randn(5, 64), Routing(torch.randint(0, 4, (5, 2)), torch.rand(5, 2))
    expected = reference.expert_mlp(x, routing, experts.weights.quantize("int8", "mse"))
    assert_close(small(x, routing), expected)
    assert sum(b.nbytes for b in small.buffers()) < 0.3 * sum(p.nbytes for p in experts.parameters())
    mixed = Experts.from_weights(replace(experts.weights, down=small.weights.down))
    assert mixed.gate_up is not None
    assert mixed.down is None
    mixed(x, routing).sum().backward()
    assert mixed.gate_up.grad.abs().sum() > 0


def test_experts_apart_are_built_once():
    experts = Experts.from_weights(apart(layer().quantize("mxfp4")))
    built = experts.weights
    assert experts.weights is built
    experts.gate_up_bias = torch.nn.Parameter(torch.zeros_like(experts.gate_up_bias))
    assert experts.weights.gate_up_bias is experts.gate_up_bias


def test_layouts_build_what_they_were_taken_from():
    for weights in (layer().quantize("nvfp4"), apart(layer().quantize("nvfp4"))):
        layout = Layout.of(weights.gate_up)
        assert layout.format.names == ("data", "scales", "global_scales")
        built = layout.build(weights.gate_up.tensors)
        assert built.shape == weights.gate_up.shape
        assert built.nbytes == weights.gate_up.nbytes
        moestro.expert_mlp(*tokens(), replace(weights, gate_up=built))
