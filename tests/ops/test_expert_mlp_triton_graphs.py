"""Triton's kernels behind the public function: what is chosen and refused, and the node that a traced graph holds."""

from __future__ import annotations

import contextvars
from dataclasses import replace

import pytest
import torch

import moestro
from moestro import Activation, ExpertWeights, Routing, reference
from moestro.errors import UnsupportedError
from moestro.formats import PackedTensor, SplitTensor
from moestro.ops import expert_mlp, gpu
from tolerances import assert_close, bit_equal

from . import problems
from .stored import apart, moved
from .triton_calls import why_unsupported

pytestmark = pytest.mark.usefixtures("triton_device")

SIZES = problems.Sizes(4, 20, 12, 3, 2)


def case(device: torch.device, form: str = "float32"):
    weights = problems.weights(SIZES, Activation(), torch.float32, bias=True)
    if form == "int8":
        weights = weights.quantize(form)
    weights = moved(weights, device)
    routing = problems.routing(SIZES)
    routing = Routing(routing.expert_ids.to(device), routing.routing_weights.to(device))
    return torch.randn(4, 20, device=device), routing, weights


class Layer(torch.nn.Module):
    def __init__(self, weights: ExpertWeights, strategy: str = "auto") -> None:
        super().__init__()
        self.experts = moestro.Experts.from_weights(weights, strategy).requires_grad_(False)

    def forward(self, x, ids, routing_weights):
        return self.experts(x, Routing(ids, routing_weights)) * 2


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_a_graph_holds_the_node_that_stays_on_the_device(triton_device, form):
    x, routing, weights = case(triton_device, form)
    arguments = (x, routing.expert_ids, routing.routing_weights)
    layer = Layer(weights)
    expected = layer(*arguments)
    seen = []

    def keep(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=keep)
    assert bit_equal(compiled(*arguments), expected)
    assert any("expert_mlp_on_device" in target for target in seen)
    exported = torch.export.export(layer, arguments)
    assert bit_equal(exported.module()(*arguments), expected)
    nodes = [n.target for n in exported.graph.nodes if n.target is torch.ops.moestro.expert_mlp_on_device.default]
    assert len(nodes) == 1
    assert torch.Tag.cudagraph_unsafe not in nodes[0].tags
    assert torch.Tag.cudagraph_unsafe in torch.ops.moestro.expert_mlp.default.tags


def odd(stored: PackedTensor) -> PackedTensor:
    """The same bytes, at odd addresses."""
    raw = torch.zeros(stored.data.numel() + 1, dtype=torch.uint8, device=stored.data.device)
    return replace(stored, data=raw[1:].view(stored.data.shape).copy_(stored.data))


def spread(stored: PackedTensor) -> PackedTensor:
    """The same bytes in rows an odd number of them apart."""
    wide = torch.zeros(*stored.data.shape[:2], stored.data.shape[2] + 1, dtype=torch.uint8, device=stored.data.device)
    return replace(stored, data=wide[:, :, :-1].copy_(stored.data))


def differing(weights: ExpertWeights) -> SplitTensor:
    """Experts apart, of which one lies otherwise than the others."""
    first, *rest = apart(weights).gate_up.matrices
    return SplitTensor((tuple(replace(m, data=m.data.T.contiguous().T) for m in first), *rest))


