"""Made checkpoints are those that were published: names, shapes, dtypes, sizes, files; and they load and run."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import make_checkpoint as mc
import moestro
from moestro.checkpoint import TensorSpec, open_checkpoint
from moestro.errors import InvalidInputError
from moestro.formats import FORMATS, PackedTensor, dequantize, find_format
from moestro.hf.generate import Sampling, generate
from moestro.hf.text_model import load_text_model
from published import PUBLISHED
from published.fill import PERIOD, Filler
from published.tensors import Fill
from published_facts import FILES, LAYERS, WEIGHTS
from source import ROOT

FUSED = [name for name, model in PUBLISHED.items() if model.fusable]
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}
NOT_READ = re.compile(r"model\.layers\.3\.|vision_model\.|multi_modal_projector\.")
"""What the classes for text leave alone in the published checkpoints: prediction layers (3 where tiny), vision."""


plan = functools.cache(mc.plan)


def specs(request: mc.Request) -> dict[str, TensorSpec]:
    return {item.name: item.spec for item in plan(request).items}


def make(folder: Path, request: mc.Request, **options: Any) -> mc.Plan:
    planned = mc.plan(request)
    mc.write(planned, folder, **options)
    return planned


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("like", WEIGHTS)
def test_as_many_weights_of_each_dtype_as_published(like: str) -> None:
    counts: Counter[str] = Counter()
    names = {dtype: name for name, dtype in DTYPES.items()}
    items = plan(mc.Request(like)).items
    for item in items:
        counts[names[item.spec.dtype]] += math.prod(item.spec.shape)
    assert dict(counts) == WEIGHTS[like]
    assert len({item.name for item in items}) == len(items)


@pytest.mark.parametrize("like", FILES)
def test_files_are_named_and_counted_as_published(like: str) -> None:
    first, last, count = FILES[like]
    planned = plan(mc.Request(like))
    files = planned.files()
    assert (next(iter(files)), list(files)[-1], len(files)) == (first, last, count)
    assert sum(spec.nbytes for shard in files.values() for spec in shard) == planned.nbytes


@pytest.mark.parametrize("like", LAYERS)
def test_every_tensor_of_a_layer_is_as_published(like: str) -> None:
    """The table writes a layer's own tensors out, those of one expert with its number as 0."""
    prefix, table = LAYERS[like]
    facts = dict(
        re.fullmatch(r"(\S+) (\S+ [\dx]+)", line.strip()).groups() for line in table.split("\n") if line.strip()
    )
    found: dict[str, str] = {}
    names = {dtype: name for name, dtype in DTYPES.items()}
    for name, spec in specs(mc.Request(like)).items():
        if name.startswith(prefix):
            short = re.sub(r"experts\.\d+\.", "experts.0.", name.removeprefix(prefix))
            text = f"{names[spec.dtype]} {'x'.join(map(str, spec.shape))}"
            assert found.setdefault(short, text) == text
    assert found == facts


@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    ("like", "fused"), [*((like, False) for like in PUBLISHED), *((like, True) for like in FUSED)], ids=str
)
def test_transformers_loads_and_runs_it(like: str, fused: bool, tmp_path: Path) -> None:
    make(tmp_path, mc.Request(like, tiny=True, fused=fused))
    with safe_open(next(tmp_path.glob("*.safetensors")), "pt") as file:
        assert file.metadata() == {"format": "pt"}
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, experts_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert [key for key in report["unexpected_keys"] if not NOT_READ.match(key)] == []
    assert type(model).__name__ in (PUBLISHED[like].config["architectures"][0], "Llama4ForCausalLM")
    logits = logits_of(model)
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3
    assert (logits[0, 0] - logits[0, -1]).std() > 0.3


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12) * 10
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(ids).logits.float()
    return found


