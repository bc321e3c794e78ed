"""Gradients past experts that are packed or unstacked, and such experts in traced graphs."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch

import moestro
from moestro import Activation, Experts, Routing
from moestro.errors import UnsupportedError
from moestro.formats import FORMATS, SplitTensor, dense, quantize
from moestro.ops.expert_mlp import tuning
from moestro.ops.expert_mlp.library import read_layout, write_layout
from moestro.ops.expert_mlp.stored import recorded
from moestro.types import GPT_OSS_SWIGLU
from moestro.weights import Layout
from tolerances import assert_close, bit_equal

from . import problems
from .stored import apart, dequantized, poison, sizes_for

pytestmark = pytest.mark.usefixtures("plain_torch")


@pytest.fixture(autouse=True)
def small_panels(monkeypatch):
    monkeypatch.setattr(tuning, "panel_rows", lambda size, x: 24)


def problem(name, activation=GPT_OSS_SWIGLU):
    sizes = sizes_for(name)
    weights = problems.weights(sizes, activation, torch.float32, bias=True).quantize(name)
    return torch.randn(sizes.num_tokens, sizes.hidden_size), sizes, weights


def leaves_of(x, routing, weights):
    tensors = (x, routing.routing_weights.nan_to_num(0.5), weights.gate_up_bias, weights.down_bias)
    return [t.detach().clone().requires_grad_() for t in tensors]


def gradients(weights, leaves, routing, strategy="auto"):
    x, w, gate_up_bias, down_bias = leaves
    weights = replace(weights, gate_up_bias=gate_up_bias, down_bias=down_bias)
    y = moestro.expert_mlp(x, Routing(routing.expert_ids, w, routing.weight_on), weights, strategy)
    grad = torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype)
    return torch.autograd.grad(y, leaves, grad, materialize_grads=True)


def through_the_node(weights, leaves, routing):
    x, w, *biases = leaves
    layout = f"{write_layout(weights.gate_up)}|{write_layout(weights.down)}"
    stored = (list(weights.gate_up.tensors), list(weights.down.tensors))
    words = (routing.weight_on, weights.activation.code, layout, "auto")
    y = torch.ops.moestro.expert_mlp(x, routing.expert_ids, w, *stored, *biases, *words)
    return torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).reshape(y.shape))


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_those_of_the_dequantised_experts(name):
    x, sizes, weights = problem(name)
    routing = problems.routing(sizes, weight_on="input" if list(FORMATS).index(name) % 2 else "output")
    leaves = leaves_of(x, routing, weights)
    wide = dequantized(weights)
    for strategy in ("grouped", "selective", "all_experts", "blockwise-4"):
        expected = gradients(wide, leaves, routing, strategy)
        for stored in (weights, apart(weights)):
            for mine, theirs in zip(gradients(stored, leaves, routing, strategy), expected, strict=True):
                assert_close(mine, theirs, torch.float32)
    for stored in (weights, apart(weights)):
        for mine, theirs in zip(through_the_node(stored, leaves, routing), expected, strict=True):
            assert_close(mine, theirs, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("native", [True, False])
def test_gradients_in_other_dtypes(monkeypatch, dtype, native):
    monkeypatch.setattr(tuning, "multiplies_bfloat16", lambda: native)
    x, sizes, weights = problem("mxfp4", Activation())
    x, routing = x.to(dtype), problems.routing(sizes)
    wide = dequantized(weights, torch.float64)
    expected = gradients(wide, [t.double() for t in leaves_of(x, routing, weights)], routing)
    for stored in (weights, apart(weights)):
        leaves = leaves_of(x, routing, weights)
        for mine, theirs, leaf in zip(gradients(stored, leaves, routing), expected, leaves, strict=True):
            assert mine.dtype == leaf.dtype
            coarser = max(dtype, mine.dtype, key=lambda d: torch.finfo(d).eps)
            assert_close(mine, theirs, coarser)


def test_gradients_of_gradients():
    torch.manual_seed(0)
    packed = quantize(torch.randn(2, 6, 32).double(), "mxfp4")
    x = torch.randn(3, 32).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: recorded(x, packed, 1), x)
    assert torch.autograd.gradgradcheck(lambda x: recorded(x, packed, 1).sin(), x)


def test_nothing_that_was_dequantised_is_kept_for_the_backward_pass():
    sizes = problems.Sizes(6, 256, 256, 3, 2)
    base = problems.weights(sizes, Activation(), torch.float32)
    routing = problems.routing(sizes, kind="full")
    for weights in (base.quantize("int8"), apart(base), apart(base.quantize("bfloat16"))):
        own = {t.untyped_storage().data_ptr() for t in weights.tensors}
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            y = moestro.expert_mlp(torch.randn(6, 256).requires_grad_(), routing, weights)
        y.sum().backward()
        assert kept
        assert max(t.numel() for t in kept if t.untyped_storage().data_ptr() not in own) < 256 * 256 // 4


@pytest.mark.parametrize("strategy", ["grouped", "selective", "all_experts", "blockwise-4"])
def test_no_gradient_leaks_from_an_expert_nobody_picks(strategy):
    x, _, weights = problem("mxfp4")
    poison(weights.gate_up, 2)
    poison(weights.down, 2)
    ids = torch.tensor([[0, 1], [1, 3], [-1, -1]]).repeat(3, 1)
    routing = Routing(ids, torch.rand(9, 2))
    for grad in gradients(weights, leaves_of(x, routing, weights), routing, strategy):
        assert torch.isfinite(grad).all()


def test_experts_apart_are_trained_where_they_are_dense():
    sizes = problems.Sizes(9, 12, 10, 3, 2)
    base = problems.weights(sizes, Activation(), torch.float32)
    split, routing = apart(base), problems.routing(sizes, kind="full")
    leaves = [t.requires_grad_() for t in split.tensors]
    x = torch.randn(9, 12)
    for strategy in ("grouped", "selective", "all_experts", "blockwise-4"):
        grads = torch.autograd.grad(moestro.expert_mlp(x, routing, split, strategy).square().sum(), leaves)
        whole = [t.detach().clone().requires_grad_() for t in base.tensors]
        y = moestro.expert_mlp(x, routing, replace(base, gate_up=dense(whole[0]), down=dense(whole[1])), strategy)
        of_gate_up, of_down = torch.autograd.grad(y.square().sum(), whole)
        assert_close(torch.stack(grads[:6]).view(3, 20, 12), of_gate_up)
        assert_close(torch.stack(grads[6:]), of_down)


@pytest.mark.parametrize("name", FORMATS)
def test_layouts_cross_into_a_graph_unchanged(name):
    _, _, weights = problem(name, Activation())
    for stored in (weights.gate_up, weights.down, apart(weights).gate_up, apart(weights).down):
        layout = read_layout(write_layout(stored))
        assert layout == Layout.of(stored)
        again = layout.build(list(stored.tensors))
        assert type(again) is type(stored)
        assert again.shape == stored.shape
        assert all(a is b for a, b in zip(again.tensors, stored.tensors, strict=True))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4-g32-zp", "fp8-e4m3-b128"])
def test_the_node_is_a_well_formed_operator(name):
    x, sizes, weights = problem(name)
    routing = problems.routing(sizes, kind="full")
    x, w, *biases = leaves_of(x, routing, weights)
    split = apart(weights)
    layout = f"{write_layout(weights.gate_up)}|{write_layout(split.down)}"
    words = ("output", weights.activation.code, layout, "auto")
    stored = (list(weights.gate_up.tensors), list(split.down.tensors))
    arguments = (x, routing.expert_ids, w, *stored, *biases, *words)
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(t.dtype == torch.float8_e4m3fn for t in weights.tensors):
        checks.append("test_schema")  # which multiplies what it is given, and torch has no product of float8
    torch.library.opcheck(torch.ops.moestro.expert_mlp, arguments, test_utils=checks)


class Layer(torch.nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, ids, w):
        return self.experts(x, Routing(ids, w))


def inputs(sizes, num_tokens):
    r = problems.routing(replace(sizes, num_tokens=num_tokens), kind="full")
    return torch.randn(num_tokens, sizes.hidden_size), r.expert_ids, r.routing_weights


@pytest.mark.parametrize(("name", "split"), [("mxfp4", False), ("fp8-e4m3-b128", True), ("nvfp4", True)])
def test_compiles_whole_and_exports_with_any_number_of_tokens(name, split):
    torch.compiler.reset()
    _, sizes, weights = problem(name)
    layer = Layer(copy.deepcopy(Experts.from_weights(apart(weights) if split else weights)))
    tokens = torch.export.Dim("num_tokens")
    exported = torch.export.export(layer, inputs(sizes, 13), dynamic_shapes=({0: tokens},) * 3).module()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (2, 13, 57):
        arguments = inputs(sizes, num_tokens)
        expected = layer(*arguments)
        assert_close(exported(*arguments), expected)
        assert_close(compiled(*arguments), expected)
    x, ids, w = inputs(sizes, 9)
    leaves = [x.requires_grad_(), w.requires_grad_(), *layer.requires_grad_().parameters()]
    mine, theirs = (torch.autograd.grad(f(x, ids, w).square().sum(), leaves) for f in (compiled, layer))
    for a, b in zip(mine, theirs, strict=True):
        assert_close(a, b)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_graph_takes_weights_that_no_module_holds():
    torch.compiler.reset()
    x, sizes, weights = problem("mxfp4")
    routing = problems.routing(sizes)
    for stored in (weights, apart(weights)):
        compiled = torch.compile(
            lambda x, s=stored: moestro.expert_mlp(x, routing, s), fullgraph=True, backend="aot_eager"
        )
        assert_close(compiled(x), moestro.expert_mlp(x, routing, stored))


def test_what_a_graph_cannot_hold_is_refused_in_words():
    x, sizes, weights = problem("int8")
    routing = problems.routing(sizes, kind="full")
    own = replace(FORMATS["int8"], name="int8-of-mine")
    foreign = replace(weights, gate_up=replace(weights.gate_up, format=own))
    again = replace(weights, gate_up=replace(weights.gate_up, format=replace(own, name="fp8-e4m3-channel")))
    for unknown in (foreign, again):
        with pytest.raises(UnsupportedError, match="which a graph can name"):
            write_layout(unknown.gate_up)
    split = apart(dequantized(weights))
    trained = SplitTensor(tuple((dense(m.data.requires_grad_()),) for (m,) in split.down.matrices))
    layout = f"{write_layout(weights.gate_up)}|{write_layout(trained)}"
    words = ("output", weights.activation.code, layout, "auto")
    stored = (list(weights.gate_up.tensors), list(trained.tensors))
    biases = (weights.gate_up_bias, weights.down_bias)
    y = torch.ops.moestro.expert_mlp(x, routing.expert_ids, routing.routing_weights, *stored, *biases, *words)
    with pytest.raises(UnsupportedError, match="int8 and float32/1 that require a gradient"):
        y.sum().backward()

    class Call(torch.nn.Module):
        def forward(self, x):
            return moestro.expert_mlp(x, routing, replace(weights, down=trained))

    with pytest.raises(UnsupportedError, match="int8 and float32/1 that require a gradient"):
        torch.export.export(Call(), (x,), strict=False)


def test_settings_and_strategies_hold_inside_the_node():
    x, sizes, weights = problem("mxfp4")
    routing = problems.routing(sizes)
    words = ("output", weights.activation.code, "mxfp4|mxfp4")
    stored = (list(weights.gate_up.tensors), list(weights.down.tensors))
    biases = (weights.gate_up_bias, weights.down_bias)
    node = torch.ops.moestro.expert_mlp
    arguments = (x, routing.expert_ids, routing.routing_weights, *stored, *biases, *words)
    for strategy, implementation in itertools.product(("grouped", "all_experts"), ("torch", "reference")):
        with moestro.use(implementation=implementation):
            assert bit_equal(node(*arguments, strategy), moestro.expert_mlp(x, routing, weights, strategy))
