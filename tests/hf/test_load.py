"""moestro.load: published checkpoints as they are, with the logits Transformers computes, and saved as they were."""

from __future__ import annotations

import json
import os
import pathlib

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import moestro
from hf.checkpoints import DROPPED, FAMILIES, FP8, FUSABLE, IDS, blocks_128, differing, logits, read
from moestro.hf import served
from moestro.hf.serving import adapter_of
from moestro.hf.sources import read_sources
from tolerances import assert_close, bit_equal

BF16 = [like for like in FAMILIES if like not in (*FP8, "gpt-oss-20b")]
ALL = [*((like, False) for like in FAMILIES), *((like, True) for like in FUSABLE)]
FORMATS = dict.fromkeys(FP8, "fp8-e4m3-b128") | {"gpt-oss-20b": "mxfp4"}


@pytest.mark.parametrize(("like", "fused"), ALL, ids=str)
def test_logits_are_those_of_transformers_on_plain_weights(made, like, fused):
    model = moestro.load(made.folder(like, fused), dtype="float32")
    assert not model.training
    assert_close(logits(model), made.expected(like, fused))
    layers = served(model)
    assert [layer.path for layer in layers] == [path for path, m in model.named_modules() if adapter_of(m) is not None]
    assert {layer.layout for layer in layers} == {f"{FORMATS.get(like, 'bfloat16')}, memory-mapped"}
    assert {layer.strategy for layer in layers} == {"auto"}


@pytest.mark.parametrize("like", FAMILIES)
def test_activations_are_read_as_data(made, like):
    """In the checkpoint's own dtype, which is the default dtype while the model is made; engines run only such ones."""
    described = {layer.activation for layer in served(moestro.load(made.folder(like)))}
    assert described == {"silu (alpha 1.702, limit 7, up + 1)" if like == "gpt-oss-20b" else "silu"}


