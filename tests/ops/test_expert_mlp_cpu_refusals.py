"""What the native engine leaves to torch, and the sentence why; the engine inside traced graphs."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import moestro
from moestro import Activation, ExpertWeights, Routing, reference
from moestro.errors import UnsupportedError
from moestro.formats import FORMATS, PackedTensor, SplitTensor, quantize
from moestro.ops import dispatch
from moestro.ops.expert_mlp import EXPERT_MLP, cpu, triton
from tolerances import assert_close, bit_equal

from . import problems
from .engines import RUNNING, every_isa, needs_engine, run
from .stored import apart

SIZES = problems.Sizes(5, 32, 32, 4, 2)


@pytest.fixture
def parts():
    weights = problems.weights(SIZES, Activation(), torch.float32, bias=True)
    return torch.randn(5, 32), problems.routing(SIZES, kind="full"), weights


class Other(torch.Tensor):
    """An ordinary tensor's memory under another name."""


def refused(x, routing, weights, sentence):
    """Every instruction set says so, and forcing one is an error that says so."""
    explained = moestro.explain(moestro.expert_mlp, x, routing, weights)
    reasons = {c.name: c.reason for c in explained.candidates if c.name.startswith("cpu-")}
    for isa in RUNNING:
        assert sentence in reasons[f"cpu-{isa.name}"]
        with pytest.raises(UnsupportedError, match=sentence):
            run(isa, x, routing, weights)
    assert not (explained.chosen or "").startswith("cpu-")


def left_to_torch(x, routing, weights, sentence):
    refused(x, routing, weights, sentence)
    y = moestro.expert_mlp(x, routing, weights)
    assert_close(y, reference.expert_mlp(x, routing, weights), torch.float32)
    return y


@needs_engine
def test_gradients(parts):
    x, routing, weights = parts
    gate_up, down = weights.gate_up.data, weights.down.data
    wanted = "it computes no gradients, and a tensor requires one"
    assert left_to_torch(x.clone().requires_grad_(), routing, weights, wanted).requires_grad
    trained = replace(routing, routing_weights=routing.routing_weights.clone().requires_grad_())
    assert left_to_torch(x, trained, weights, wanted).requires_grad
    for changed in (
        ExpertWeights.from_dense(gate_up.clone().requires_grad_(), down),
        ExpertWeights.from_dense(gate_up, torch.nn.Parameter(down)),
        replace(weights, gate_up_bias=weights.gate_up_bias.clone().requires_grad_()),
        replace(weights, down_bias=weights.down_bias.clone().requires_grad_()),
    ):
        assert left_to_torch(x, routing, changed, wanted).requires_grad
        with torch.no_grad():
            assert moestro.explain(moestro.expert_mlp, x, routing, changed).chosen == f"cpu-{RUNNING[0].name}"
            assert not moestro.expert_mlp(x, routing, changed).requires_grad
    split = apart(weights)
    split.down.matrices[3][0].data.requires_grad_()  # of one expert alone
    refused(x, routing, split, wanted)
    with forward_ad.dual_level():
        refused(x, routing, weights, "forward-mode differentiation is on")


@needs_engine
def test_dtypes_and_devices(parts):
    x, routing, weights = parts
    wide = problems.weights(SIZES, Activation(), torch.float64)
    left_to_torch(x.double(), routing, weights, "it computes in float32, and a tensor is of torch.float64")
    refused(x, replace(routing, routing_weights=routing.routing_weights.double()), weights, "torch.float64")
    refused(x, routing, replace(weights, down_bias=weights.down_bias.double()), "torch.float64")
    refused(x, routing, wide, "it does not read float64, in which gate_up is stored")
    own = replace(weights.gate_up, format=replace(FORMATS["float32"], name="mine"))
    refused(x, routing, replace(weights, gate_up=own), "it does not read mine")
    there = ExpertWeights.from_dense(weights.gate_up.data.to("meta"), weights.down.data.to("meta"))
    routed = Routing(routing.expert_ids.to("meta"), routing.routing_weights.to("meta"))
    for isa in RUNNING:
        assert cpu.why_unsupported(isa, x.to("meta"), routed, there) == "it computes on the CPU, and x is on meta"
        lacking = replace(isa, missing=("AVX-1024",))
        assert cpu.why_unsupported(lacking, x, routing, weights) == "this processor lacks AVX-1024"


