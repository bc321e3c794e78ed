"""Gradients of the primitive, and the primitive as one node of a traced graph."""

from __future__ import annotations

import itertools

import pytest
import torch

import moestro
from moestro import Activation, ExpertWeights, Routing, reference
from moestro.errors import UnsupportedError
from moestro.ops.expert_mlp import backward, library
from moestro.ops.expert_mlp.backward import activation_backward
from tolerances import assert_close

from . import problems

pytestmark = pytest.mark.usefixtures("plain_torch")

STRATEGIES = ("grouped", "selective", "all_experts", "blockwise-1", "blockwise-4", "blockwise-16")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_gradient_leaks_from_what_nobody_routes(strategy):
    """NaN in a token without experts, NaN in an expert without tokens, and a norm that is NaN for padding."""
    torch.manual_seed(0)
    sizes = problems.Sizes(5, 8, 6, 4, 2)
    base = problems.weights(sizes, Activation(), torch.float32)
    gate_up, down = base.gate_up.data.clone(), base.down.data.clone()
    gate_up[3] = down[3] = torch.nan
    leaves = [torch.randn(5, 8), torch.rand(5, 2), gate_up, down]
    leaves[0][1] = torch.nan
    for leaf in leaves:
        leaf.requires_grad_()
    x, w, gate_up, down = leaves
    ids = torch.tensor([[0, 1], [-1, -1], [2, 0], [1, -1], [0, 2]])
    plain_weights = ExpertWeights.from_dense(gate_up, down)
    normed = ExpertWeights(
        plain_weights.gate_up, plain_weights.down, output_norm=lambda y: y / y.norm(dim=-1, keepdim=True)
    )
    for weights in (plain_weights, normed):
        y = moestro.expert_mlp(x, Routing(ids, w), weights, strategy)
        for grad in torch.autograd.grad(y.sum(), leaves):
            assert torch.isfinite(grad).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float16_gradients_do_not_overflow_between_the_matmuls(strategy):
    gate_up, down = torch.full((1, 8, 4), 125.0), torch.full((1, 4, 4), 2.0**-14)
    weights = ExpertWeights.from_dense(gate_up.half(), down.half())
    routing = Routing(torch.zeros(2, 1, dtype=torch.long), torch.tensor([[0.5], [1.0]]))
    x = torch.full((2, 4), 2.0).half().requires_grad_()
    y = moestro.expert_mlp(x, routing, weights, strategy)
    assert_close(y, reference.expert_mlp(x, routing, weights), torch.float16)
    (grad,) = torch.autograd.grad(y.float().sum(), x)
    assert torch.isfinite(grad).all()
    node = torch.ops.moestro.expert_mlp(
        x,
        routing.expert_ids,
        routing.routing_weights,
        [gate_up.half()],
        [down.half()],
        None,
        None,
        "output",
        Activation().code,
        "float16|float16",
        strategy,
    )
    assert_close(torch.autograd.grad(node.float().sum(), x)[0], grad)


def test_parameters_inside_a_custom_function_are_trained():
    torch.manual_seed(0)
    sizes = problems.Sizes(9, 8, 6, 4, 2)
    slope = torch.nn.PReLU()
    custom = Activation("custom", gated=False, function=slope)
    weights, routing = problems.weights(sizes, custom, torch.float32), problems.routing(sizes)
    for strategy in STRATEGIES:
        slope.zero_grad()
        moestro.expert_mlp(torch.randn(9, 8), routing, weights, strategy).sum().backward()
        assert slope.weight.grad.abs() > 0


def test_nothing_to_do_still_has_a_gradient():
    weights = problems.weights(problems.Sizes(0, 6, 4, 3, 2), Activation(), torch.float32)
    for shape, strategy in itertools.product(((0, 2), (3, 0), (3, 2)), (*STRATEGIES, "auto")):
        leaves = [torch.full((shape[0], 6), torch.inf), torch.ones(shape), *weights.tensors]
        x, w, gate_up, down = (t.detach().clone().requires_grad_() for t in leaves)
        y = moestro.expert_mlp(x, Routing(torch.full(shape, -1), w), ExpertWeights.from_dense(gate_up, down), strategy)
        y.sum().backward()
        assert not any(leaf.grad.any() for leaf in (x, w, gate_up, down))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("strategy", ["grouped", "selective", "all_experts", "blockwise-4"])
def test_gradients_meet_the_reference(dtype, weight_on, strategy):
    torch.manual_seed(0)
    sizes = problems.Sizes(13, 12, 10, 4, 2)
    weights = problems.weights(sizes, Activation(), dtype, bias=True)
    routing = problems.routing(sizes, weight_on=weight_on)
    tensors = (torch.randn(13, 12).to(dtype), routing.routing_weights.nan_to_num(0.5), *weights.tensors)

    def gradients(f):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = f(leaves[0], Routing(routing.expert_ids, leaves[1], weight_on), ExpertWeights.from_dense(*leaves[2:]))
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
        return [leaf.grad for leaf in leaves]

    ours = gradients(lambda *a: moestro.expert_mlp(*a, strategy))
    for mine, theirs in zip(ours, gradients(reference.expert_mlp), strict=True):
        # A gradient is a sum over tokens of products, each rounded: one dtype coarser than the forward in bfloat16.
        error = (mine.double() - theirs.double()).abs().max() / theirs.double().abs().max()
        assert error < 16 * max(torch.finfo(dtype).eps, torch.finfo(mine.dtype).eps)


