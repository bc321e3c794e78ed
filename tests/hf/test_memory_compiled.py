"""Models within a memory budget under torch.compile: one node a layer, the bits of eager, and no model kept alive."""

from __future__ import annotations

import gc
import shutil
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import moestro
from hf.checkpoints import FAMILIES, logits
from moestro.errors import InvalidInputError, MoestroError, UnsupportedError
from moestro.hf import served
from moestro.hf.experts import serve
from moestro.hf.memory import expert_memory
from moestro.memory import MemoryBudget, slots

PROMPT = torch.arange(300).view(1, 300) * 7 % 60
NODE = torch.ops.moestro.expert_mlp_within_memory
DYNAMO = (MoestroError, torch._dynamo.exc.TorchDynamoException)


@pytest.fixture(autouse=True)
def poisoned_slots(monkeypatch):
    monkeypatch.setattr(slots, "POISON", True)


def least(folder, **options):
    """The model within the least budget that works: nearly every call reads."""
    budget = expert_memory(moestro.load(folder, memory="1GB", **options)).residents.least
    return moestro.load(folder, memory=budget, **options)


def layers_of(model):
    return [model.get_submodule(layer.path) for layer in served(model)]


def given(model, ids):
    """What the expert layers are called with when the model reads these tokens: by layer."""
    found, hooks = [], []
    for layer in layers_of(model):
        hooks.append(layer.register_forward_pre_hook(lambda module, args: found.append(args)))
    logits(model, ids)
    for hook in hooks:
        hook.remove()
    return found


def tensor_of(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def nodes_of(graph):
    return sum(node.target is NODE for node in graph.graph.nodes if node.op == "call_function")


def test_a_whole_model_is_one_graph(made):
    folder, graphs = made.folder("gpt-oss-20b"), []
    whole, model = moestro.load(folder), least(folder)

    def keep(graph, inputs):
        graphs.append(nodes_of(graph))
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=keep)
    for ids in (PROMPT[:, :40], PROMPT, torch.arange(4).view(4, 1), torch.arange(3).view(3, 1)):
        assert torch.equal(logits(compiled, ids), logits(whole, ids)), ids.shape
    assert set(graphs) == {len(served(model))}


@pytest.mark.parametrize("like", FAMILIES)
def test_layers_of_every_family(made, like):
    folder = made.folder(like)
    whole, model = moestro.load(folder), least(folder)
    for ids in (PROMPT[:, :50], PROMPT[:, :1]):
        for args, right, layer in zip(given(whole, ids), layers_of(whole), layers_of(model), strict=True):
            compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
            with torch.no_grad():
                assert torch.equal(tensor_of(compiled(*args)), tensor_of(right(*args)))


