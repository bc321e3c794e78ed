"""MoestroConfig: experts in every format through Transformers, written as they are held, and read back as they were."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, DbrxConfig, DbrxForCausalLM, GptOssConfig, GptOssForCausalLM

import moestro
from cli.conftest import IMPORTS
from forked import python
from hf.checkpoints import IDS, differing, logits, read
from moestro.checkpoint import open_checkpoint
from moestro.errors import InvalidInputError
from moestro.formats import FORMATS, PackedTensor, dequantize, find_format, quantize
from moestro.hf import MoestroConfig, served
from tolerances import assert_close, bit_equal

PACKED = [name for name, form in FORMATS.items() if not form.is_dense]
FRESH = """
import sys
import torch, transformers
transformers.logging.set_verbosity_error()
import moestro.hf
ids, out = torch.load(sys.argv[1]), {}
for folder in sys.argv[3:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        out[folder] = model(ids).logits
torch.save(out, sys.argv[2])
"""


def tensors_of(folder, target):
    """The tensors of one projection in a saved checkpoint, by the ends of their names."""
    return {n.removeprefix(f"{target}_"): t for n, t in read(folder).items() if n.startswith(f"{target}_")}


@pytest.fixture(scope="module")
def saved(made, tmp_path_factory):
    """For each format: the folder that a model loaded with it was saved to, and that model's logits."""
    root, found = tmp_path_factory.mktemp("formats"), {}
    for name in FORMATS:
        model = moestro.load(made.wide(), format=name)
        model.save_pretrained(root / name)
        found[name] = (root / name, logits(model))
    return found


@pytest.fixture(scope="module")
def fresh(saved, tmp_path_factory):
    """By format, the logits in a process that only imported moestro.hf and called from_pretrained without arguments."""
    root = tmp_path_factory.mktemp("fresh")
    torch.save(IDS, root / "ids")
    folders = {name: str(folder) for name, (folder, _) in saved.items()}
    command = [sys.executable, "-c", FRESH, str(root / "ids"), str(root / "out"), *folders.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    out = torch.load(root / "out")
    return {name: out[folder] for name, folder in folders.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_a_saved_model_is_read_back_bit_for_bit_in_another_process(saved, fresh, name):
    folder, wanted = saved[name]
    assert bit_equal(fresh[name], wanted)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("moestro", name)


@pytest.mark.parametrize("name", FORMATS)
def test_through_transformers_and_through_load_are_the_same(made, saved, name, tmp_path):
    folder, wanted = saved[name]
    model = AutoModelForCausalLM.from_pretrained(made.wide(), quantization_config=MoestroConfig(name))
    assert bit_equal(logits(model), wanted)
    again = AutoModelForCausalLM.from_pretrained(folder)
    again.save_pretrained(tmp_path)
    assert differing(read(folder), read(tmp_path)) == set()
    assert (folder / "config.json").read_text() == (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("name", PACKED)
def test_what_is_stored_is_what_the_format_makes_of_each_expert(made, saved, name):
    source = read(made.wide())
    form = find_format(name)
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        first = [torch.cat([source[f"{at}.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(4)]
        second = [source[f"{at}.{e}.down_proj.weight"] for e in range(4)]
        for projection, matrices in (("gate_up_proj", first), ("down_proj", second)):
            stored = tensors_of(saved[name][0], f"{at}.{projection}")
            wanted = quantize(torch.stack(matrices), form)
            parts = {"data": wanted.data, "scales": wanted.scales, "zeros": wanted.zeros}
            parts["global_scales"] = wanted.global_scales
            parts = {key: value for key, value in parts.items() if value is not None}
            assert stored.keys() == parts.keys()
            assert [key for key in parts if not bit_equal(stored[key], parts[key])] == []


@pytest.mark.parametrize("name", PACKED)
def test_logits_are_those_of_the_dequantised_model(made, saved, name, tmp_path):
    """In float32: what a format stores, written out as numbers, and computed by Transformers' own code."""
    folder, _ = saved[name]
    plain = AutoModelForCausalLM.from_pretrained(made.wide(), dtype=torch.float32, experts_implementation="eager")
    form = find_format(name)
    with torch.no_grad():
        for layer, block in enumerate(plain.model.layers):
            for projection in ("gate_up_proj", "down_proj"):
                parts = tensors_of(folder, f"model.layers.{layer}.mlp.experts.{projection}")
                numbers = dequantize(PackedTensor(format=form, **parts))
                getattr(block.mlp.experts, projection).copy_(numbers)
    assert_close(logits(moestro.load(folder, dtype="float32")), logits(plain))


def test_everything_else_is_left_alone(made, saved):
    source = {n: t for n, t in read(made.wide()).items() if ".experts." not in n}
    for folder, _ in saved.values():
        kept = {n: t for n, t in read(folder).items() if ".experts." not in n}
        assert differing(source, kept) == set()


def test_searched_scales_are_no_worse_and_others(made, tmp_path):
    source = read(made.wide())
    at = "model.layers.0.mlp.experts"
    whole = torch.stack([source[f"{at}.{e}.down_proj.weight"] for e in range(4)]).float()
    errors = {}
    for search in ("nearest", "mse"):
        config = MoestroConfig("mxfp4", search=search)
        model = AutoModelForCausalLM.from_pretrained(made.wide(), quantization_config=config)
        model.save_pretrained(tmp_path / search)
        parts = tensors_of(tmp_path / search, f"{at}.down_proj")
        errors[search] = (dequantize(PackedTensor(format=FORMATS["mxfp4"], **parts)) - whole).square().sum()
        stored = json.loads((tmp_path / search / "config.json").read_text())["quantization_config"]
        assert stored["search"] == search
        assert bit_equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / search)), logits(model))
    assert errors["mse"] < errors["nearest"]


def test_overrides_by_layer_and_by_projection(made, tmp_path):
    overrides = {"*.layers.0.*": "int8", "*down_proj": "fp8-e4m3-b128", "*.layers.1.mlp.experts.down_proj": "bf16"}
    config = MoestroConfig("mxfp4", overrides=overrides)
    model = AutoModelForCausalLM.from_pretrained(made.wide(), quantization_config=config)
    found = {
        f"{layer}.{name}": getattr(block.mlp.experts.moestro_store, name).format.name
        for layer, block in enumerate(model.model.layers)
        for name in ("gate_up", "down")
    }
    assert found == {"0.gate_up": "int8", "0.down": "fp8-e4m3-b128", "1.gate_up": "mxfp4", "1.down": "bfloat16"}
    assert [layer.layout for layer in served(model)] == [
        "int8 and fp8-e4m3-b128, in memory",
        "mxfp4 and bfloat16, in memory",
    ]
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert bit_equal(logits(again), logits(model))
    assert [layer.layout.split(",")[0] for layer in served(again)] == [
        "int8 and fp8-e4m3-b128",
        "mxfp4 and bfloat16",
    ]


def test_overrides_whose_order_matters_are_written_so_that_it_does_not(made, tmp_path):
    """Transformers sorts the keys of a configuration: the last override would be another one."""
    overrides = {"*down_proj": "int8", "*.layers.1.*": "mxfp4"}
    config = MoestroConfig("nvfp4", overrides=overrides)
    model = AutoModelForCausalLM.from_pretrained(made.wide(), quantization_config=config)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    at = "model.layers.{}.mlp.experts.{}_proj"
    assert stored["overrides"] == {
        at.format(0, "down"): "int8",
        at.format(1, "gate_up"): "mxfp4",
        at.format(1, "down"): "mxfp4",
    }
    assert bit_equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    in_order = MoestroConfig("nvfp4", overrides={"*.layers.1.*": "mxfp4", "*down_proj": "int8"})
    other = AutoModelForCausalLM.from_pretrained(made.wide(), quantization_config=in_order)
    assert other.config.quantization_config.overrides == {"*.layers.1.*": "mxfp4", "*down_proj": "int8"}


def test_no_format_but_overrides_quantises_those_alone(made, tmp_path):
    config = MoestroConfig(overrides={"*.layers.1.*gate_up_proj": "int8"})
    model = AutoModelForCausalLM.from_pretrained(made.wide(), quantization_config=config)
    assert [layer.layout for layer in served(model)] == ["bfloat16, memory-mapped", "int8 and bfloat16, in memory"]
    model.save_pretrained(tmp_path)
    names = set(read(tmp_path))
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in names
    assert "model.layers.1.mlp.experts.0.down_proj.weight" in names
    assert not [n for n in names if n.startswith("model.layers.1.mlp.experts.0.gate")]
    assert bit_equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_a_configuration_that_changes_nothing_maps_the_experts_and_leaves_no_trace(made, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(made.wide(), quantization_config=MoestroConfig())
    assert {layer.layout for layer in served(model)} == {"bfloat16, memory-mapped"}
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert differing(read(made.wide()), read(tmp_path)) == set()


def test_a_quantised_checkpoint_can_be_loaded_into_another_format(saved, made, tmp_path):
    model = moestro.load(saved["int8"][0], format="mxfp4")
    assert served(model)[0].layout == "mxfp4, in memory"
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (stored["format"], stored["overrides"]) == ("mxfp4", {})
    assert bit_equal(logits(moestro.load(tmp_path)), logits(model))
    error = (logits(model).float() - logits(moestro.load(made.wide())).float()).abs().max()
    assert error > 0


def small(architecture):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if architecture == "gpt_oss":
        config = GptOssConfig(
            **sizes,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
        model = GptOssForCausalLM(config)
    else:
        config = DbrxConfig(
            **sizes,
            d_model=64,
            n_heads=4,
            n_layers=2,
            max_seq_len=64,
            attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
        )
        model = DbrxForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("architecture", ["gpt_oss", "dbrx"])
@pytest.mark.parametrize("name", ["float16", "int8", "mxfp4", "int4-g32-zp", "nvfp4", "fp8-e4m3-b128"])
def test_transposed_and_flat_experts_are_stored_by_rows(architecture, name, tmp_path):
    """From float32: the values of each stored expert are those the format makes of the model's own matrix."""
    model = small(architecture)
    model.save_pretrained(tmp_path / "source")
    loaded = moestro.load(tmp_path / "source", format=name)
    loaded.save_pretrained(tmp_path / "saved")
    assert bit_equal(logits(moestro.load(tmp_path / "saved")), logits(loaded))
    state = model.state_dict()
    if architecture == "gpt_oss":
        target = "model.layers.1.mlp.experts.gate_up_proj"
        whole = state[target].transpose(1, 2)
    else:
        mlp = "transformer.blocks.1.ffn.experts.mlp"
        target = f"{mlp}.gate_up_proj"
        whole = torch.cat([state[f"{mlp}.{half}"].view(4, 32, 64) for half in ("w1", "v1")], 1)
    parts = tensors_of(tmp_path / "saved", target)
    parts.pop("bias", None)
    stored = PackedTensor(format=find_format(name), **parts)
    assert bit_equal(dequantize(stored), dequantize(quantize(whole, find_format(name))))


def test_the_command_and_load_write_the_same(made, saved, tmp_path):
    done = subprocess.run(
        [*python(*IMPORTS), "-m", "moestro", "quantize", str(made.wide()), str(tmp_path / "q"), "--format", "mxfp4"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder, wanted = saved["mxfp4"]
    assert differing(read(folder), read(tmp_path / "q")) == set()
    assert bit_equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "q")), wanted)


@pytest.mark.parametrize("options", [{"device_map": "cpu"}, {"dtype": "float32"}, {"dtype": torch.float16}], ids=str)
def test_arguments_of_from_pretrained_keep_their_meaning(saved, options):
    folder, _ = saved["int8"]
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    wanted = options.get("dtype", torch.bfloat16)
    wanted = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert served(model)[0].layout == "int8, memory-mapped"
    if "dtype" not in options:
        assert bit_equal(logits(model), saved["int8"][1])


@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_a_variant_has_files_of_other_names(made, tmp_path, shard_size):
    plain = AutoModelForCausalLM.from_pretrained(made.wide())
    plain.save_pretrained(tmp_path, variant="fp16", max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "100KB")
    options = {"quantization_config": MoestroConfig("int8")}
    found = AutoModelForCausalLM.from_pretrained(tmp_path, variant="fp16", **options)
    assert bit_equal(logits(found), logits(AutoModelForCausalLM.from_pretrained(made.wide(), **options)))


def test_what_a_configuration_says_of_itself():
    config = MoestroConfig("bf16", search="mse", overrides={"*down_proj": "int8"})
    assert config.to_dict() == {
        "quant_method": "moestro",
        "version": 1,
        "format": "bfloat16",
        "search": "mse",
        "overrides": {"*down_proj": "int8"},
        "rest": None,
    }
    assert MoestroConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert json.loads(config.to_json_string())["format"] == "bfloat16"
    assert MoestroConfig().changes_nothing
    assert not config.changes_nothing


def test_the_sizes_are_the_formats(made, saved):
    """Bytes of the experts in the files: the format's bits, and scales of rows or of matrices, which bits leave out."""
    weights = 2 * 4 * 3 * 128 * 128
    for name in ("int4-g32", "mxfp4", "nvfp4", "fp4-g64", "int4-g128-zp"):
        checkpoint = open_checkpoint(saved[name][0])
        nbytes = sum(checkpoint.entry(n).nbytes for n in checkpoint.names if ".experts." in n)
        per_matrix = 2 * 2 * 4 * 4 if name == "nvfp4" else 0
        assert nbytes - per_matrix == weights * FORMATS[name].bits / 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "q4_k"}, "mxfp4"),
        ({"format": "int8", "search": "best"}, "nearest, mse"),
        ({"projections": "int9"}, "one of torch, auto"),
        ({"format": "int8", "overrides": {"*": "int5"}}, "int8"),
        ({"format": "int8", "overides": {}}, "overides"),
        ({"format": "int8", "version": 2}, "version 2"),
        ({"format": "int8", "version": "1"}, "version '1'"),
    ],
    ids=str,
)
def test_unknown_words_are_refused_when_the_configuration_is_made(options, words):
    with pytest.raises(InvalidInputError, match=words):
        MoestroConfig(**options)
