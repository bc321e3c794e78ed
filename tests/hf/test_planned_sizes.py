"""What a plan counts of a checkpoint is what a load of it has: every byte, of experts, of all else, of the cache."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import DynamicCache

import moestro
from hf.checkpoints import FAMILIES
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.hf.dense import StoredProjection
from moestro.hf.memory import expert_memory
from moestro.hf.store import ExpertStore
from moestro.memory.sizes import cut, least_budget, total_bytes
from moestro.planning import model as planned_model
from moestro.planning.model import count, read_model

FORMATS = [("olmoe", "int8"), *(("gpt-oss-20b", name) for name in ("int8", "mxfp4", "int4-g32", "fp8-e4m3-b128"))]
WEIGHTS = "*.safetensors"


def loaded_bytes(model):
    """Of experts, and of all other tensors."""
    stores = [module for module in model.modules() if isinstance(module, ExpertStore)]
    experts = sum(t.nbytes for store in stores for t in store.tensors.values())
    own = {id(t) for store in stores for t in store.tensors.values()}
    rest = {id(t): t for t in (*model.parameters(), *model.buffers()) if id(t) not in own}
    return experts, sum(t.nbytes for t in rest.values())


@pytest.mark.parametrize("like", FAMILIES)
def test_every_byte_of_a_loaded_model(made, like):
    folder = made.folder(like)
    planned = read_model(folder)
    assert (total_bytes(planned.sizes), planned.rest_bytes) == loaded_bytes(moestro.load(folder))


@pytest.mark.parametrize(("like", "form"), FORMATS)
def test_every_byte_of_experts_that_are_quantised(made, like, form):
    folder = made.folder(like)
    planned = read_model(folder).stored_as(form)
    assert total_bytes(planned.sizes) == loaded_bytes(moestro.load(folder, form))[0]
    assert planned.layers[0].bits == 8 * planned.sizes[0].expert_bytes / (
        sum(a * b for a, b in (planned.layers[0].gate_up, planned.layers[0].down))
    )


@pytest.mark.parametrize("like", ["olmoe", "gpt-oss-20b", "qwen3-30b-a3b-fp8"])
def test_every_byte_of_slots(made, like):
    folder = made.folder(like)
    planned = read_model(folder)
    for budget in (least_budget(planned.sizes), total_bytes(planned.sizes) * 2 // 3):
        memory = expert_memory(moestro.load(folder, memory=budget))
        assert memory.slot_bytes == sum(pool.slots * pool.expert_bytes for pool in cut("plan", planned.sizes, budget))


@pytest.mark.parametrize("like", ["olmoe", "gpt-oss-20b", "mixtral-8x7b", "deepseek-v3"])
def test_every_byte_of_the_cache(made, like):
    folder = made.folder(like)
    model, cache = moestro.load(folder), None
    prompt, step, at_the_end = count(read_model(folder), 3, 21, 10)
    for length, counted in ((21, prompt.cache_bytes), (1, step.cache_bytes), (9, at_the_end)):
        with torch.no_grad():
            cache = model(
                torch.ones(3, length, dtype=torch.int64), past_key_values=cache, use_cache=True
            ).past_key_values
        assert isinstance(cache, DynamicCache)
        held = (t for layer in cache.layers for t in vars(layer).values() if isinstance(t, torch.Tensor))
        assert counted == sum(t.nbytes for t in held)
    assert step.flops < prompt.flops


@pytest.mark.parametrize("like", ["olmoe", "gpt-oss-20b", "deepseek-v3", "qwen3-30b-a3b"])
def test_a_configuration_alone_says_as_much(made, like, tmp_path):
    folder = made.copy(like, tmp_path / like)
    whole = read_model(folder)
    for file in folder.glob(WEIGHTS):
        file.unlink()
    for path in (folder, folder / "config.json"):
        found = read_model(path)
        assert found.checkpoint is None
        assert [s.expert_bytes for s in found.sizes] == [s.expert_bytes for s in whole.sizes]
        assert [layer.format for layer in found.layers] == [layer.format for layer in whole.layers]
        assert found.rest_bytes == whole.rest_bytes


def test_a_configuration_without_a_dtype(made, tmp_path):
    folder = made.copy("olmoe", tmp_path / "olmoe")
    whole = read_model(folder)
    config = json.loads((folder / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model(folder).rest_bytes == whole.rest_bytes == loaded_bytes(moestro.load(folder))[1]


def test_what_is_refused(made, tmp_path):
    with pytest.raises(InvalidInputError, match=r"\[plan\] got .*nowhere"):
        read_model(tmp_path / "nowhere")
    folder = made.copy("olmoe", tmp_path / "cut")
    file = next(folder.glob(WEIGHTS))
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(InvalidInputError, match="cut off"):
        read_model(folder)
    with pytest.raises(InvalidInputError, match=r"unknown|one of"):
        read_model(made.folder("olmoe")).stored_as("int3")
    dense = tmp_path / "dense"
    shutil.copytree(made.folder("olmoe"), dense)
    (dense / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}))
    with pytest.raises((UnsupportedError, InvalidInputError)):
        read_model(dense)


@pytest.mark.parametrize("like", ["olmoe", "gpt-oss-20b"])
def test_every_byte_of_projections_in_a_format(made, like):
    folder = made.folder(like)
    model = moestro.load(folder, projections="int8")
    stored = sum(m.stored.nbytes for m in model.modules() if isinstance(m, StoredProjection))
    assert stored
    planned = read_model(folder, "int8")
    assert planned.rest_bytes == loaded_bytes(model)[1] + stored
    assert planned.rest_bytes < read_model(folder).rest_bytes


def test_configurations_that_say_too_little_or_too_much(made, tmp_path):
    """Of a dense model, and of a dtype that experts are not stored in: errors of this package."""
    folder = tmp_path / "alone"
    folder.mkdir()
    config = json.loads((made.folder("olmoe") / "config.json").read_text())
    dense = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    for wrong in (config | {"dtype": "float8_e4m3fn"}, dense):
        (folder / "config.json").write_text(json.dumps(wrong))
        with pytest.raises((UnsupportedError, InvalidInputError), match=r"^\[\w+\] got .+; needs .+\. .+"):
            read_model(folder)


def test_what_goes_wrong_at_a_layer_names_the_model(made, monkeypatch):
    def layers(*_):
        yield from ()
        raise KeyError("a name that Transformers lacks")

    monkeypatch.setattr(planned_model._Read, "layers", layers)
    with pytest.raises(InvalidInputError, match=r"^\[plan\] got .*olmoe.*a name that Transformers lacks"):
        read_model(made.folder("olmoe"))
