"""Linear modules of a model served by the engine: the same answers, the same parameters, gradients as before."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import moestro
import zoo
from architectures import relative_error
from hf.checkpoints import logits
from hf.models import built, snapshot
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.hf import MoestroConfig, served, served_projections
from moestro.hf.dense import Projection
from moestro.ops import native
from moestro.ops.projection import measured


@pytest.fixture
def model():
    return zoo.to_bfloat16(built("qwen3_moe"))


def linear_modules(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def test_the_same_answers_from_the_same_parameters(model):
    inputs, state = zoo.inputs_of(model), snapshot(model)
    with torch.no_grad():
        wanted = zoo.outputs(moestro.accelerate(model), inputs)
        assert not any(isinstance(module, Projection) for module in linear_modules(model))
        assert moestro.accelerate(model, projections="auto") is model
        assert all(isinstance(module, Projection) for module in linear_modules(model))
        found = zoo.outputs(model, inputs)
    assert relative_error(found, wanted) < 2e-2
    assert all(p is q and place == where for (p, place), (q, where) in zip(snapshot(model), state, strict=True))


def test_gradients_are_those_of_linear():
    torch.manual_seed(0)
    plain, served = nn.Linear(24, 10).bfloat16(), nn.Linear(24, 10).bfloat16()
    served.load_state_dict(plain.state_dict())
    served.__class__ = Projection
    x = torch.randn(3, 5, 24).bfloat16()
    for module in (plain, served):
        module(x).float().square().sum().backward()
    assert torch.equal(plain.weight.grad, served.weight.grad)
    assert torch.equal(plain.bias.grad, served.bias.grad)


def test_a_graph_has_pytorchs_own_linear():
    served = nn.Linear(24, 10).bfloat16()
    served.__class__ = Projection
    x = torch.randn(3, 24).bfloat16()
    with torch.no_grad():
        graph = torch.export.export(served, (x,)).module()
        assert torch.equal(graph(x), nn.functional.linear(x, served.weight, served.bias))


def test_only_plain_modules_of_16_bits_are_served():
    class Other(nn.Linear):
        pass

    model = built("qwen3_moe")
    model.lm_head.bfloat16()
    model.model.extra = Other(4, 4).bfloat16()
    moestro.accelerate(model, projections="auto")
    served = [name for name, module in model.named_modules() if isinstance(module, Projection)]
    assert served == ["lm_head"]


@pytest.mark.skipif(native.module is None, reason=str(native.problem))
def test_a_forced_engine_serves_them_or_says_why():
    served = nn.Linear(24, 10).bfloat16().requires_grad_(False)
    served.__class__ = Projection
    x = torch.randn(3, 24).bfloat16()
    with moestro.use(implementation="cpu-portable"):
        assert served(x).shape == (3, 10)
    with moestro.use(implementation="cpu-portable"), pytest.raises(UnsupportedError, match="gradients"):
        served(x.requires_grad_())


def counted(model):
    return len(served_projections(model))


@pytest.mark.parametrize("like", ["gpt-oss-20b", "qwen3-30b-a3b-fp8"])
def test_load_serves_them_and_no_checkpoint_has_it(made, like, tmp_path):
    plain = moestro.load(made.folder(like))
    model = moestro.load(made.folder(like), projections="auto")
    names = {name for name, module in plain.named_modules() if type(module) is nn.Linear}
    assert served_projections(model).keys() == names != set()
    assert counted(plain) == 0
    assert [layer.layout for layer in served(model)] == [layer.layout for layer in served(plain)]
    assert float((logits(model) - logits(plain)).norm() / logits(plain).norm()) < 2e-2
    model.save_pretrained(tmp_path)
    assert "projections" not in json.loads((tmp_path / "config.json").read_text()).get("quantization_config", {})
    assert counted(moestro.load(tmp_path)) == 0
    again = moestro.load(tmp_path, projections="auto")
    assert torch.equal(logits(again), logits(model))


def test_a_configuration_asks_for_them_and_load_has_the_last_word(made):
    folder, config = made.folder("qwen3-30b-a3b"), MoestroConfig("int8", input_format="int8", projections="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert counted(model) > 0
    same = moestro.load(folder, config)
    assert counted(same) == counted(model)
    assert [layer.layout for layer in served(same)] == ["int8, in memory, int8 inputs"] * len(served(model))
    other = moestro.load(folder, config, input_format="float", projections="torch")
    assert counted(other) == 0
    assert {layer.layout for layer in served(other)} == {"int8, in memory"}
    assert (config.projections, config.input_format) == ("auto", "int8")


def test_load_takes_searches_and_overrides_in_a_configuration(made):
    folder = made.wide()
    config = MoestroConfig("mxfp4", search="mse", overrides={"*.layers.0.*": "int8"})
    model = moestro.load(folder, config)
    assert [layer.layout for layer in served(model)] == ["int8, in memory", "mxfp4, in memory"]
    nearest = moestro.load(folder, "mxfp4")
    found, near = (m.model.layers[1].mlp.experts.moestro_store.state_dict() for m in (model, nearest))
    assert any(not torch.equal(found[name], near[name]) for name in found)


def test_explain_says_who_runs_one(made, monkeypatch):
    monkeypatch.setattr(measured, "most_rows", lambda *_: 2)
    model = moestro.load(made.folder("qwen3-30b-a3b"), projections="auto")
    head = served_projections(model)["lm_head"]
    with torch.no_grad():
        found = moestro.explain(head, torch.zeros(1, 2, head.in_features, dtype=torch.bfloat16))
        assert (found.operation, found.chosen is not None) == ("projection", True)
        assert native.module is None or found.chosen.startswith("cpu-")
        with pytest.raises(InvalidInputError, match="arguments for Projection"):
            moestro.explain(head)


def test_what_pytorch_reads_as_fast_stays(made):
    assert served_projections(moestro.accelerate(built("qwen3_moe"), projections="auto")) == {}
    assert served_projections(moestro.load(made.folder("qwen3-30b-a3b"), dtype="float32", projections="auto")) == {}