@pytest.mark.parametrize("like", FAMILIES)
def test_many_files_with_an_index_are_one_checkpoint(made, like):
    folder = made.folder(like, shard_bytes=200_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert (folder / "model.safetensors.index.json").is_file()
    assert_close(logits(moestro.load(folder, dtype="float32")), made.expected(like))


@pytest.mark.parametrize("like", [*BF16, "gpt-oss-20b"])
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_saving_writes_what_was_read(made, like, shards, tmp_path):
    source = made.folder(like, shard_bytes=200_000) if shards else made.folder(like)
    model = moestro.load(source)
    model.save_pretrained(tmp_path, **({"max_shard_size": "200KB"} if shards else {}))
    given, saved = read(source), read(tmp_path)
    assert {name for name in differing(given, saved) if not DROPPED.match(name)} == set()
    config = json.loads((tmp_path / "config.json").read_text())
    published = json.loads((source / "config.json").read_text())
    assert config.get("quantization_config") == published.get("quantization_config")
    assert config["architectures"] == [type(model).__name__]
    assert "moestro" not in (tmp_path / "config.json").read_text()
    assert bit_equal(logits(moestro.load(tmp_path)), logits(model))


@pytest.mark.parametrize("like", FP8)
def test_fp8_saves_its_experts_as_read_and_the_rest_in_the_models_dtype(made, like, tmp_path):
    model = moestro.load(made.folder(like))
    model.save_pretrained(tmp_path)
    given, saved = read(made.folder(like)), read(tmp_path)
    for name, tensor in given.items():
        if DROPPED.match(name):
            assert name not in saved
        elif ".mlp.experts." in name or f"{name.removesuffix('_scale_inv')}_scale_inv" not in given:
            assert bit_equal(saved[name], tensor), name
        elif tensor.dtype == torch.float8_e4m3fn:
            wanted = blocks_128(tensor, given[f"{name}_scale_inv"]).to(torch.bfloat16)
            assert bit_equal(saved[name], wanted), name
        else:
            assert name not in saved
    again = moestro.load(tmp_path)
    assert served(again)[0].layout == "fp8-e4m3-b128, memory-mapped"
    assert bit_equal(logits(again), logits(model))
    assert bit_equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    again.save_pretrained(tmp_path / "again")
    assert differing(saved, read(tmp_path / "again")) == set()
    assert (tmp_path / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()


def test_saving_over_the_files_that_are_mapped_keeps_them_whole(made, tmp_path):
    folder = made.copy("mixtral-8x7b", tmp_path / "model")
    before = read(folder)
    model = moestro.load(folder)
    wanted = logits(model)
    model.save_pretrained(folder)
    assert bit_equal(logits(model), wanted)
    assert differing(before, read(folder)) == set()


@pytest.mark.parametrize("dtype", [None, "bfloat16", torch.float32, "float16"])
def test_dtype_is_that_of_everything_but_the_experts(made, dtype):
    model = moestro.load(made.folder("qwen3-30b-a3b"), dtype=dtype)
    wanted = torch.bfloat16 if dtype is None else getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert logits(model).dtype == wanted
    assert {t.dtype for n, t in model.state_dict().items() if ".experts." in n} == {torch.bfloat16}


def test_where_a_checkpoint_is(made, tmp_path, monkeypatch):
    folder = made.copy("olmoe", tmp_path / "home" / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    wanted = logits(moestro.load(folder))
    for place in ("home/model", pathlib.Path("home/model"), "~/model", pathlib.Path("~/model"), f"{folder}/"):
        assert bit_equal(logits(moestro.load(place)), wanted)


def test_a_snapshot_of_links_as_the_hub_keeps_it(made, tmp_path):
    source = made.folder("olmoe", shard_bytes=200_000)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, path in enumerate(source.iterdir()):
        (blobs / f"{i:064d}").write_bytes(path.read_bytes())
        os.symlink(f"../../blobs/{i:064d}", snapshot / path.name)
    assert bit_equal(logits(moestro.load(snapshot)), logits(moestro.load(source)))


def test_a_model_of_the_hubs_cache_is_found_by_its_name(made, tmp_path, monkeypatch):
    cache = tmp_path / "models--some--olmoe"
    made.copy("olmoe", cache / "snapshots" / ("a" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path), raising=False)
    assert bit_equal(logits(moestro.load("some/olmoe")), logits(moestro.load(made.folder("olmoe"))))


def test_nothing_of_the_experts_is_copied(made):
    folder = made.folder("mixtral-8x7b")
    mapped = {line.split()[0]: line for line in maps() if str(folder) in line}
    model = moestro.load(folder)
    ranges = [tuple(int(v, 16) for v in line.split()[0].split("-")) for line in maps() if str(folder) in line]
    assert len(ranges) > len(mapped)
    tensors = {n: t for n, t in model.state_dict().items() if ".experts." in n}
    assert len(tensors) == 2 * 8 * 3
    for tensor in tensors.values():
        assert any(start <= tensor.data_ptr() < stop for start, stop in ranges)


def maps():
    return pathlib.Path("/proc/self/maps").read_text().splitlines()


@pytest.mark.parametrize("like", FAMILIES)
def test_sources_are_the_same_experts(made, like):
    config, checkpoint, sources = read_sources(made.folder(like))
    assert config.model_type
    assert {source.stored.format.name for source in sources} == {FORMATS.get(like, "bfloat16")}
    names = [name for source in sources for name in source.names]
    assert len(set(names)) == len(names)
    assert set(names) <= set(checkpoint.names)
    model = moestro.load(made.folder(like))
    state = model.state_dict()
    assert set(names) <= set(state)
    assert not [n for n in state if ".experts." in n and "bias" not in n and n not in names]
    assert all(source.target.endswith(("gate_up_proj", "down_proj")) for source in sources)


def test_generating_a_padded_batch_is_generating_each(made):
    model = moestro.load(made.folder("gpt-oss-20b"), dtype="float32")
    short, long = IDS[:1, :5], IDS[1:, :9]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 258}
    pad = torch.full((1, 4), 258)
    batch = torch.cat([torch.cat([pad, short], 1), long])
    mask = (batch != 258).long()
    both = model.generate(batch, attention_mask=mask, **options)
    assert torch.equal(both[0, 9:], model.generate(short, **options)[0, 5:])
    assert torch.equal(both[1, 9:], model.generate(long, **options)[0, 9:])


def per_tensor(data):
    return torch.rand(()) * 0.01 + 0.001


def per_matrix(data):
    return torch.rand(1, 1) * 0.01 + 0.001


def per_channel(data):
    return torch.rand(data.shape[0], 1) * 0.01 + 0.001


def power_of_two(data):
    sizes = [-(-n // 128) for n in data.shape]
    return torch.randint(115, 120, sizes, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def half_of_a_float(data):
    return (torch.rand([-(-n // 128) for n in data.shape]) * 0.01 + 0.001).bfloat16()


SCALES = {per_tensor: None, per_matrix: None, per_channel: None, power_of_two: [128, 128], half_of_a_float: [128, 128]}


@pytest.mark.parametrize("scales", SCALES, ids=lambda f: f.__name__)
def test_every_kind_of_fp8_scales(made, scales, tmp_path):
    torch.manual_seed(0)
    folder = made.copy("qwen3-30b-a3b-fp8", tmp_path / "model")
    tensors = read(folder)
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        tensors[name] = scales(tensors[name.removesuffix("_scale_inv")])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = SCALES[scales]
    (folder / "config.json").write_text(json.dumps(config))
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        key, scale = name.removesuffix("_scale_inv"), tensors.pop(name)
        whole = blocks_128(tensors[key], scale) if SCALES[scales] else tensors[key].float() * scale.float()
        tensors[key] = whole
    plain = tmp_path / "plain"
    plain.mkdir()
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file({n: t.float() for n, t in tensors.items()}, plain / "model.safetensors", {"format": "pt"})
    own = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager")
    model = moestro.load(folder, dtype="float32")
    assert_close(logits(model), logits(own))
    model.save_pretrained(tmp_path / "saved")
    assert bit_equal(logits(moestro.load(tmp_path / "saved", dtype="float32")), logits(model))
