"""Whole models over processes, by `load` on a mesh and by Transformers' own way, beside one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers.distributed.expert_parallel")

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

import moestro
from hf.checkpoints import Checkpoints
from moestro.cli import app
from moestro.hf.generate import Sampling, generate
from moestro.hf.text_model import load_text_model
from moestro.tolerances import disagreement
from parallel import models

FAMILIES = ["gpt-oss-20b", "qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b", "llama4-scout", "dbrx", "glm4-moe"]
PROMPT = "def f(x):"
EP, TP = {"tp_size": 2, "ep_size": 2}, {"tp_size": 2}
NAMES = ["moestro_all_to_all", "moestro_all_gather"]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def same(found, expected, share=None):
    """On every rank: the logits of one process, its share of the experts' bytes, and moestro's work in every layer."""
    logits, total, calls = expected
    for got in found:
        assert not isinstance(got, str), got
        assert disagreement(got[0], logits) is None
        assert got[2] == calls > 0
        # Scales of whole rows are on each slice.
        assert share is None or total / share <= got[1] <= 1.02 * total / share


@pytest.mark.parametrize("like", FAMILIES)
def test_experts_over_two_processes(group, made, like):
    folder = made.folder(like)
    same(group(2).run(models.loaded, folder, 2, 1), models.loaded(folder, 0, 0), share=2)


@pytest.mark.parametrize("like", [name for name in FAMILIES if name != "deepseek-v3"])
def test_slices_over_two_processes(group, made, like):
    folder = made.folder(like)
    same(group(2).run(models.loaded, folder, 1, 2), models.loaded(folder, 0, 0), share=2)


def test_blocks_of_scales_are_not_cut(group, made):
    for said in group(2).run(models.loaded, made.folder("deepseek-v3"), 1, 2):
        assert said.startswith("UnsupportedError: [load] got intermediate_size 96 in fp8-e4m3-b128, to be cut into 2")


def test_three_processes_do_not_divide_the_experts(group, made):
    folder = made.folder("qwen3-30b-a3b")
    found, expected = group(3).run(models.loaded, folder, 3, 1), models.loaded(folder, 0, 0)
    same(found, expected)
    assert sum(kept for _, kept, _ in found) == expected[1]


@pytest.mark.parametrize("like", FAMILIES[:5])
@pytest.mark.parametrize(("world", "ep", "tp"), [(4, 2, 1), (4, 2, 2), (8, 8, 1), (8, 2, 2)])
def test_four_and_eight_processes(group, made, like, world, ep, tp):
    """Copies along dp, experts and slices; blocks of 128 are not cut."""
    folder, tp = made.folder(like), 1 if like == "deepseek-v3" else tp
    same(group(world).run(models.loaded, folder, ep, tp), models.loaded(folder, 0, 0), share=ep * tp)


def test_four_processes_by_the_way_of_transformers(group, made):
    """Of the others it would cut 2 heads of keys over 4 processes."""
    folder = made.folder("gpt-oss-20b")
    expected = models.loaded(folder, 0, 0)
    for name in NAMES:
        same(group(4).run(models.of_transformers, folder, {"tp_size": 4, "ep_size": 4}, name), expected, share=4)


@pytest.mark.parametrize("form", ["int4-g32", "int8", "mxfp4", "fp8-e4m3-b128", "nvfp4"])
def test_experts_quantised_while_they_are_read(group, made, form):
    folder = made.wide()
    expected = models.loaded(folder, 0, 0, form)
    same(group(4).run(models.loaded, folder, 4, 1, form), expected, share=4)
    if form != "fp8-e4m3-b128":  # one block of 128 is not cut
        same(group(4).run(models.loaded, folder, 2, 2, form), expected, share=4)
        same(group(4).run(models.loaded, folder, 1, 2, form), expected, share=2)


def test_a_quantised_checkpoint(group, made, tmp_path):
    moestro.load(made.wide(), format="int4-g32").save_pretrained(tmp_path / "stored")
    expected = models.loaded(tmp_path / "stored", 0, 0)
    same(group(2).run(models.loaded, tmp_path / "stored", 2, 1), expected, share=2)
    for name in NAMES:
        same(group(2).run(models.of_transformers, tmp_path / "stored", EP, name), expected, share=2)


@pytest.mark.parametrize("like", ["gpt-oss-20b", "qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"])
def test_experts_as_stored_by_the_way_of_transformers(group, made, like):
    """FP8 and MXFP4 as published, and 16-bit experts as parameters."""
    folder = made.folder(like)
    expected, share = models.loaded(folder, 0, 0), 2 if like in ("gpt-oss-20b", "deepseek-v3") else None
    for name in NAMES:
        same(group(2).run(models.of_transformers, folder, EP, name), expected, share)


@pytest.mark.parametrize("sizes", [EP, TP], ids=["ep", "tp"])
def test_experts_quantised_by_the_way_of_transformers(group, made, sizes):
    folder = made.wide()
    expected = models.loaded(folder, 0, 0, "int4-g32")
    for name in [None, *NAMES] if sizes is EP else [None]:
        same(group(2).run(models.of_transformers, folder, sizes, name, "int4-g32"), expected, share=2)


@pytest.mark.parametrize("like", ["gpt-oss-20b", "deepseek-v3", "mixtral-8x7b"])
@pytest.mark.parametrize("sizes", [EP, TP], ids=["ep", "tp"])
def test_a_model_that_transformers_cut_is_accelerated(group, made, like, sizes):
    folder = made.plain(like)
    found = group(2).run(models.of_transformers, folder, sizes, None, None, "afterwards")
    same(found, models.loaded(folder, 0, 0))


def test_what_cannot_be_had_is_refused(group, made, tmp_path):
    wide = made.wide()
    for said in group(2).run(models.of_transformers, wide, EP, "moestro_all_to_all", None, False):
        assert said.startswith("UnsupportedError: [AllToAllEP] got experts_implementation=")
    for said in group(2).run(models.of_transformers, wide, {"fsdp_size": 2}, None, "int4-g32"):
        assert "with tp_size=1 and fsdp_size=2; needs tp_size alone, or ep_size equal to it" in said
    for said in group(2).run(models.with_strategy, wide):
        assert "strategy='grouped' for model.layers.0.mlp.experts, whose experts Transformers has cut" in said
    for operation, loading in (("load", True), ("accelerate", False)):
        for said in group(2).run(models.stored_projections, wide, loading):
            assert said.startswith(
                f"UnsupportedError: [{operation}] got projections='int8' for model.layers.0.self_attn"
            )
    for said in group(2).run(models.saved, wide, tmp_path):
        assert said.startswith("UnsupportedError: [save] got a model whose experts are cut over processes")


def test_accelerate_leaves_experts_cut(group, made):
    folder = made.wide()
    found = group(2).run(models.accelerated_otherwise, folder)
    same([each[:3] for each in found], models.loaded(folder, 0, 0), share=2)
    assert all(each[3] == {"blockwise-8"} for each in found)


def test_ranks_that_are_given_other_tokens(group, made):
    for said in group(2).run(models.other_tokens, made.wide()):
        assert said.startswith("CollectiveError: [first call] got different "), said
        assert "Give every rank of the group the same batch" in said


def test_tokens_by_name_and_by_position_are_the_same(group, made):
    first, second = group(2).run(models.passed_otherwise, made.wide())
    assert torch.equal(first, second)


def test_a_model_and_its_copy_compare_their_first_calls(group, made):
    assert group(2).run(models.copied, made.wide()) == [([1, 1, 2, 2], True)] * 2


@pytest.mark.parametrize("seeded", [False, True])
def test_ranks_sample_the_same_tokens(group, seeded):
    first, other = group(2).run(models.generated, [PROMPT, PROMPT], seeded)
    assert first == other
    assert (first[0] == first[1]) is seeded


def test_ranks_with_other_prompts(group):
    for said in group(2).run(models.generated, [PROMPT, PROMPT.replace("x", "y")], False):
        assert said.startswith("CollectiveError: [generate] got different prompt: "), said


def test_the_timeout_of_the_mesh_arrives_in_every_layer(fresh, made):
    for loaded, called in fresh(2).run(models.timeouts, made.wide()):
        assert loaded == called == {88.0}


def test_an_error_names_the_layer_of_dense_experts(fresh, made):
    for said in fresh(2).run(models.layer_names, made.wide()):
        assert "expert layer 1 (Qwen3MoeExperts)" in said


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """One layer whose experts take 96 MiB in bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 512, "moe_intermediate_size": 1024, "num_experts": 32, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "intermediate_size": 64}
    config = Qwen3MoeConfig(**sizes, **heads, num_hidden_layers=1)
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
@pytest.mark.parametrize("form", [None, "int8"])
def test_slices_are_read_one_expert_at_a_time(fresh, large, form):
    """At most what stays, an expert in float32 a few times, and what the allocator keeps; a whole layer is more."""
    for most, kept, rest in fresh(2).run(models.peak, large, form):
        assert most < kept + rest + (28 << 20), (most >> 20, kept >> 20, rest >> 20)


def test_generate_under_torchrun():
    """The text of one process, once, from rank 0."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "moestro"]
    options = ["--no-do-sample", "--dtype", "float32", "--max-new-tokens", "8", "--ep", "2", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, "generate", PROMPT, *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    alone = generate(load_text_model(dtype="float32"), PROMPT, Sampling(max_new_tokens=8, do_sample=False))
    assert json.loads(done.stdout)["text"] == alone.text


def test_a_mesh_needs_a_job(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, ["generate", PROMPT, "--ep", "2"])
    assert result.exit_code == 2
    assert "[make_mesh] got dp=1, ep=2, tp=1 in a process that belongs to no job" in result.stderr
