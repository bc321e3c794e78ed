"""FP8 and MXFP4 checkpoints through from_pretrained: moestro's where that is asked for, Transformers' own otherwise."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM, Mxfp4Config
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.utils import logging as transformers_logging

import moestro
from hf.checkpoints import DROPPED, FP8, differing, logits, read
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.hf import MoestroConfig, quantization, served
from tolerances import assert_close, bit_equal

PUBLISHED = [*FP8, "gpt-oss-20b"]
OWN = {"fp8": FineGrainedFP8HfQuantizer, "mxfp4": Mxfp4HfQuantizer}
LAYOUT = dict.fromkeys(FP8, "fp8-e4m3-b128, memory-mapped") | {"gpt-oss-20b": "mxfp4, memory-mapped"}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Also on a machine that has one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def through(folder, implementation="moestro", **options):
    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation=implementation, **options)


@pytest.fixture
def without_moestro(monkeypatch):
    """Transformers as it is where nobody imported moestro."""

    def restore():
        for method, own in OWN.items():
            monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, method, own)

    return restore


@pytest.mark.parametrize("like", PUBLISHED)
def test_published_files_are_served_as_they_are(made, like):
    model, report = through(made.folder(like), dtype="float32", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "mismatched_keys", "error_msgs"))
    assert [key for key in report["unexpected_keys"] if not DROPPED.match(key)] == []
    assert {layer.layout for layer in served(model)} == {LAYOUT[like]}
    assert bit_equal(logits(model), logits(moestro.load(made.folder(like), dtype="float32")))
    assert_close(logits(model), made.expected(like))


@pytest.mark.parametrize("like", PUBLISHED)
def test_many_files_and_other_arguments(made, like):
    folder = made.folder(like, shard_bytes=200_000)
    model = through(folder, device_map="cpu")
    assert {layer.layout for layer in served(model)} == {LAYOUT[like]}
    assert bit_equal(logits(model), logits(moestro.load(folder)))


@pytest.mark.parametrize("like", PUBLISHED)
def test_saving_is_that_of_load(made, like, tmp_path):
    through(made.folder(like)).save_pretrained(tmp_path / "a")
    moestro.load(made.folder(like)).save_pretrained(tmp_path / "b")
    assert differing(read(tmp_path / "a"), read(tmp_path / "b")) == set()
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    assert first["quantization_config"]["quant_method"] == second["quantization_config"]["quant_method"]
    assert bit_equal(logits(through(tmp_path / "a")), logits(moestro.load(tmp_path / "b")))


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", None])
@pytest.mark.parametrize("like", PUBLISHED)
def test_other_implementations_are_transformers_own(made, like, implementation, without_moestro):
    model = through(made.folder(like), implementation)
    found = logits(model)
    assert served(model) == []
    assert [n for n, _ in model.named_parameters() if n.endswith("experts.gate_up_proj")]
    without_moestro()
    assert bit_equal(found, logits(through(made.folder(like), implementation)))


@pytest.mark.parametrize("like", PUBLISHED)
def test_dequantising_on_request_is_transformers_own(made, like, without_moestro):
    options = Mxfp4Config(dequantize=True) if like == "gpt-oss-20b" else FineGrainedFP8Config(dequantize=True)
    model = through(made.folder(like), quantization_config=options)
    assert {layer.stored for layer in served(model)} == {False}
    parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert [n for n in parameters if n.endswith("experts.gate_up_proj")]
    without_moestro()
    alone = through(made.folder(like), quantization_config=options)
    assert differing(parameters, dict(alone.named_parameters())) == set()


@pytest.mark.parametrize("like", PUBLISHED)
def test_where_there_is_a_gpu_all_is_transformers_own(made, like, monkeypatch):
    """Its quantizer is asked at once, and its modules take the experts' places."""
    called = []
    monkeypatch.setattr(quantization, "_has_gpu", lambda: True)
    for own in OWN.values():
        monkeypatch.setattr(own, "validate_environment", lambda self, **_: called.append(type(self).__mro__[2]))
        monkeypatch.setattr(own, "_process_model_before_weight_loading", refuse_here)
    with pytest.raises(NotImplementedError, match="Transformers' own"):
        through(made.folder(like))
    assert called == [OWN["mxfp4" if like == "gpt-oss-20b" else "fp8"]]