@pytest.mark.unpoisoned
@pytest.mark.parametrize("like", ["gpt-oss-20b", "qwen3-30b-a3b", "llama4-scout"])
def test_what_passes_through_all_layers_stays_finite_and_spread(like: str, tmp_path: Path) -> None:
    model_of = PUBLISHED[like]
    layers = model_of.text_config(model_of.config)[model_of.layers]
    make(tmp_path, mc.Request(like, tiny=True, layers=layers))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, experts_implementation="eager")
    chosen: list[torch.Tensor] = []
    routers = [m for name, m in model.named_modules() if re.search(r"mlp\.(router|gate)$|feed_forward\.router$", name)]
    for module in routers:
        module.register_forward_hook(lambda _m, _i, out: chosen.append(out[-1] if len(out) == 3 else out[0]))
    logits = logits_of(model)
    assert len(chosen) == layers
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3
    if like != "llama4-scout":
        counts = torch.bincount(torch.cat([c.flatten() for c in chosen]))
        assert counts.min() > 0.2 * counts.float().mean()


@pytest.mark.unpoisoned
@pytest.mark.parametrize("like", ["gpt-oss-20b", "mixtral-8x7b", "dbrx", "qwen3-30b-a3b-fp8"])
def test_small_branches_add_little_and_a_rounding_stays_one(like: str, tmp_path: Path) -> None:
    """A change of 1 % in the embedding is one of about 1 % in the logits, at whatever depth."""
    changes = {}
    for branches in (1.0, 0.05):
        folder = tmp_path / f"{branches}"
        make(folder, mc.Request(like, tiny=True, layers=16, branches=branches))
        model = moestro.load(folder, dtype="float32")
        logits = logits_of(model)
        embedding = model.get_input_embeddings().weight
        noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            embedding += 0.01 * noise * embedding.std()
        changes[branches] = float((logits_of(model) - logits).norm() / logits.norm())
    assert 0.005 < changes[0.05] < 0.02
    assert changes[1.0] > 1.5 * changes[0.05]


@pytest.mark.parametrize("like", PUBLISHED)
def test_large_routers_are_the_routers_alone(like: str) -> None:
    usual, large = (specs_and_sizes(mc.Request(like, tiny=True, routers=size)) for size in (1.0, 4.0))
    changed = {name for name, size in usual.items() if large[name] != size}
    routers = {name for name in usual if re.search(r"(?<!shared_expert_)(gate|router)(\.layer)?\.weight$", name)}
    assert changed == routers
    assert all(large[name] == 4 * usual[name] > 0 for name in routers)
    experts = {name.partition("experts.")[0] for name in usual if ".experts." in name}
    assert len(experts) == len(routers)


def specs_and_sizes(request: mc.Request) -> dict[str, float]:
    return {item.name: item.fill.size for item in plan(request).items}


@pytest.mark.unpoisoned
@pytest.mark.parametrize("like", ["gpt-oss-20b", "qwen3-30b-a3b"])
def test_large_routers_weigh_the_last_expert_little_and_spread(like: str, tmp_path: Path) -> None:
    least = {}
    for routers in (1.0, 4.0):
        folder = tmp_path / f"{routers}"
        make(folder, mc.Request(like, tiny=True, layers=16, branches=0.05, routers=routers))
        model = moestro.load(folder, dtype="float32")
        found: list[tuple[torch.Tensor, ...]] = []
        for module in (m for name, m in model.named_modules() if re.search(r"mlp\.(router|gate)$", name)):
            module.register_forward_hook(lambda _m, _i, out, found=found: found.append(out))
        logits_of(model)
        assert len(found) == 16
        weights, ids = (torch.cat([out[place] for out in found]) for place in (1, 2))
        least[routers] = float((weights.amin(-1) / weights.sum(-1)).median())
        counts = torch.bincount(ids.flatten())
        assert counts.min() > 0.2 * counts.float().mean()
    assert least[4.0] < 0.25 * least[1.0]