def layers(device: torch.device) -> dict[str, tuple[torch.Tensor, ExpertWeights]]:
    """Rows and weights that the kernels take, or refuse for reasons of their own."""
    sizes = problems.Sizes(4, 128, 128, 3, 2)
    dense = moved(problems.weights(sizes, Activation(), torch.float32, bias=True), device)
    x = torch.randn(4, 128, device=device)
    packed = {form: dense.quantize(form) for form in ("int8", "mxfp4", "fp8-e4m3-tensor")}
    wide = moved(
        problems.weights(
            replace(sizes, num_experts=4097, hidden_size=2, intermediate_size=2), Activation(), torch.float32
        ),
        device,
    )
    return {
        "dense": (x, dense),
        "half": (x.half(), dense),
        "transposed": (x, moved(problems.weights(sizes, Activation(), torch.float32, transposed=True), device)),
        "mxfp4": (x, packed["mxfp4"]),
        "odd strides": (x, replace(packed["mxfp4"], gate_up=spread(packed["mxfp4"].gate_up))),
        "apart": (x, apart(dense)),
        "apart and differing": (x, replace(dense, gate_up=differing(dense))),
        "float64": (x.double(), dense),
        "float64 weights": (x, dense.quantize("float64")),
        "float64 bias": (x, replace(dense, down_bias=dense.down_bias.double())),
        "int8 inputs": (x, replace(packed["int8"], input_format="int8")),
        "int8 inputs, four bits": (x, replace(packed["mxfp4"], input_format="int8")),
        "fp8 inputs": (x, replace(packed["fp8-e4m3-tensor"], input_format="fp8-e4m3")),
        "many experts": (torch.randn(4, 2, device=device), wide),
    }


@pytest.mark.parametrize("name", layers(torch.device("cpu")))
def test_the_node_that_stays_on_the_device_stands_for_what_the_kernels_take(triton_device, name):
    x, weights = layers(triton_device)[name]
    routing = problems.routing(SIZES)
    ids, by = routing.expert_ids.to(triton_device), routing.routing_weights.to(triton_device)
    seen = []

    def keep(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return lambda *args: (x,)

    def layer(x, ids, by):
        return expert_mlp.run(x, Routing.unchecked(ids, by, "output"), weights)

    with torch.no_grad():
        torch.compile(layer, fullgraph=True, backend=keep)(x, ids, by)
        taken = why_unsupported(x, Routing(ids, by), weights) is None
    assert any("expert_mlp_on_device" in target for target in seen) is taken
    assert sum("expert_mlp" in target for target in seen) == 1
    assert taken is (name in ("dense", "half", "transposed", "mxfp4", "apart", "int8 inputs", "fp8 inputs"))


def test_a_capture_of_what_the_kernels_refuse_ends_with_the_reason(triton_device, monkeypatch):
    """Which a node may meet that was traced before its weights were moved to odd addresses."""
    x, weights = layers(triton_device)["mxfp4"]
    routing = problems.routing(SIZES)
    ids, by = routing.expert_ids.to(triton_device), routing.routing_weights.to(triton_device)
    stored = replace(weights, gate_up=odd(weights.gate_up))
    tensors = [*stored.gate_up.tensors], [*stored.down.tensors], stored.gate_up_bias, stored.down_bias
    words = ("output", weights.activation.code, "mxfp4|mxfp4", "auto")
    call = (x, ids, by, *tensors, *words)
    monkeypatch.setattr(gpu, "is_captured", lambda x: True)
    with pytest.raises(UnsupportedError, match=r"CUDA graph.*even addresses"):
        torch.ops.moestro.expert_mlp_on_device(*call)


def test_a_graph_of_any_number_of_tokens(triton_device):
    x, routing, weights = case(triton_device)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    arguments = (x, routing.expert_ids, routing.routing_weights)
    exported = torch.export.export(Layer(weights), arguments, dynamic_shapes=({0: tokens},) * 3)
    more = [torch.cat([t, t[:3]]) for t in arguments]
    expected = reference.expert_mlp(more[0], Routing(*more[1:]), weights) * 2
    assert_close(exported.module()(*more), expected, torch.float32)


def test_what_needs_a_gradient_takes_the_other_node(triton_device):
    x, routing, weights = case(triton_device)
    x.requires_grad_()
    torch._dynamo.reset()
    with moestro.use(implementation="torch"):
        y = torch.compile(Layer(weights), fullgraph=True, backend="aot_eager")(
            x, routing.expert_ids, routing.routing_weights
        )
    y.sum().backward()
    assert x.grad is not None


def test_reasons_are_sentences(triton_device):
    x, routing, weights = case(triton_device)
    refused = {
        "float64": (x.double(), routing, weights),
        "gradient": (x.clone().requires_grad_(), routing, weights),
        "Python function": (x, routing, replace(weights, output_norm=lambda y: y)),
        "one set of strides": (x, routing, replace(weights, gate_up=differing(weights))),
    }
    for words, arguments in refused.items():
        assert words in (why_unsupported(*arguments) or ""), words
        with pytest.raises(UnsupportedError, match=words):
            moestro.expert_mlp(*arguments)
    assert why_unsupported(x, routing, weights) is None


def test_the_node_passes_the_checks_of_torch_library(triton_device):
    x, routing, weights = case(triton_device)
    stored = [weights.gate_up.data], [weights.down.data], weights.gate_up_bias, weights.down_bias
    words = ("output", weights.activation.code, "float32|float32", "auto")
    arguments = (x, routing.expert_ids, routing.routing_weights, *stored, *words)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.moestro.expert_mlp_on_device, arguments, test_utils=checks)