def test_graphs_are_shared_over_layers_and_numbers_of_tokens(made):
    """PyTorch makes one for a single token and one for more; layers that are alike need no others."""
    folder = made.folder("qwen3-30b-a3b")
    whole, model = moestro.load(folder), least(folder)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def call(layer, *args):
        return serve(layer, *args)

    for count in (1, 3, 40, 300, 2, 1):
        for args, right, layer in zip(given(whole, PROMPT[:, :count]), layers_of(whole), layers_of(model), strict=True):
            with torch.no_grad():
                assert torch.equal(call(layer, *args), right(*args)), count
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    ("mode", "backend"),
    [(torch.inference_mode, "aot_eager"), (torch.no_grad, "aot_eager"), (torch.no_grad, "inductor")],
)
def test_modes_and_the_default_compiler(made, mode, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("torch.compile's default backend needs a C++ compiler")
    folder = made.folder("gpt-oss-20b")
    whole, model = moestro.load(folder), least(folder)
    args, right, layer = given(whole, PROMPT)[0], layers_of(whole)[0], layers_of(model)[0]
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with mode():
        assert torch.equal(compiled(*args), right(*args))


def test_biases_of_now(made):
    """Written to, and replaced, between two calls of a graph that was there before any eager call."""
    folder = made.folder("gpt-oss-20b")
    whole, model = moestro.load(folder), moestro.load(folder, memory="1GB")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(logits(compiled), logits(whole))
    for each in (whole, model):
        for name, parameter in each.named_parameters():
            if name.endswith("proj_bias"):
                parameter.data.mul_(3) if "gate_up" in name else setattr(parameter, "data", parameter.data + 1)
    for each in (compiled, model):
        assert torch.equal(logits(each), logits(whole))
    for each in (whole, model):
        for layer in layers_of(each):
            layer.down_proj_bias = torch.nn.Parameter(layer.down_proj_bias.detach() - 2)
    for each in (model, compiled, model):
        assert torch.equal(logits(each), logits(whole))


def test_reading_ahead(made):
    folder = made.folder("qwen3-30b-a3b")
    whole, budget = moestro.load(folder), expert_memory(least(folder)).budget.nbytes
    model = moestro.load(folder, memory=MemoryBudget(2 * budget, prefetch=True))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for token in range(20):
        ids = torch.tensor([[token], [token + 7]])
        assert torch.equal(logits(compiled, ids), logits(whole, ids)), token


def test_what_is_read_is_counted(made):
    model = moestro.load(made.folder("olmoe"), memory="1GB")
    logits(torch.compile(model, fullgraph=True, backend="eager"), PROMPT)
    told = expert_memory(model).statistics()
    assert told["prompt"]["read_bytes"] == expert_memory(model).reader.counts["bytes"] > 0


def test_gradients_are_refused_while_a_graph_is_made(made):
    model = moestro.load(made.folder("gpt-oss-20b"), memory="1GB")
    with pytest.raises(DYNAMO, match=r"torch\.no_grad"):
        torch.compile(model, fullgraph=True, backend="eager")(PROMPT)
    args, layer = given(model, PROMPT)[0], layers_of(model)[0]
    with pytest.raises(UnsupportedError, match=r"torch\.no_grad"):
        torch.compile(layer, backend="eager")(*args)
    with torch.no_grad():
        for fullgraph in (False, True):  # PyTorch does not look at the layer's outermost function again
            assert torch.equal(torch.compile(layer, fullgraph=fullgraph, backend="eager")(*args), layer(*args))
    layer.requires_grad_(False)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(*args), layer(*args))


def test_an_output_norm_stays_out_of_graphs(made):
    """Where there may be eager code between them it runs there; without it, what was compiled has none."""
    folder = made.folder("gpt-oss-20b")
    whole, model = moestro.load(folder), least(folder)
    args, right, layer = given(whole, PROMPT)[0], layers_of(whole)[0], layers_of(model)[0]
    right.post_expert_norm = layer.post_expert_norm = torch.nn.Softmax(-1)
    with torch.no_grad():
        with pytest.raises(DYNAMO, match="output_norm"):
            torch.compile(layer, fullgraph=True, backend="eager")(*args)
        counter = CompileCounterWithBackend("eager")
        assert torch.equal(torch.compile(layer, backend=counter)(*args), right(*args))
        assert counter.frame_count <= 1, "what runs in eager code is left to Python"
        del right.post_expert_norm, layer.post_expert_norm
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(*args), right(*args))


@pytest.mark.parametrize("strict", [False, True])
def test_export_is_refused(made, strict):
    model = moestro.load(made.folder("olmoe"), memory="1GB")
    with torch.no_grad(), pytest.raises(DYNAMO, match=r"memory budget and torch\.export"):
        torch.export.export(model, (PROMPT,), strict=strict)
    assert torch.equal(logits(model), logits(moestro.load(made.folder("olmoe"))))


def arguments(model, count=5):
    """Of the node, for the first layer."""
    layer = layers_of(model)[0]
    (handle,) = {m._handle for m in layer.modules() if getattr(m, "_handle", None) is not None}
    x, ids, weights = given(model, PROMPT[:, :count])[0]
    return x, ids, weights.float(), layer.gate_up_proj_bias, layer.down_proj_bias, handle, "output", "auto"


def test_the_node_keeps_what_pytorch_asks_of_an_operation(made):
    model = least(made.folder("gpt-oss-20b"))
    with torch.no_grad():
        given = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments(model)]
        for test in ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"):
            torch.library.opcheck(NODE.default, tuple(given), test_utils=test)


def test_a_compiled_model_goes_when_it_is_deleted(made):
    """And what is left of its graphs says so."""
    model = moestro.load(made.folder("gpt-oss-20b"), memory="1GB")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits(compiled, PROMPT)
    left, gone = arguments(model), weakref.ref(expert_memory(model))
    with torch.no_grad():
        NODE(*left)
    del model, compiled
    gc.collect()
    assert gone() is None
    with torch.no_grad(), pytest.raises(InvalidInputError, match="a model that is gone"):
        NODE(*left)
