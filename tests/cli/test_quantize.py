"""`moestro quantize`: the command line around `moestro.checkpoint.quantize`, on models that Transformers made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from typer.testing import CliRunner, Result

import moestro.hf
from moestro.checkpoint import open_checkpoint, quantize
from moestro.checkpoint.quantize import Job, Progress, Report, quantize_checkpoint
from moestro.cli import app
from moestro.cli.progress import bar
from moestro.cli.quantize import _overrides
from moestro.formats import dequantize, find_format
from moestro.formats import quantize as quantize_weight

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
PROMPT = torch.arange(2, 14)[None]


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def sums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def made(folder: Path, model: PreTrainedModel) -> Path:
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=4)
    return made(tmp_path_factory.mktemp("qwen") / "model", Qwen3MoeForCausalLM(config))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = GptOssConfig(**SIZES, num_local_experts=4)
    return made(tmp_path_factory.mktemp("gpt_oss") / "model", GptOssForCausalLM(config))


def rounded(folder: Path, choose: Callable[[str], str]) -> PreTrainedModel:
    """The model in float32 with every expert as its format has it, computed by Transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    for path, module in model.named_modules():
        if not path.endswith("mlp.experts"):
            continue
        for name in ("gate_up_proj", "down_proj"):
            weight = module.get_parameter(name)
            transposed = "GptOss" in type(module).__name__
            stack = weight.detach().mT if transposed else weight.detach()
            packed = quantize_weight(stack.contiguous(), find_format(choose(f"{path}.{name}")))
            weight.data.copy_(dequantize(packed).mT if transposed else dequantize(packed))
    return model