@pytest.mark.parametrize("like", PUBLISHED)
def test_the_configuration_is_one_transformers_knows(like: str, tmp_path: Path) -> None:
    planned = plan(mc.Request(like))
    (tmp_path / "config.json").write_text(json.dumps(planned.config))
    config = AutoConfig.from_pretrained(tmp_path).get_text_config()
    text = planned.published.text_config(planned.config)
    assert config.vocab_size == text["vocab_size"]
    assert config.num_hidden_layers == text[planned.published.layers]
    theta = text["attn_config"]["rope_theta"] if like == "dbrx" else text["rope_theta"]
    parameters = config.attn_config.rope_theta if like == "dbrx" else config.rope_parameters["rope_theta"]
    assert parameters == theta


@pytest.mark.unpoisoned
@pytest.mark.parametrize("like", ["gpt-oss-20b", "qwen3-30b-a3b", "mixtral-8x7b", "dbrx", "llama4-scout", "glm4-moe"])
def test_moestro_generates_with_it(like: str, tmp_path: Path) -> None:
    make(tmp_path, mc.Request(like, tiny=True))
    result = generate(load_text_model(tmp_path), "A quick brown fox", Sampling(max_new_tokens=8, do_sample=False))
    assert result.text


@pytest.mark.parametrize(("like", "tiny"), [("gpt-oss-20b", False), ("deepseek-v3", False), ("qwen2-moe", True)])
def test_the_tokenizer_covers_the_vocabulary_and_loses_nothing(like: str, tiny: bool, tmp_path: Path) -> None:
    planned = mc.plan(mc.Request(like, tiny=tiny))
    text = planned.published.text_config(planned.config)
    special = mc.special_tokens(planned.generation or {}, text)
    mc.write_tokenizer(tmp_path, text["vocab_size"], special)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == text["vocab_size"]
    assert tokenizer.eos_token_id in ([text["eos_token_id"]] if tiny else special)
    for sample in ("", "def f():\n\treturn 'é漢🙂'\n", "#7 <|x|>"):
        assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample
    assert tokenizer.decode([text["vocab_size"] - 1]) in (f" #{text['vocab_size'] - 1}", *special.values())


def test_one_seed_makes_one_checkpoint(tmp_path: Path) -> None:
    request = mc.Request("gpt-oss-20b", tiny=True)
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        make(tmp_path / name, request, seed=seed)
    assert digest(tmp_path / "one") == digest(tmp_path / "again")
    weights = "model.safetensors"
    assert digest(tmp_path / "one")[weights] != digest(tmp_path / "other")[weights]


def test_how_it_is_cut_into_files_changes_no_tensor(tmp_path: Path) -> None:
    request = mc.Request("qwen3-30b-a3b-fp8", tiny=True)
    make(tmp_path / "one", request)
    planned = make(tmp_path / "many", request, shard_bytes=300_000)
    one, many = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "many")
    assert one.names == many.names == tuple(sorted(item.name for item in planned.items))
    assert len(many.files) > 5
    for name in one.names:
        assert torch.equal(one.tensor(name).view(torch.uint8), many.tensor(name).view(torch.uint8))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == planned.nbytes


def test_a_cut_model_has_the_first_layers_at_full_size() -> None:
    whole, cut = specs(mc.Request("deepseek-v3")), specs(mc.Request("deepseek-v3", layers=4))
    assert cut == {name: spec for name, spec in whole.items() if not re.match(r"model\.layers\.([4-9]|\d\d)\.", name)}
    assert plan(mc.Request("deepseek-v3", layers=4)).config["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int8", "int4-g32", "int4-g32-zp", "fp4-g32", "fp8-e4m3-b128"])
