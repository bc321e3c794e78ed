"""What moestro.load refuses: files that are damaged or do not fit, and what it cannot do; before a weight is read."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import moestro
from checkpoint.files import parts
from hf.checkpoints import logits, read
from hf.models import built
from moestro.checkpoint import Checkpoint, open_checkpoint, write_checksums
from moestro.errors import InvalidInputError, MoestroError, UnsupportedError
from moestro.hf import MoestroConfig, text_model
from moestro.hf.sources import read_sources

FILE = "model.safetensors"
INDEX = f"{FILE}.index.json"
HALF = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


@pytest.fixture(autouse=True)
def nothing_is_computed(monkeypatch):
    def touched(self, name):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "tensor", touched)


def refused(folder, *words, kind=InvalidInputError, **options):
    """The refusal of `load`, all of whose four parts are there."""
    with pytest.raises(MoestroError) as caught:
        moestro.load(folder, **options)
    assert isinstance(caught.value, kind), caught.value
    found = parts(caught.value)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    return found


def header(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def rewrite(path, edit):
    """Change a file's header, and leave what follows."""
    found, data = header(path)
    edit(found)
    text = json.dumps(found).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_json(path, edit):
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def resave(folder, edit):
    """Change the tensors themselves, with the library that everybody writes with."""
    tensors = read(folder)
    edit(tensors)
    save_file(tensors, folder / FILE, {"format": "pt"})


@pytest.fixture
def mixtral(made, tmp_path):
    return made.copy("mixtral-8x7b", tmp_path / "model")


@pytest.fixture
def shards(made, tmp_path):
    return made.copy("mixtral-8x7b", tmp_path / "model", shard_bytes=200_000)