def experts_of(form, monkeypatch):
    """Three plain experts of 96 x 96 in a format that nobody has heard of, registered."""
    monkeypatch.setitem(FORMATS, form.name, form)
    grid = (3, *form.scaling.blocks(96, 96))
    codes = torch.randint(0, 100, (3, 96, 96 // form.per_item), dtype=torch.uint8).view(form.storage)
    zeros = torch.zeros(grid, dtype=torch.uint8) if form.scaling.zeros else None
    stored = PackedTensor(codes, form, torch.rand(grid).to(form.scaling.dtypes[0]), zeros)
    return ExpertWeights(stored, stored, activation=Activation("relu", gated=False))


STRANGE = {
    ("int4-g32", "columns", 48): ("a power of two", "a power of two of a row's columns"),
    ("int4-g32", "columns", 8): ("at least 16", "at least 16"),
    ("int4-g32", "columns", 0): (None, "at least 16"),
    ("int4-g32", "zeros", True): ("zero points of uint4", "zero points of uint4"),
    ("fp8-e4m3-channel", "columns", 16): ("at least 32", "blocks of a multiple of 128 columns"),
    ("fp8-e4m3-channel", "columns", 32): (None, "blocks of a multiple of 128 columns"),
}


@needs_engine
@pytest.mark.parametrize("change", STRANGE, ids=str)
def test_formats_of_known_elements_that_nobody_has_heard_of(change, monkeypatch):
    name, field, value = change
    form = FORMATS[name]
    form = replace(form, name="strange", scaling=replace(form.scaling, **{field: value}))
    x, routing = torch.randn(5, 96), problems.routing(problems.Sizes(5, 96, 96, 3, 2), kind="full")
    weights = experts_of(form, monkeypatch)
    of_engine, of_kernels = STRANGE[change]
    if of_engine is not None:
        left_to_torch(x, routing, weights, of_engine)
    for isa in [] if of_engine else RUNNING:
        assert_close(run(isa, x, routing, weights), reference.expert_mlp(x, routing, weights), torch.float32)
    assert of_kernels in (triton.why_unsupported(x, routing, weights) or "")


@needs_engine
def test_int8_weights_in_groups_do_not_meet_int8_inputs(monkeypatch):
    form = FORMATS["int8"]
    form = replace(form, name="strange", scaling=replace(form.scaling, columns=32))
    weights = replace(experts_of(form, monkeypatch), input_format="int8")
    x, routing = torch.randn(5, 96), problems.routing(problems.Sizes(5, 96, 96, 3, 2), kind="full")
    left_to_torch(x, routing, weights, "int8 weights with a scale a row, and gate_up is stored as strange")


@needs_engine
def test_functions(parts):
    x, routing, weights = parts
    norm = replace(weights, output_norm=lambda y: y / y.norm(dim=-1, keepdim=True))
    left_to_torch(x, routing, norm, "it cannot call a Python function")
    own = replace(weights, activation=Activation("custom", function=lambda z: z[..., :32].sin()))
    left_to_torch(x, routing, own, "it cannot call a Python function")


@needs_engine
def test_tensors_that_are_more_than_their_memory(parts):
    x, routing, weights = parts
    kind = "a tensor is of a subclass or stands for its negative"
    gate_up = ExpertWeights.from_dense(weights.gate_up.data.as_subclass(Other), weights.down.data)
    left_to_torch(x, routing, gate_up, kind)
    left_to_torch(x.as_subclass(Other), routing, weights, kind)
    left_to_torch(x, routing, replace(weights, down_bias=weights.down_bias.as_subclass(Other)), kind)
    refused(x, Routing(routing.expert_ids.as_subclass(Other), routing.routing_weights), weights, kind)
    left_to_torch(torch._neg_view(x), routing, weights, kind)
    fake = torch._subclasses.FakeTensorMode().from_tensor(x)
    assert kind in cpu.why_unsupported(RUNNING[0], fake, routing, weights)


@needs_engine
def test_whoever_watches_sees_every_operation(parts):
    x, routing, weights = parts
    watched = "is to see every operation"
    with FlopCounterMode(display=False) as counter:
        refused(x, routing, weights, watched)
        moestro.expert_mlp(x, routing, weights, "all_experts")
    assert counter.get_total_flops() >= 2 * 5 * 4 * 3 * 32 * 32
    seen = []
    ids = routing.expert_ids

    def mapped(rows):
        seen.append(cpu.why_unsupported(RUNNING[0], rows, Routing(ids, routing.routing_weights), weights))
        return rows

    torch.vmap(mapped)(torch.stack([x, x]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and it distrusts ids that are read
        traced = torch.jit.trace(
            lambda rows: moestro.expert_mlp(rows, routing, weights, "grouped"), (x,), check_trace=False
        )
    assert_close(traced(3 * x), moestro.expert_mlp(3 * x, routing, weights))
    assert watched in seen[0]


@needs_engine
def test_unstacked_experts_that_are_not_alike(parts):
    x, routing, weights = parts
    tall = tuple((e[0].rows(0, 16), e[0].rows(16, 64)) for e in (weights.gate_up.blocks(i) for i in range(4)))
    left_to_torch(x, routing, replace(weights, gate_up=SplitTensor(tall)), "the matrices of gate_up differ in height")
    packed = [quantize(torch.randn(32, 32), "fp4-g32") for _ in range(4)]
    packed[2] = replace(packed[2], scales=packed[2].scales.bfloat16())
    mixed = replace(weights, down=SplitTensor(tuple((m,) for m in packed)))
    left_to_torch(x, routing, mixed, "the scales of down are of several dtypes")
    strided = [PackedTensor(torch.randn(32, 64)[:, :32], FORMATS["float32"]) for _ in range(4)]
    apart_down = replace(weights, down=SplitTensor(tuple((m,) for m in strided)))
    left_to_torch(x, routing, apart_down, "it reads unstacked experts as contiguous matrices, and one of down is not")


@every_isa
def test_the_default_device_is_not_asked(isa, parts):
    x, routing, weights = parts
    expected = run(isa, x, routing, weights)
    with torch.device("meta"):
        assert bit_equal(run(isa, x, routing, weights), expected)


@pytest.fixture
def calls():
    """The names of the instruction sets that ran, in order."""
    names = []

    def tell(prepared, arguments, result):
        names.append(prepared.implementation.removeprefix("cpu-"))

    with dispatch.observed(EXPERT_MLP, tell):
        yield names


class Layer(torch.nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.experts = moestro.Experts.from_weights(weights)

    def forward(self, x, ids, w):
        return self.experts(x, Routing(ids, w))


@every_isa
@pytest.mark.parametrize("name", ["float32", "mxfp4"])
def test_the_engine_runs_inside_compiled_and_exported_graphs(isa, calls, name):
    experts = problems.weights(SIZES, Activation(), torch.float32).quantize(name)
    layer = Layer(experts).requires_grad_(False)

    def inputs(num_tokens):
        r = problems.routing(problems.Sizes(num_tokens, 32, 32, 4, 2), kind="full")
        return torch.randn(num_tokens, 32), r.expert_ids, r.routing_weights

    tokens = torch.export.Dim("num_tokens")
    with torch.no_grad(), moestro.use(implementation=f"cpu-{isa.name}"):
        exported = torch.export.export(layer, inputs(13), dynamic_shapes=({0: tokens},) * 3).module()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        for num_tokens in (2, 13, 57):
            arguments = inputs(num_tokens)
            expected = layer(*arguments)
            for graph in (exported, compiled):
                calls.clear()
                assert bit_equal(graph(*arguments), expected)
                assert calls == [isa.name]


@needs_engine
def test_the_best_is_picked_by_itself(calls, parts):
    x, routing, weights = parts
    with torch.no_grad():
        moestro.expert_mlp(x, routing, weights)
    assert calls == [RUNNING[0].name]


@pytest.mark.parametrize("split", [False, True])
def test_parameters_that_came_to_hold_another_dtype_are_left_to_torch(split):
    """`Module.to(dtype)` exchanges what a parameter holds under a value that was made of it before."""
    gate_up, down = (torch.nn.Parameter(torch.randn(2, n, k), requires_grad=False) for n, k in ((128, 32), (32, 64)))
    weights = ExpertWeights.from_dense(gate_up, down)
    if split:
        weights = apart(weights)
    x, routing = torch.randn(3, 32), Routing(torch.tensor([[0], [1], [0]]), torch.ones(3, 1))
    before = moestro.expert_mlp(x, routing, weights)
    for stored in (weights.gate_up, weights.down):
        for t in stored.tensors:
            t.data = t.data.bfloat16()
    after = moestro.expert_mlp(x, routing, weights)
    assert (after - before).norm() < 0.02 * before.norm()
    chosen = moestro.explain(moestro.expert_mlp, x, routing, weights)
    assert not chosen.chosen.startswith("cpu-")