def refuse_here(*_, **__):
    raise NotImplementedError("Transformers' own")


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.text = ""

    def emit(self, record):
        self.text += record.getMessage()


@pytest.fixture
def heard(monkeypatch):
    """What Transformers' quantizers warn of."""
    transformers_logging.set_verbosity_warning()
    loggers = [logging.getLogger(own.__module__) for own in OWN.values()]
    for logger in loggers:
        monkeypatch.setattr(logger, "warning_once", logger.warning, raising=False)
    handler = Heard()
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)
    transformers_logging.set_verbosity_error()


@pytest.mark.parametrize("like", PUBLISHED)
def test_nobody_is_warned_of_a_dequantisation_that_does_not_happen(made, like, heard):
    through(made.folder(like))
    assert heard.text == ""
    through(made.folder(like), "eager")
    assert "dequantiz" in heard.text


@pytest.mark.parametrize("like", PUBLISHED)
def test_what_transformers_lacks_matters_only_on_its_own_way(made, like, monkeypatch):
    def lacking(*_, **__):
        raise ImportError("something is not installed")

    for own in OWN.values():
        monkeypatch.setattr(own, "validate_environment", lacking)
    assert {layer.stored for layer in served(through(made.folder(like)))} == {True}
    with pytest.raises(ImportError, match="something is not installed"):
        through(made.folder(like), "eager")


def test_registering_again_changes_nothing():
    before = dict(AUTO_QUANTIZER_MAPPING)
    quantization.register()
    assert before == AUTO_QUANTIZER_MAPPING
    for method, own in OWN.items():
        assert issubclass(AUTO_QUANTIZER_MAPPING[method], own)


@pytest.mark.parametrize("like", PUBLISHED)
def test_a_format_of_ones_own_over_a_published_one_is_for_load(made, like):
    """from_pretrained cannot replace the quantisation of a checkpoint: Transformers refuses, whoever asks."""
    with pytest.raises(ValueError, match="MoestroConfig"):
        AutoModelForCausalLM.from_pretrained(made.folder(like), quantization_config=MoestroConfig("int8"))
    assert {layer.layout for layer in served(moestro.load(made.folder(like), format="int8"))} == {"int8, in memory"}


def without(like, made, tmp_path, name):
    folder = made.copy(like, tmp_path / "damaged")
    tensors = read(folder)
    found = next(n for n in sorted(tensors) if n.endswith(name))
    del tensors[found]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder, found


@pytest.mark.parametrize(
    ("like", "name"),
    [("gpt-oss-20b", "experts.down_proj_scales"), ("deepseek-v3", "experts.1.up_proj.weight_scale_inv")],
)
def test_missing_scales_are_named(made, like, name, tmp_path):
    folder, found = without(like, made, tmp_path, name)
    with pytest.raises(InvalidInputError) as caught:
        through(folder)
    assert found in str(caught.value)
    assert "model.safetensors" in str(caught.value)


def test_a_dense_model_in_fp8_is_refused(tmp_path):
    """experts_implementation="moestro" says that there are experts."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="dense model"):
        through(tmp_path)


def test_other_blocks_are_refused(made, tmp_path):
    folder = made.copy("deepseek-v3", tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 128]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInputError, match=r"blocks \[64, 128\]"):
        through(folder)


def test_a_model_that_was_served_can_be_switched_no_further(made):
    """Its experts are no parameters: what else would run on them?"""
    model = through(made.folder("gpt-oss-20b"))
    wanted = logits(model)
    model.set_experts_implementation("eager")
    assert bit_equal(logits(model), wanted)
    assert torch.isfinite(wanted).all()
