"""Linear modules whose weights are stored in a format: what they compute, what stays, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import moestro
import zoo
from architectures import relative_error
from hf.checkpoints import logits
from hf.models import built, snapshot
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.formats import dequantize, quantize
from moestro.hf import MoestroConfig, served_projections
from moestro.hf.dense import StoredProjection, serve_projections
from moestro.ops import native
from moestro.ops.projection import projection


def linear(dtype=torch.bfloat16, bias=True):
    module = nn.Linear(64, 24, bias=bias).to(dtype)
    model = nn.Sequential(module)
    serve_projections(model, "int8")
    return model[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_module_multiplies_what_is_stored(dtype):
    torch.manual_seed(1)
    plain = nn.Linear(64, 24).to(dtype)
    weight, hooked = plain.weight.detach().clone(), []
    plain.register_forward_hook(lambda *_: hooked.append(1))
    model = nn.Sequential(plain)
    serve_projections(model, "int8")
    stored = model[0]
    assert stored is plain
    assert (type(stored), stored.dtype, [*dict(stored.named_parameters())]) == (StoredProjection, dtype, ["bias"])
    assert torch.equal(stored.weight, dequantize(quantize(weight, "int8"), dtype))
    x = torch.randn(2, 3, 64).to(dtype)
    with torch.no_grad():
        assert torch.equal(stored(x), projection(x, stored.stored, stored.bias))
    assert hooked == [1]
    assert "int8" in repr(stored)


@pytest.mark.parametrize("form", ["int8", "int4-g32", "mxfp4", "fp8-e4m3-channel"])
def test_a_loaded_model_computes_with_rounded_weights(made, form):
    folder = made.folder("gpt-oss-20b")
    plain, model = moestro.load(folder), moestro.load(folder, projections=form)
    served = served_projections(model)
    assert {module.stored.format.name for module in served.values()} == {form}
    assert served.keys() == served_projections(moestro.load(folder, projections="auto")).keys()
    with torch.no_grad():
        for name in served:
            weight = plain.get_submodule(name).weight
            weight.copy_(dequantize(quantize(weight, form), weight.dtype))
    assert relative_error(logits(model), logits(plain)) < 2e-2


@pytest.mark.parametrize(
    ("architecture", "kept", "stored"),
    [
        ("dbrx", "router.layer", "out_proj"),
        ("switch_transformers", "router.classifier", "SelfAttention.q"),
        ("doge", "router_gate", "down_proj"),
        ("qwen2_moe", "shared_expert_gate", "shared_expert.gate_proj"),
    ],
)
def test_routers_experts_and_the_embedding_keep_their_weights(architecture, kept, stored):
    model = built(architecture)
    plain, embedding = moestro.accelerate(copy.deepcopy(model)), model.get_input_embeddings().weight
    moestro.accelerate(model, projections="int8")
    served = served_projections(model)
    with torch.no_grad():
        for name, module in served.items():
            if plain.get_submodule(name).weight is plain.get_input_embeddings().weight:
                plain.get_submodule(name).weight = nn.Parameter(module.weight)
            plain.get_submodule(name).weight.copy_(module.weight)
        inputs = zoo.inputs_of(model)
        assert relative_error(zoo.outputs(model, inputs), zoo.outputs(plain, inputs)) < 1e-3
    assert any(name.endswith(stored) for name in served)
    assert not any(name.endswith(kept) or ".experts." in name for name in served)
    assert model.get_input_embeddings().weight is embedding


@pytest.mark.parametrize("architecture", ["deepseek_v32", "deepseek_v4", "dots3_note", "glm5_next", "hy_v4", "jamba"])
def test_what_models_read_themselves_or_keep_in_float32_is_not_stored(architecture, monkeypatch):
    model = zoo.to_bfloat16(built(architecture))
    precise = {*model._keep_in_fp32_modules, *model._keep_in_fp32_modules_strict}
    moestro.accelerate(model, projections="int8")
    served = served_projections(model)
    assert served
    assert not [name for name in served for each in precise if each in f"{name}.weight"]
    decoded = []
    monkeypatch.setattr(StoredProjection, "weight", property(lambda self: decoded.append(self) or plain(self)))
    with torch.no_grad():
        zoo.outputs(model, zoo.inputs_of(model))
    assert decoded == []


def plain(module):
    return dequantize(module.stored, module.dtype)


def test_a_weight_that_is_put_in_is_what_counts():
    model = built("qwen3_moe")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    moestro.accelerate(model, projections="int8")
    assert type(model.lm_head) is StoredProjection
    model.tie_weights()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    module, x, weight = linear(), torch.randn(3, 64).bfloat16(), nn.Parameter(torch.randn(24, 64).bfloat16())
    module.weight = weight
    with torch.no_grad():
        assert torch.equal(module(x), projection(x, weight, module.bias))
    assert module.state_dict().keys() == {"weight", "bias"}
    assert "int8" not in repr(module)


@pytest.mark.parametrize("projections", ["auto", "int8"])
@pytest.mark.parametrize("bias", [torch.zeros(24), torch.zeros(23).bfloat16(), torch.zeros(1, 24).half()])
def test_a_bias_that_does_not_fit_is_refused_as_by_pytorch(projections, bias):
    model = nn.Sequential(nn.Linear(64, 24).bfloat16())
    serve_projections(model, projections)
    model[0].bias = nn.Parameter(bias)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"dtype|size"):
        model(torch.randn(3, 64).bfloat16())


def test_a_second_call_changes_nothing_and_another_format_is_refused():
    model = zoo.to_bfloat16(built("qwen3_moe"))
    inputs = zoo.inputs_of(model)
    with torch.no_grad():
        found = zoo.outputs(moestro.accelerate(model, projections="int8"), inputs)
        again = zoo.outputs(moestro.accelerate(model, projections="int8"), inputs)
    assert torch.equal(found, again)
    with pytest.raises(UnsupportedError, match="stored as int8"):
        moestro.accelerate(model, projections="int4-g32")


def test_gradients_go_through_them():
    module = linear()
    x = torch.randn(3, 64).bfloat16().requires_grad_()
    module(x).float().sum().backward()
    expected = module.weight.float().sum(0)
    assert relative_error(x.grad[0].float(), expected) < 1e-2
    assert module.bias.grad is not None


def test_graphs_and_autocast_decode_them():
    module, x = linear(), torch.randn(3, 64).bfloat16()
    with torch.no_grad():
        wanted = nn.functional.linear(x, module.weight, module.bias)
        assert torch.equal(torch.export.export(module, (x,)).module()(x), wanted)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(module(x.float()), wanted)
    with pytest.raises(RuntimeError, match="same dtype"):
        module(x.float())


def test_they_are_moved_copied_and_pickled():
    module, x = linear(), torch.randn(3, 64).bfloat16()
    with torch.no_grad():
        wanted = module(x)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), copy.deepcopy(module).to("cpu")):
            assert torch.equal(other(x), wanted)
        half = copy.deepcopy(module).to(torch.float16)
    assert (half.dtype, half.bias.dtype) == (torch.float16, torch.float16)
    assert torch.equal(half.stored.scales, module.stored.scales)
    assert copy.deepcopy(module).to("meta").weight.is_meta


def test_they_are_not_saved(made, tmp_path):
    model = moestro.load(made.folder("qwen3-30b-a3b"), projections="int8")
    for save in (model.state_dict, lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(UnsupportedError, match=r"\[save\] got .*projections='int8'"):
            save()


def test_what_cannot_be_stored_is_refused_and_nothing_changes(made):
    model = built("qwen3_moe")
    before = snapshot(model)
    with pytest.raises(InvalidInputError, match="multiple of 128"):
        moestro.accelerate(model, projections="int4-g128")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(InvalidInputError, match="lm_head, in whose weight are NaN"):
        moestro.accelerate(model, projections="int8")
    assert served_projections(model) == {}
    assert all(p is q for (p, _), (q, _) in zip(snapshot(model), before, strict=True))
    for wrong in ("bfloat16", True, "int9", None):
        with pytest.raises(InvalidInputError, match="projections="):
            MoestroConfig(projections=wrong)
    with pytest.raises(InvalidInputError, match="multiple of 128"):
        moestro.load(made.folder("qwen3-30b-a3b"), projections="int4-g128")


@pytest.mark.skipif(native.module is None, reason=str(native.problem))
def test_explain_names_the_kernel():
    module, x = linear(), torch.randn(1, 64).bfloat16()
    with torch.no_grad():
        found = moestro.explain(module, x)
    assert found.chosen.startswith("cpu-")
    assert found.kernels
