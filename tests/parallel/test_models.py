"""Whole models over processes, by `load` on a mesh and by Transformers' own way, beside one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers.distributed.expert_parallel")

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
    for said in group(2).run(models.saved, wide, tmp_path):
        assert said.startswith("UnsupportedError: [save] got a model whose experts are cut over processes")


def test_accelerate_leaves_experts_cut(group, made):
    folder = made.wide()
    found = group(2).run(models.accelerated_otherwise, folder)
    same([each[:3] for each in found], models.loaded(folder, 0, 0), share=2)
    assert all(each[3] == {"blockwise-8"} for each in found)


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