def test_a_file_that_is_cut_off(mixtral):
    data = (mixtral / FILE).read_bytes()
    (mixtral / FILE).write_bytes(data[: len(data) * 2 // 3])
    refused(mixtral, str(mixtral / FILE), "cut off in tensor")


def test_a_flipped_bit_in_the_header(mixtral):
    data = bytearray((mixtral / FILE).read_bytes())
    for position in (0, 8, 40, 200):
        changed = bytearray(data)
        changed[position] ^= 0x40
        (mixtral / FILE).write_bytes(changed)
        refused(mixtral, str(mixtral / FILE))


def overlap(found):
    found[HALF]["data_offsets"][0] -= 64
    found[HALF]["data_offsets"][1] -= 64


def wrong_dtype(found):
    found[HALF]["dtype"] = "F32"


def unknown_dtype(found):
    found[HALF]["dtype"] = "BF17"


@pytest.mark.parametrize(("edit", "words"), [(overlap, ""), (wrong_dtype, "F32"), (unknown_dtype, "BF17")])
def test_headers_that_contradict_themselves(mixtral, edit, words):
    rewrite(mixtral / FILE, edit)
    refused(mixtral, str(mixtral / FILE), words)
    with pytest.raises(MoestroError, match="safetensors"):
        read_sources(mixtral)


def test_a_shard_that_is_not_there(shards):
    gone = sorted(shards.glob("*.safetensors"))[1]
    gone.unlink()
    refused(shards, gone.name)


def test_an_index_that_is_wrong(shards):
    names = sorted(path.name for path in shards.glob("*.safetensors"))
    at = json.loads((shards / INDEX).read_text())["weight_map"][HALF]
    other = next(name for name in names if name != at)
    edit_json(shards / INDEX, lambda index: index["weight_map"].update({HALF: other}))
    refused(shards, HALF, other)
    edit_json(shards / INDEX, lambda index: index["weight_map"].update({HALF: "../elsewhere.safetensors"}))
    refused(shards, "../elsewhere.safetensors")
    (shards / INDEX).write_text("{")
    refused(shards, INDEX)


def drop(name):
    return lambda tensors: tensors.pop(name)


def cast(name, dtype):
    def edit(tensors):
        tensors[name] = tensors[name].to(dtype)

    return edit


def cut(name):
    def edit(tensors):
        tensors[name] = tensors[name][..., :-8].contiguous()

    return edit


EXPERT = "model.layers.{}.mlp.experts.1.up_proj.weight"
CHANGED = [
    ("mixtral-8x7b", drop(HALF), "7 such tensors for the 8 experts", f"{HALF} missing from"),
    ("mixtral-8x7b", cast(HALF, torch.float32), "needs torch.bfloat16 of shape", f"got {HALF} in"),
    ("mixtral-8x7b", cast(HALF, torch.int8), "torch.int8", f"got {HALF} in"),
    ("mixtral-8x7b", cut(HALF), "of shape", f"got {HALF} in"),
    ("mixtral-8x7b", drop("model.norm.weight"), "without a tensor for", "model.norm.weight"),
    ("mixtral-8x7b", cut("model.norm.weight"), "a tensor of shape", "model.norm.weight"),
    ("mixtral-8x7b", cast("model.norm.weight", torch.int32), "torch.int32", "model.norm.weight"),
    ("mixtral-8x7b", drop("model.layers.0.block_sparse_moe.gate.weight"), "without a tensor for", "gate.weight"),
    ("deepseek-v3", drop(EXPERT.format(1) + "_scale_inv"), "the other their scales", EXPERT.format(1)),
    ("deepseek-v3", cut(EXPERT.format(1) + "_scale_inv"), "of shape", f"got {EXPERT.format(1)}_scale_inv in"),
    (
        "deepseek-v3",
        cast(EXPERT.format(1) + "_scale_inv", torch.float16),
        "torch.float16",
        f"{EXPERT.format(1)}_scale_inv in",
    ),
    ("deepseek-v3", drop("model.layers.0.self_attn.o_proj.weight_scale_inv"), "scales", "o_proj.weight"),
    ("gpt-oss-20b", drop("model.layers.1.mlp.experts.down_proj_scales"), "scales", "down_proj_blocks"),
    ("gpt-oss-20b", cut("model.layers.1.mlp.experts.down_proj_scales"), "do not fit", "down_proj_blocks"),
    ("gpt-oss-20b", cast("model.layers.1.mlp.experts.down_proj_blocks", torch.int8), "do not fit", "down_proj_blocks"),
    ("gpt-oss-20b", drop("model.layers.1.mlp.experts.down_proj_bias"), "without a tensor for", "down_proj_bias"),
    ("dbrx", drop("transformer.blocks.0.ffn.experts.mlp.v1"), "without a tensor for", "experts.mlp.v1"),
    ("llama4-scout", cut("language_model.model.layers.0.feed_forward.experts.down_proj"), "of shape", "down_proj"),
]


@pytest.mark.parametrize(("like", "edit", "words", "name"), CHANGED, ids=lambda v: v if isinstance(v, str) else "")
def test_tensors_that_are_missing_or_others(made, tmp_path, like, edit, words, name):
    folder = made.copy(like, tmp_path / "model")
    resave(folder, edit)
    refused(folder, words, name, str(folder))


def test_a_changed_byte_where_there_are_checksums(made, tmp_path, monkeypatch):
    folder = made.copy("mixtral-8x7b", tmp_path / "model")
    write_checksums(folder, open_checkpoint(folder).checksums())
    entry = open_checkpoint(folder).entry(HALF)
    with open(folder / FILE, "r+b") as file:
        file.seek(entry.start + 5)
        byte = file.read(1)[0]
        file.seek(entry.start + 5)
        file.write(bytes([byte ^ 1]))
    refused(folder, HALF, str(folder / FILE), "SHA-256")
    with pytest.raises(InvalidInputError, match="SHA-256"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=MoestroConfig("int8"))
    monkeypatch.undo()
    with open(folder / FILE, "r+b") as file:
        file.seek(entry.start + 5)
        file.write(bytes([byte]))
    assert torch.isfinite(logits(moestro.load(folder))).all()


def list_a_file_that_is_not_there(folder):
    sums = open_checkpoint(folder).checksums()
    write_checksums(folder, sums | {"model-00099-of-00003.safetensors": {"extra": "0" * 64}})


def unlist_a_tensor(folder):
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop(HALF))


@pytest.mark.parametrize(
    ("contradict", "words"), [(list_a_file_that_is_not_there, "model-00099"), (unlist_a_tensor, HALF)]
)
def test_files_that_contradict_what_lists_them(shards, contradict, words):
    contradict(shards)
    refused(shards, words)
    with pytest.raises(InvalidInputError, match=words):
        AutoModelForCausalLM.from_pretrained(shards, quantization_config=MoestroConfig("int8"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "config.json"),
        ("[]", "model"),
        ('{"model_type": "nothing_anybody_knows"}', "nothing_anybody_knows"),
        ('{"architectures": ["MixtralForCausalLM"]}', "model"),
        ('{"model_type": "mixtral", "num_local_experts": "eight"}', "num_local_experts"),
    ],
)
def test_a_configuration_that_cannot_be_read(mixtral, text, words):
    (mixtral / "config.json").write_text(text)
    refused(mixtral, words, str(mixtral))
    with pytest.raises(InvalidInputError) as caught:
        read_sources(mixtral)
    assert str(mixtral) in parts(caught.value)["got"]