@pytest.mark.parametrize("like", ["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b"])
def test_a_format_of_moestro_is_stored_as_moestro_stores_it(like: str, name: str, tmp_path: Path) -> None:
    planned = make(tmp_path, mc.Request(like, tiny=True, format=name))
    assert planned.config["quantization_config"]["quant_method"] == "moestro"
    assert planned.config["quantization_config"]["format"] == name
    checkpoint = open_checkpoint(tmp_path)
    config, form = planned.config, find_format(name)
    experts = config.get("num_experts") or config["num_local_experts"]
    h, i = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    for projection, shape in (("gate_up_proj", (experts, 2 * i, h)), ("down_proj", (experts, h, i))):
        target = f"model.layers.1.mlp.experts.{projection}"
        parts = [f"{target}_{part}" for part in ("data", "scales", "zeros", "global_scales")]
        tensors = [checkpoint.tensor(part) if part in checkpoint.names else None for part in parts]
        assert tensors[0] is not None
        packed = PackedTensor(tensors[0], form, *tensors[1:])
        assert packed.shape == shape
        values = dequantize(packed)
        assert values.isfinite().all()
        assert 0.5 < values.std() * math.sqrt(shape[-1]) < 2
    assert not [key for key in checkpoint.names if re.search(r"experts\.(\d|.*(_blocks|_proj)$)", key)]


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if not form.is_dense])
def test_every_format_has_its_tensors_at_full_size(name: str) -> None:
    found = specs(mc.Request("olmoe", layers=1, format=name))
    for projection, shape in (("gate_up_proj", (64, 2048, 2048)), ("down_proj", (64, 2048, 1024))):
        target = f"model.layers.0.mlp.experts.{projection}"
        parts = [found.get(f"{target}_{part}") for part in ("data", "scales", "zeros", "global_scales")]
        tensors = [None if s is None else torch.empty(s.shape, dtype=s.dtype, device="meta") for s in parts]
        assert tensors[0] is not None
        assert PackedTensor(tensors[0], FORMATS[name], *tensors[1:]).shape == shape