def test_explain_says_how(triton_device):
    x, routing, weights = case(triton_device)
    found = moestro.explain(moestro.expert_mlp, x, routing, weights)
    assert found.chosen == "triton"
    assert "torch.use_deterministic_algorithms" in (found.strategy_reason or "")
    for strategy in ("grouped", "blockwise", "selective", "all_experts"):
        found = moestro.explain(moestro.expert_mlp, x, routing, weights, strategy)
        assert found.strategy == strategy
        assert "asked for by the caller" in (found.strategy_reason or "")
    assert "decoded in registers" in str(moestro.explain(moestro.expert_mlp, x, routing, weights.quantize("int8")))


def test_unforced_a_cpu_tensor_is_left_to_others():
    x, routing, weights = case(torch.device("cpu"))
    unforced = contextvars.Context()  # in which no block is open
    found = unforced.run(moestro.explain, moestro.expert_mlp, x, routing, weights)
    assert found.chosen != "triton"
    assert "NVIDIA GPUs" in next(c.reason for c in found.candidates if c.name == "triton")


def test_every_expert_on_every_token(triton_device):
    x, routing, weights = case(triton_device)
    x[0] = torch.nan  # which experts that nobody chose are computed of
    ids = torch.tensor([[-1, -1], [1, 1], [0, -1], [2, 0]], device=triton_device)
    routing = Routing(ids, torch.rand(4, 2, device=triton_device).masked_fill(ids < 0, torch.nan))
    y = moestro.expert_mlp(x, routing, weights, "all_experts")
    assert_close(y, reference.expert_mlp(x, routing, weights), torch.float32)
    with pytest.raises(UnsupportedError, match=r"weights the output.*weight_on is .input"):
        moestro.expert_mlp(x, replace(routing, weight_on="input"), weights, "all_experts")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
@pytest.mark.parametrize("num_tokens", [1, 9, 300])
def test_a_captured_call_is_replayed_with_other_ids(triton_device, num_tokens):
    sizes = problems.Sizes(num_tokens, 64, 48, 8, 2)
    weights = moved(problems.weights(sizes, Activation(), torch.bfloat16), triton_device)
    x = torch.randn(num_tokens, 64, device=triton_device, dtype=torch.bfloat16)
    ids = torch.zeros(num_tokens, 2, dtype=torch.long, device=triton_device)
    routing = Routing(ids, torch.rand(num_tokens, 2, device=triton_device))
    experts = moestro.Experts.from_weights(weights).requires_grad_(False)
    experts(x, routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = experts(x, routing)
    for kind in problems.KINDS:
        ids.copy_(problems.routing(sizes, kind=kind).expert_ids)
        graph.replay()
        assert_close(y, reference.expert_mlp(x, routing, weights).bfloat16(), torch.bfloat16)


def test_what_is_written_into_a_bias_of_any_stride_counts(triton_device):
    x, routing, weights = case(triton_device)
    wide = torch.randn(*weights.down_bias.shape, 2, device=triton_device)
    weights = replace(weights, down_bias=wide[..., 0])
    with torch.no_grad():
        moestro.expert_mlp(x, routing, weights)
        wide += 10
        y = moestro.expert_mlp(x, routing, weights)
    assert_close(y, reference.expert_mlp(x, routing, weights), torch.float32)