def test_sizes_that_the_files_do_not_have(mixtral):
    edit_json(mixtral / "config.json", lambda config: config.update(num_local_experts=16))
    refused(mixtral, "experts.8.w1.weight missing", "8 such tensors for the 16 experts", FILE)
    edit_json(mixtral / "config.json", lambda config: config.update(num_local_experts=8, hidden_size=128))
    refused(mixtral, "shape", str(mixtral))


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_quantisations_of_others(mixtral, method):
    edit_json(mixtral / "config.json", lambda config: config.update(quantization_config={"quant_method": method}))
    refused(mixtral, f"quantised by {method}", "MXFP4", kind=UnsupportedError)
    with pytest.raises(UnsupportedError, match=method):
        read_sources(mixtral)


def test_a_quantisation_without_a_name(mixtral):
    edit_json(mixtral / "config.json", lambda config: config.update(quantization_config={"bits": 4}))
    refused(mixtral, "an unnamed method", kind=UnsupportedError)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"quantization_config": 5}, "config.json"),
        ({"quantization_config": ["fp8"]}, "config.json"),
        ({"quantization_config": {"quant_method": "moestro", "format": "int8", "overrides": ["x"]}}, "['x']"),
        ({"quantization_config": {"quant_method": "moestro", "rest": "fp8"}}, "'fp8'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size"),
        ({"hidden_size": -4}, "config.json"),
    ],
    ids=str,
)
def test_configurations_that_make_no_sense(mixtral, changed, words):
    edit_json(mixtral / "config.json", lambda config: config.update(changed))
    if "hidden_size" not in changed:
        refused(mixtral, words)
    with pytest.raises(InvalidInputError) as caught:
        read_sources(mixtral)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "names", [None, [], 5, "MixtralForCausalLM", [5], ["MixtralConfig"], ["OlmoeForCausalLM"]], ids=str
)
def test_a_configuration_that_names_no_class_of_its_own(mixtral, monkeypatch, names):
    """The class for text generation is taken, by both ways of reading."""
    monkeypatch.undo()
    edit_json(mixtral / "config.json", lambda config: config.update(architectures=names))
    assert type(moestro.load(mixtral)).__name__ == "MixtralForCausalLM"
    assert len(read_sources(mixtral)[2]) == 4


