"""input_format="int8" through load, accelerate and MoestroConfig, to the logits; refused without integers."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

import moestro
from hf.checkpoints import IDS, logits
from moestro import reference
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.hf import MoestroConfig, served
from moestro.hf.store import ExpertStore
from tolerances import bit_equal

LIKE = ["gpt-oss-20b", "qwen3-30b-a3b", "llama4-scout"]


def stores(model):
    return [module for module in model.modules() if isinstance(module, ExpertStore)]


@pytest.mark.parametrize("like", LIKE)
def test_logits_are_those_of_the_definition(made, like, monkeypatch):
    """Each expert layer's output is the definition's; a model's logits follow, near those of float rows."""
    model = moestro.load(made.folder(like), format="int8", dtype="float32", input_format="int8")
    assert {layer.layout for layer in served(model)} == {"int8, in memory, int8 inputs"}
    plain = moestro.load(made.folder(like), format="int8", dtype="float32")
    exact = logits(plain)
    with moestro.use(implementation="reference"):
        expected = logits(model)
    error = float((expected - exact).norm() / exact.norm())
    assert 1e-5 < error < 0.1
    with moestro.use(implementation="torch"):
        assert float((logits(model) - expected).norm() / exact.norm()) < 0.1 * error
    assert float((logits(model) - expected).norm() / exact.norm()) < 0.1 * error

    def unrounded(x):
        return x.float(), x.new_ones(x.shape[0], 1)

    monkeypatch.setattr(reference, "round_rows", unrounded)
    with moestro.use(implementation="reference"):
        torch.testing.assert_close(logits(model), exact, rtol=1e-4, atol=1e-4)


def test_accelerate_sets_it_keeps_it_and_takes_it_back(made):
    model = moestro.load(made.folder("gpt-oss-20b"), dtype="float32")
    exact = logits(model)
    assert moestro.accelerate(model, input_format="int8") is model
    rounded = logits(model)
    assert not bit_equal(rounded, exact)
    moestro.accelerate(model, strategy="grouped")  # says nothing of the activation
    assert {(layer.layout, layer.strategy) for layer in served(model)} == {
        ("mxfp4, memory-mapped, int8 inputs", "grouped")
    }
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(stores(model)[0]))):
        assert {store.input_format for store in stores(other)} == {"int8"}
    moestro.accelerate(model, input_format="float")
    assert bit_equal(logits(model), exact)


def test_from_pretrained_takes_it_and_no_checkpoint_has_it(made, tmp_path):
    config = MoestroConfig("mxfp4", input_format="int8")
    model = AutoModelForCausalLM.from_pretrained(made.folder("qwen3-30b-a3b"), quantization_config=config)
    assert {store.input_format for store in stores(model)} == {"int8"}
    model.save_pretrained(tmp_path)
    assert "input_format" not in json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    again = moestro.load(tmp_path)
    assert {store.input_format for store in stores(again)} == {"float"}
    twice = moestro.load(tmp_path, input_format="int8")
    assert bit_equal(logits(twice), logits(model.eval()))


def test_in_a_compiled_model(made):
    model = moestro.load(made.folder("qwen3-30b-a3b"), format="int4-g32", dtype="float32", input_format="int8")
    with torch.no_grad():
        expected = model(IDS).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(IDS).logits
    assert float((compiled - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("format", [None, "fp8-e4m3-b128", "bfloat16"])
def test_experts_that_are_no_integers_are_refused_before_they_are_read(made, format):
    for load in (
        lambda: moestro.load(made.folder("qwen3-30b-a3b"), format=format, input_format="int8"),
        lambda: AutoModelForCausalLM.from_pretrained(
            made.folder("qwen3-30b-a3b"), quantization_config=MoestroConfig(format, input_format="int8")
        ),
    ):
        with pytest.raises(UnsupportedError, match=r"\[load\].*weights that are integers"):
            load()


def test_what_accelerate_refuses_changes_nothing(made):
    plain = AutoModelForCausalLM.from_pretrained(made.folder("qwen3-30b-a3b"))
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.mlp\.experts, whose experts are parameters"):
        moestro.accelerate(plain, input_format="int8")
    assert served(plain) == []
    stored = moestro.load(made.folder("qwen3-30b-a3b"))
    with pytest.raises(UnsupportedError, match="weights that are integers"):
        moestro.accelerate(stored, strategy="grouped", input_format="int8")
    assert {layer.strategy for layer in served(stored)} == {"auto"}
    for call in (
        lambda: moestro.accelerate(stored, input_format="int4"),
        lambda: moestro.load(made.folder("gpt-oss-20b"), input_format="int4"),
        lambda: MoestroConfig(input_format="bf16"),
    ):
        with pytest.raises(InvalidInputError, match="needs one of float, int8, fp8-e4m3"):
            call()


def test_a_gradient_through_such_experts_is_refused(made):
    model = moestro.load(made.folder("qwen3-30b-a3b"), format="int8", dtype="float32", input_format="int8")
    with pytest.raises(UnsupportedError, match=r"torch\.no_grad"):
        model(IDS)