def test_gradcheck():
    torch.manual_seed(0)
    sizes = problems.Sizes(4, 3, 2, 3, 2)
    weights, routing = problems.weights(sizes, Activation(), torch.float64), problems.routing(sizes, kind="full")
    inputs = [torch.randn(4, 3).double(), routing.routing_weights.double(), *weights.tensors]

    def f(x, w, gate_up, down):
        routed = Routing(routing.expert_ids, w)
        return moestro.expert_mlp(x, routed, ExpertWeights.from_dense(gate_up, down), "grouped")

    assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in inputs])


@pytest.mark.parametrize("activation", problems.ACTIVATIONS, ids=lambda a: f"{a.kind}-{a.gated}-{a.limit}")
def test_closed_form_gradient_of_every_activation(activation):
    torch.manual_seed(0)
    h = (torch.randn(5, 14).double() * 3).requires_grad_()
    a = reference.activate(h, activation)
    grad = torch.randn_like(a)
    (expected,) = torch.autograd.grad(a, h, grad)
    assert_close(activation_backward(h.detach(), grad, activation), expected)


@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("bias", [False, True])
def test_traced_node_and_its_gradient(weight_on, bias):
    """torch.ops.moestro.expert_mlp, as a traced graph calls it, against autograd through the eager call."""
    torch.manual_seed(0)
    sizes = problems.Sizes(13, 12, 10, 4, 2)
    activation = Activation(alpha=1.3, limit=1.0, up_offset=0.5, interleaved=True)
    weights = problems.weights(sizes, activation, torch.float32, bias=bias)
    routing = problems.routing(sizes, kind="random", weight_on=weight_on)
    tensors = (torch.randn(13, 12), routing.routing_weights.nan_to_num(0.5), *weights.tensors)

    def gradients(node):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        x, w, gate_up, down, *biases = leaves
        biases = biases or [None, None]
        if node:
            words = (weight_on, activation.code, "float32|float32", "auto")
            y = torch.ops.moestro.expert_mlp(x, routing.expert_ids, w, [gate_up], [down], *biases, *words)
        else:
            routed = Routing(routing.expert_ids, w, weight_on)
            y = moestro.expert_mlp(x, routed, ExpertWeights.from_dense(gate_up, down, *biases, activation))
        y.square().sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    for node, eager in zip(gradients(True), gradients(False), strict=True):
        assert_close(node, eager)


def test_traced_node_is_a_well_formed_operator():
    torch.manual_seed(0)
    sizes = problems.Sizes(5, 8, 6, 3, 2)
    weights, routing = problems.weights(sizes, Activation(), torch.float32), problems.routing(sizes, kind="full")
    leaves = [t.requires_grad_() for t in (torch.randn(5, 8), routing.routing_weights, *weights.tensors)]
    x, w, gate_up, down = leaves
    words = ("output", Activation().code, "float32|float32", "auto")
    arguments = (x, routing.expert_ids, w, [gate_up], [down], None, None, *words)
    torch.library.opcheck(torch.ops.moestro.expert_mlp, arguments)


@pytest.mark.parametrize("activation", problems.ACTIVATIONS, ids=lambda a: f"{a.kind}-{a.gated}")
def test_activations_cross_into_a_graph_unchanged(activation):
    assert Activation.decode(activation.code) == activation


def test_compiles_whole_and_exports_with_any_number_of_tokens():
    torch.manual_seed(0)
    sizes = problems.Sizes(13, 12, 10, 4, 2)
    experts = moestro.Experts.from_weights(problems.weights(sizes, Activation(), torch.float32))

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = experts

        def forward(self, x, ids, w):
            return self.experts(x, Routing(ids, w))

    def inputs(num_tokens):
        r = problems.routing(problems.Sizes(num_tokens, 12, 10, 4, 2), kind="full")
        return torch.randn(num_tokens, 12), r.expert_ids, r.routing_weights

    layer, tokens = Layer(), torch.export.Dim("num_tokens")
    exported = torch.export.export(layer, inputs(13), dynamic_shapes=({0: tokens},) * 3).module()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (2, 13, 57):
        arguments = inputs(num_tokens)
        expected = layer(*arguments)
        assert_close(exported(*arguments), expected)
        assert_close(compiled(*arguments), expected)


def test_a_graph_that_trains_refuses_an_activation_whose_slope_is_not_known(monkeypatch):
    weights = problems.weights(problems.Sizes(2, 4, 3, 2, 1), Activation("tanh", gated=False), torch.float32)
    x, routing = torch.randn(2, 4), problems.routing(problems.Sizes(2, 4, 3, 2, 1), kind="full")
    expected = moestro.expert_mlp(x, routing, weights)
    monkeypatch.delitem(backward.SLOPES, "tanh")
    assert_close(library.traced(x, routing, weights, "auto"), expected)
    with pytest.raises(UnsupportedError, match="'tanh', and a tensor that requires a gradient"):
        library.traced(x.requires_grad_(), routing, weights, "auto")


def test_a_python_function_stays_out_of_graphs():
    """An exported graph refuses it in words; torch.compile leaves the call to eager Python, with the same result."""
    custom = Activation("custom", gated=False, function=torch.sin)
    weights = problems.weights(problems.Sizes(2, 4, 3, 2, 1), custom, torch.float32)
    routing = Routing(torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))

    class Layer(torch.nn.Module):
        def forward(self, x):
            return moestro.expert_mlp(x, routing, weights)

    x = torch.randn(2, 4)
    with pytest.raises(UnsupportedError, match="custom activation"):
        torch.export.export(Layer(), (x,), strict=False)
    assert_close(torch.compile(Layer(), backend="eager")(x), Layer()(x))