@pytest.mark.parametrize(
    ("like", "target"),
    [
        ("dbrx", "transformer.blocks.0.ffn.experts.mlp.gate_up_proj"),
        ("llama4-scout", "language_model.model.layers.0.feed_forward.experts.gate_up_proj"),
        ("mixtral-8x7b", "model.layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_in_a_format_experts_are_named_after_their_parameters(like: str, target: str) -> None:
    found = specs(mc.Request(like, layers=1, format="mxfp4"))
    experts, width, hidden = {"dbrx": (16, 21504, 6144), "llama4-scout": (16, 16384, 5120)}.get(like, (8, 28672, 4096))
    assert found[f"{target}_data"].shape == (experts, width, hidden // 2)
    assert found[f"{target}_scales"].shape == (experts, width, hidden // 32)


def test_a_format_makes_the_big_one_small() -> None:
    assert 17.5e9 < mc.plan(mc.Request("qwen3-30b-a3b", format="mxfp4")).nbytes < 18.5e9


REFUSED = {
    "an unknown model": (mc.Request("gpt-5"), "one of gpt-oss-20b"),
    "no layers": (mc.Request("gpt-oss-20b", layers=0), "1 to 24 layers"),
    "too many layers": (mc.Request("gpt-oss-20b", layers=25), "1 to 24 layers"),
    "dense layers only": (mc.Request("deepseek-v3", layers=3), "the first 3 have no experts"),
    "fused, and fused already": (mc.Request("gpt-oss-20b", fused=True), "bfloat16 unstacked experts"),
    "fused in a format": (mc.Request("olmoe", fused=True, format="mxfp4"), "one of them"),
    "a dense format": (mc.Request("olmoe", format="bfloat16"), "a format with scales"),
    "a format in FP8": (mc.Request("deepseek-v3", format="mxfp4"), "everything but its experts in bfloat16"),
    "a format that does not fit": (mc.Request("qwen3-30b-a3b", tiny=True, format="int4-g128"), "128"),
    "branches of nothing": (mc.Request("olmoe", branches=0.0), "a number above 0, and 1 at most"),
    "routers of no size": (mc.Request("olmoe", routers=float("nan")), "a number from 1 to 16"),
    "an unknown format": (mc.Request("qwen3-30b-a3b", format="q4_k"), "mxfp4"),
}


@pytest.mark.parametrize(("request_", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_made_is_refused_in_words(request_: mc.Request, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        mc.plan(request_)


def test_a_folder_in_use_and_a_full_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = mc.plan(mc.Request("olmoe", tiny=True))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "a.txt").touch()
    with pytest.raises(InvalidInputError, match="not empty"):
        mc.write(planned, tmp_path / "used")
    for path in (tmp_path / "used" / "a.txt", tmp_path / "used" / "a.txt" / "new"):
        with pytest.raises(InvalidInputError, match=r"a\.txt"):
            mc.write(planned, path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, planned.nbytes))
    with pytest.raises(InvalidInputError, match="free space"):
        mc.write(planned, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_an_interrupted_file_never_has_its_name(tmp_path: Path) -> None:
    planned = mc.plan(mc.Request("mixtral-8x7b", tiny=True))
    names = list(planned.files(200_000))
    left = [planned.nbytes // 2]

    def interrupt(count: int) -> None:
        left[0] -= count
        if left[0] < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mc.write(planned, tmp_path, shard_bytes=200_000, on_bytes=interrupt)
    found = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert 0 < len(found) < len(names)
    assert found == names[: len(found)]
    assert not (tmp_path / "config.json").exists()
    for name in found:
        with safe_open(tmp_path / name, "pt") as file:
            assert all(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118


def test_pieces_are_small_or_one_row_high() -> None:
    fills = {"wide": Fill("normal", 1.0), "tall": Fill("e2m1"), "flat": Fill("ones")}
    shapes = {"wide": (3, PERIOD + 5), "tall": (PERIOD, 3), "flat": (7,)}
    filler = Filler(fills, 0)
    for name, shape in shapes.items():
        spec = TensorSpec(name, torch.bfloat16 if name != "tall" else torch.uint8, shape)
        pieces = list(filler(spec))
        assert all(piece.shape[0] == 1 or piece.numel() <= PERIOD for piece in pieces)
        assert torch.cat(pieces).shape == shape


def test_no_two_rows_of_a_large_matrix_are_equal() -> None:
    filler = Filler({"w": Fill("normal", 1.0)}, 0)
    rows = torch.cat([piece.clone() for piece in filler(TensorSpec("w", torch.bfloat16, (50_000, 64)))])
    assert len(rows.view(torch.int16).unique(dim=0)) == len(rows)


MEASURE = """
import resource, sys
from pathlib import Path
import make_checkpoint as mc
planned = mc.plan(mc.Request("olmoe", layers=1))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mc.write(planned, Path(sys.argv[1]))
print(planned.nbytes >> 10, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_is_bounded_whatever_the_size(tmp_path: Path) -> None:
    path = f"{ROOT / 'examples'}:{ROOT / 'src'}"
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "cut")]
    done = subprocess.run(command, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    shutil.rmtree(tmp_path / "cut", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    size, grown = map(int, done.stdout.split())
    assert size > 1_000_000
    assert grown < size // 5


def test_the_command_says_what_it_did_or_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "new")
    arguments = [folder, "--like", "olmoe", "--tiny", "--single-file"]
    assert mc.main(arguments) == 0
    assert "like olmoe" in capsys.readouterr().out
    assert (tmp_path / "new" / "model.safetensors").is_file()
    assert mc.main(arguments) == 1
    assert "not empty" in capsys.readouterr().err
    for bad in (["--shard-size", "5QB"], ["--shard-size", "0"], ["--like", "nothing"]):
        with pytest.raises(SystemExit):
            mc.main([folder, "--like", "olmoe", *bad])


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("4.8G", 4_800_000_000), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert mc.parse_size(text) == size