def test_a_format_of_moestro_that_nobody_knows(made, tmp_path, monkeypatch):
    monkeypatch.undo()
    moestro.load(made.wide(), format="int8").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config["quantization_config"].update(format="int3"))
    refused(tmp_path, "int3", "mxfp4")
    edit_json(tmp_path / "config.json", lambda config: config["quantization_config"].update(format=None))
    refused(tmp_path, "no format for it in config.json")
    edit_json(tmp_path / "config.json", lambda config: config["quantization_config"].update(format="mxfp4"))
    refused(tmp_path, "gate_up_proj_data", "do not fit")


def test_a_dense_model(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    refused(tmp_path, "LlamaForCausalLM", "dense model", kind=UnsupportedError)
    refused(tmp_path, "dense model", kind=UnsupportedError, format="mxfp4")


@pytest.mark.parametrize("architecture", ["switch_transformers", "jetmoe"])
def test_families_whose_experts_cannot_be_stored(architecture, tmp_path):
    model = built(architecture)
    model.save_pretrained(tmp_path)
    refused(tmp_path, type(model).__name__, "moestro.accelerate", kind=UnsupportedError)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "int4-g128"}, "multiple of 128"),
        ({"format": "nvfp5"}, "nvfp4"),
        ({"projections": "int9"}, "one of torch, auto"),
        ({"dtype": "mxfp4"}, "dtype='mxfp4'"),
        ({"dtype": torch.float8_e4m3fn}, "float32, bfloat16"),
        ({"dtype": torch.int8}, "float32, bfloat16"),
        ({"device": "nowhere"}, "a device of this machine"),
    ],
    ids=str,
)
def test_options_that_do_not_go(made, options, words):
    refused(made.folder("olmoe"), words, **options)


def test_layers_left_on_disk(made):
    with pytest.raises(UnsupportedError, match='leaves layers on "disk"') as caught:
        AutoModelForCausalLM.from_pretrained(
            made.folder("qwen3-30b-a3b"),
            quantization_config=MoestroConfig("int8"),
            device_map={"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"},
        )
    assert parts(caught.value)


def test_a_search_without_a_format(made):
    refused(made.folder("qwen3-30b-a3b"), "search='mse' without a format", format=MoestroConfig(search="mse"))


def test_a_format_for_what_is_no_expert(made):
    """A router keeps its dtype."""
    config = MoestroConfig("int8", overrides={"*.mlp.gate": "int8"})
    with pytest.raises(InvalidInputError) as caught:
        AutoModelForCausalLM.from_pretrained(made.folder("olmoe"), quantization_config=config)
    assert "*.mlp.gate" in parts(caught.value)["got"]
    assert "routers" in str(caught.value)


def test_weights_that_are_no_safetensors(mixtral):
    (mixtral / FILE).unlink()
    torch.save({}, mixtral / "pytorch_model.bin")
    refused(mixtral, "safetensors")


@pytest.mark.parametrize("place", ["nowhere/at/all", "./nowhere", "/nowhere", "~nobody-here/model"])
def test_places_where_nothing_is(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(place, "no folder")


def test_a_folder_without_a_configuration(mixtral):
    (mixtral / "config.json").unlink()
    refused(mixtral, "config.json")


def test_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("some/model-that-is-not-here", "some/model-that-is-not-here")


def test_numbers_that_are_no_numbers_are_named_with_their_place(mixtral, monkeypatch):
    monkeypatch.undo()

    def spoil(tensors):
        tensors[HALF][3, 5] = float("nan")

    resave(mixtral, spoil)
    with pytest.raises(InvalidInputError) as caught:
        moestro.load(mixtral, format="int8")
    text = str(caught.value)
    assert "model.layers.0.mlp.experts.gate_up_proj[1]" in text
    assert "3, 5" in text
    assert "nan" in text.lower()


def test_an_installation_without_the_bundled_model(monkeypatch, tmp_path):
    monkeypatch.setattr(text_model, "__file__", str(tmp_path / "moestro/hf/text_model.py"))
    for loading in (text_model.find_text_model, text_model.load_text_model):
        with pytest.raises(InvalidInputError, match=r"an installation without the bundled model.*Reinstall") as caught:
            loading()
        parts(caught.value)