@pytest.mark.parametrize("family", ["qwen", "gpt_oss"])
def test_the_result_loads_and_computes_what_the_formats_say(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(family)
    more = ["--override", "*.layers.0.*=int8", "--override", "*.layers.1.*down_proj=fp8-e4m3-channel", "--checksums"]
    run(source, tmp_path / "dst", "--format", "mxfp4", *more)
    assert open_checkpoint(tmp_path / "dst").verify()

    def choose(target: str) -> str:
        return "int8" if ".0." in target else "mxfp4" if target.endswith("gate_up_proj") else "fp8-e4m3-channel"

    expected = rounded(source, choose)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dst", dtype=torch.float32).eval()
    assert [layer.path for layer in moestro.hf.served(loaded)]
    with torch.no_grad():
        torch.testing.assert_close(loaded(PROMPT).logits, expected(PROMPT).logits, rtol=1e-4, atol=1e-4)


def test_json_and_a_second_run(qwen: Path, tmp_path: Path) -> None:
    arguments = (qwen, tmp_path / "dst", "--format", "int4-g32", "--shard-size", "20KB", "--json")
    first = json.loads(run(*arguments).stdout)
    assert first["formats"] == {"int4-g32": 4}
    assert first["bits_per_weight"] == 4.5
    assert first["num_shards"] == len(list((tmp_path / "dst").glob("*.safetensors"))) > 2
    assert not first["complete_before"]
    before = sums(tmp_path / "dst")
    second = json.loads(run(*arguments).stdout)
    assert second["complete_before"]
    assert sums(tmp_path / "dst") == before


def test_the_table(qwen: Path, tmp_path: Path) -> None:
    arguments = (qwen, tmp_path / "dst", "--format", "mxfp4", "--override", "*down_proj=int8")
    text = run(*arguments).stdout
    for part in (f"{tmp_path / 'dst'} is complete", "2 in int8, 2 in mxfp4", "bits per weight"):
        assert part in text.replace("\n", "")
    assert "nothing was written" in run(*arguments).stdout.replace("\n", "")


def test_search_makes_other_scales(qwen: Path, tmp_path: Path) -> None:
    for search in ("nearest", "mse"):
        run(qwen, tmp_path / search, "--format", "int4-g32", "--search", search)
        config = json.loads((tmp_path / search / "config.json").read_text())
        assert config["quantization_config"]["search"] == search
    near, mse = (open_checkpoint(tmp_path / search) for search in ("nearest", "mse"))
    name = "model.layers.0.mlp.experts.down_proj_scales"
    assert not torch.equal(near.tensor(name), mse.tensor(name))


def test_from_a_quantised_model(qwen: Path, tmp_path: Path) -> None:
    run(qwen, tmp_path / "eight", "--format", "fp8-e4m3-channel")
    run(tmp_path / "eight", tmp_path / "four", "--format", "mxfp4")
    run(tmp_path / "eight", tmp_path / "same", "--format", "fp8-e4m3-channel")
    assert sums(tmp_path / "same")["model.safetensors"] == sums(tmp_path / "eight")["model.safetensors"]
    assert "elements of fewer than its 4 bits" in run(
        tmp_path / "four", tmp_path / "x", "--format", "int4-g32", code=2
    ).stderr.replace("\n", " ")
    AutoModelForCausalLM.from_pretrained(tmp_path / "four")


def test_interrupted_and_continued(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (qwen, tmp_path / "dst", "--format", "mxfp4", "--shard-size", "20KB")
    run(qwen, tmp_path / "whole", *arguments[2:])

    def interrupted(job: Job, on_progress: Any = None) -> Report:
        def stop(progress: Progress) -> None:
            if progress.shard > 3:
                raise KeyboardInterrupt

        return quantize_checkpoint(job, stop)

    with monkeypatch.context() as patched:
        patched.setattr(quantize, "quantize_checkpoint", interrupted)
        result = run(*arguments, code=130)
    assert f"{tmp_path / 'dst'}.partial; the same command continues it" in result.stderr
    assert "3 of them by an earlier run" in run(*arguments).stdout
    assert sums(tmp_path / "dst") == sums(tmp_path / "whole")


def test_the_bar_starts_where_an_earlier_run_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with bar("", in_bytes=True) as update:
        update("file 1 of 3", 5_000_000, 8_000_000)
        update("file 2 of 3", 6_000_000, 8_000_000)
    shown = capsys.readouterr()
    assert "file 2 of 3" in shown.err
    assert "6.0/8.0 MB" in shown.err
    assert shown.out == ""
    with bar("", shown=False) as update:
        update("file 1 of 3", 5_000_000, 8_000_000)
    assert capsys.readouterr().err == ""


def test_the_last_override_decides() -> None:
    found = _overrides(["*a=int8", "*b=mxfp4", "*a=bf16", "x=y=nvfp4"])
    assert list(found.items()) == [("*b", "mxfp4"), ("*a", "bf16"), ("x=y", "nvfp4")]


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (["--format", "mxfp5"], "mxfp5"),
        (["--format", "mxfp4", "--override", "int8"], "override 'int8'"),
        (["--format", "mxfp4", "--override", "*gate.weight=int8"], "mlp.gate.weight"),
        (["--format", "mxfp4", "--override", "*=x"], "'x'"),
        (["--format", "int4-g128"], "multiple of 128"),
        (["--format", "mxfp4", "--search", "best"], "'best'"),
        (["--format", "mxfp4", "--shard-size", "0GB"], "'0GB'"),
        (["--format", "mxfp4", "--shard-size", "big"], "'big'"),
    ],
)
def test_refused(qwen: Path, tmp_path: Path, more: list[str], found: str) -> None:
    result = run(qwen, tmp_path / "dst", *more, code=2)
    assert found in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "fault", ["absent", "empty", "no weights", "dense", "unknown", "cut", "other shapes", "wrong type"]
)
def test_a_source_that_cannot_be_read(fault: str, broken: Callable[[str], str], tmp_path: Path) -> None:
    folder = broken(fault)
    result = run(folder, tmp_path / "dst", "--format", "int8", code=2)
    assert len(result.stderr.splitlines()) == 1
    assert folder in result.stderr or fault == "dense"
    assert not (tmp_path / "dst").exists()
    assert not (tmp_path / "dst.partial").exists()


def test_the_source_is_no_destination(qwen: Path) -> None:
    assert "is the source" in run(qwen, qwen, "--format", "mxfp4", code=2).stderr
