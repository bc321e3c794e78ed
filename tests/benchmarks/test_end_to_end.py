"""Whole models against each other: GGUF files undone by hand, who cannot run and why, turns, floors, and the page."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import make_checkpoint as mc
import moestro
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.formats import dequantize, quantize
from moestro.settings import BENCH_PEERS_VARIABLE
from moestro.tolerances import LOW_PRECISION_INPUT
from peers import installed
from peers.bounds import OTHER_WEIGHTS, WHOLE_MODEL, whole_model
from source import ROOT
from tolerances import assert_close

sys.path.append(str(ROOT / "benchmarks"))

import end_to_end
import engines
import gguf_model
from engines import Job, Turn

IDS = [5, 7, 90, 33, 21, 250, 8, 100, 101, 17]
RIGHT = end_to_end.Right(np.array([[1.0, 2.0]], dtype=np.float32), "mxfp4", 8)
E2M1 = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
LIKE = {"gpt-oss-20b": None, "qwen3-30b-a3b": "mxfp4"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints whose experts are in MXFP4, as published and as moestro stores them."""
    root = tmp_path_factory.mktemp("whole")
    for like, name in LIKE.items():
        mc.write(mc.plan(mc.Request(like, tiny=True, format=name)), root / like)
    return {like: root / like for like in LIKE}


def entries(folder: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape and bytes of every tensor, by safetensors itself."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                found[name] = tuple(tensor.shape), tensor.nbytes
    return found


def test_mxfp4_as_ggml_reads_it() -> None:
    """17 bytes for 32 weights: the exponent, then byte j with weight j below and weight j + 16 above."""
    packed = quantize(torch.randn(6, 96) * torch.tensor([1e-30, 1e-3, 1.0, 7.0, 1e20, 0.0])[:, None], "mxfp4")
    blocks = gguf_model.mxfp4_blocks(packed).view(6, 3, 17)
    values = torch.zeros(6, 3, 32, dtype=torch.float64)
    for j in range(16):
        for half in range(2):
            codes = (blocks[..., 1 + j] >> 4 * half) & 15
            values[..., j + 16 * half] = torch.tensor(E2M1, dtype=torch.float64)[codes.long()]
    values *= torch.exp2(blocks[..., :1].double() - 127)
    assert torch.equal(values.view(6, 96).float(), dequantize(packed))


@pytest.mark.parametrize("like", LIKE)
def test_the_bytes_of_a_token(folders: dict[str, Path], like: str) -> None:
    config = json.loads((folders[like] / "config.json").read_text())
    experts = config.get("num_local_experts") or config["num_experts"]
    share = config["num_experts_per_tok"] / experts
    stored = plain = whole = 0.0
    for name, (shape, nbytes) in entries(folders[like]).items():
        elements = int(np.prod(shape)) * (2 if name.endswith(("_blocks", "_data")) else 1)
        wide = 0 if name.endswith("_scales") else 2 * elements
        if name == "model.embed_tokens.weight":
            part = 1 / shape[0]
        else:
            part = share if ".experts." in name else 1.0
        stored, plain, whole = stored + part * nbytes, plain + part * wide, whole + wide
    model = end_to_end.describe(folders[like])
    assert (model.format, model.folder) == ("mxfp4", folders[like])
    assert model.read_bytes == pytest.approx(stored)
    assert model.plain_read_bytes == pytest.approx(plain)
    assert model.plain_bytes == pytest.approx(whole)


def test_engines_by_name() -> None:
    assert end_to_end.storage_of("llama.cpp-q4_0") == gguf_model.Storage("q4_0", "bf16")
    assert end_to_end.storage_of("llama.cpp-mxfp4-q8_0") == gguf_model.Storage("mxfp4", "q8_0")
    for wrong in ("llama.cpp", "llama.cpp-q5", "llama.cpp-q4_0-q5", "transformers", "transformers-fast", "ollama"):
        with pytest.raises(InvalidInputError, match="one of moestro, moestro-projections"):
            end_to_end.storage_of(wrong)


def test_who_cannot_run_says_why(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BENCH_PEERS_VARIABLE, raising=False)
    models = {like: end_to_end.describe(folder) for like, folder in folders.items()}
    names = ["moestro", "llama.cpp-mxfp4", "transformers-eager"]
    ours, llama, other = end_to_end.plan(names, models["qwen3-30b-a3b"], None)
    assert (ours.status, ours.reason, ours.experts) == ("ok", None, "mxfp4")
    assert llama.status == other.status == "not run"
    assert "install_peers.py" in llama.reason
    assert "--plain" in other.reason
    assert [row.status for row in end_to_end.plan(names, models["gpt-oss-20b"], None)] == ["ok", "not run", "ok"]
    named = end_to_end.plan(names, models["qwen3-30b-a3b"], models["gpt-oss-20b"])[2]
    assert (named.status, named.bytes_per_token) == ("ok", models["gpt-oss-20b"].plain_read_bytes)
    monkeypatch.setattr("moestro.machine.available_bytes", lambda: 1000)
    assert "in bfloat16" in end_to_end.plan(names, models["gpt-oss-20b"], None)[2].reason


def turn(seconds: float, ids: list[int]) -> Turn:
    steps = [[seconds] * 3, [seconds] * 3]
    return Turn(1.0, [0.5, 0.5], steps, [[token] for token in ids], [], 2 * 10**9, 10**9)


def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known_roof: object) -> tuple[list, list[str], float]:
    """Four engines over three rounds: one of half the speed, one that fails at once, one with other logits."""
    rows = [end_to_end.Row(name, "mxfp4", "bfloat16", 2e9) for name in ("a", "slow", "broken", "wrong")]
    logits = {"a": [1.0, 2.0], "slow": [1.0, 2.02], "wrong": [-1.0, -2.0]}
    jobs = {row.engine: Job(row.engine, "", [IDS], 4, 2, 1, str(tmp_path / f"{row.engine}.npy")) for row in rows}
    asked: list[str] = []

    def take(job: Job) -> tuple[Turn | None, str | None]:
        asked.append(job.engine)
        if job.engine == "broken":
            return None, "exit code -4"
        np.save(job.logits, np.array([logits[job.engine]], dtype=np.float32))
        return turn(0.8 if job.engine == "slow" else 0.4, [1, 2, 3, 9 if job.engine == "slow" else 4]), None

    monkeypatch.setattr(end_to_end, "take_turn", take)
    bandwidth = end_to_end.measure(rows, jobs, 3)
    end_to_end.conclude(rows, jobs, bandwidth, RIGHT)
    return rows, asked, bandwidth


def test_turns_alternate_and_floors_follow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known_roof: object) -> None:
    rows, asked, bandwidth = measured(monkeypatch, tmp_path, known_roof)
    assert asked == ["a", "slow", "broken", "wrong", "wrong", "slow", "a", "a", "slow", "wrong"]
    assert bandwidth == 1e10
    first, slow, broken, wrong = rows
    assert first.tokens_per_second == pytest.approx(2.5)
    assert first.of_floor == pytest.approx(2.0)  # 2 GB at 10 GB/s are 5 tokens/s
    assert (first.ratio, first.logits_error, first.prompt_tokens_per_second) == (None, 0.0, 20.0)
    assert (slow.tokens_per_second, slow.of_floor, slow.ratio) == pytest.approx((1.25, 4.0, 2.0))
    assert slow.prompt_ratio == 1.0
    assert slow.logits_error == pytest.approx(0.02 / 5**0.5, rel=1e-3)
    assert slow.same_tokens == 3
    assert (broken.status, broken.reason, broken.tokens_per_second) == ("failed", "exit code -4", None)
    assert (wrong.status, wrong.ratio) == ("wrong output", None)
    assert f"over {WHOLE_MODEL}" in wrong.reason


def test_the_bandwidth_is_that_of_the_weights(monkeypatch: pytest.MonkeyPatch, known_roof: object) -> None:
    rows = [end_to_end.Row("moestro", "mxfp4", "bfloat16"), end_to_end.Row("llama.cpp-mxfp4", "mxfp4", "bf16")]
    rates = {"moestro": [3e9, 5e9], "llama.cpp-mxfp4": []}

    def take(job: Job) -> tuple[Turn, None]:
        return dataclasses.replace(turn(0.4, [1, 2, 3, 4]), read_rates=rates[job.engine]), None

    monkeypatch.setattr(end_to_end, "take_turn", take)
    jobs = {row.engine: Job(row.engine, "", [IDS], 4) for row in rows}
    assert end_to_end.measure(rows, jobs, 3) == 4e9


def test_several_sequences_have_their_tokens_counted_and_no_floor(tmp_path: Path) -> None:
    rows = [end_to_end.Row(name, "mxfp4", "bfloat16", 2e9) for name in ("a", "b")]
    jobs = {row.engine: Job(row.engine, "", [IDS] * 4, 4, 2, 1, str(tmp_path / f"{row.engine}.npy")) for row in rows}
    for row, tokens in zip(rows, ([[1] * 4, [2] * 4], [[1] * 4, [2, 2, 2, 3]]), strict=True):
        row.turns = [Turn(1.0, [0.5], [[0.5] * 2], tokens)]
        np.save(jobs[row.engine].logits, RIGHT.logits)
    end_to_end.conclude(rows, jobs, 1e10, RIGHT)
    assert [(row.tokens_per_second, row.of_floor, row.prompt_tokens_per_second) for row in rows] == [
        (8.0, None, 80)
    ] * 2
    assert rows[1].same_tokens == 1


def test_the_bound_grows_with_roundings_of_the_stream() -> None:
    """A stream of normal numbers to which small ones are added, in bfloat16: within the bound, and not by far."""
    torch.manual_seed(0)
    for layers in (24, 48):
        parts = 0.05 * torch.randn(2 * layers, 100_000)
        start = torch.randn(100_000).bfloat16().float()
        exact, rounded = start.clone(), start.bfloat16()
        for part in parts:
            exact, rounded = exact + part, (rounded.float() + part).bfloat16()
        error = float((rounded - exact).norm() / exact.norm())
        bound = whole_model(layers, "bfloat16")
        assert bound / 4 < error < bound
        assert whole_model(layers, "float32") == WHOLE_MODEL
    assert whole_model(4, "bfloat16") == WHOLE_MODEL


def test_a_reference_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"moestro-float32, which failed: .*needs its logits"):
        end_to_end.reference(Job(engines.REFERENCE, str(tmp_path / "nothing"), [IDS], 0, 0))


def test_other_weights_have_a_wider_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known_roof: object) -> None:
    logits = {"a": [1.0, 2.0], "near": [1.0, 2.1], "rounded": [1.0, 2.1], "bf16": [1.0, 2.1], "wrong": [1.0, 2.3]}
    rests = {"rounded": "int8", "bf16": "bf16", "wrong": "int8"}
    rows = [end_to_end.Row(name, "mxfp4", rests.get(name, "bfloat16"), 2e9) for name in logits]
    jobs = {row.engine: Job(row.engine, "", [IDS], 4, 2, 1, str(tmp_path / f"{row.engine}.npy")) for row in rows}
    for row in rows:
        row.turns = [turn(0.4, [1, 2, 3, 4])]
        np.save(jobs[row.engine].logits, np.array([logits[row.engine]], dtype=np.float32))
    end_to_end.conclude(rows, jobs, 1e10, RIGHT)
    wrong = {row.engine: row.reason for row in rows if row.status == "wrong output"}
    assert wrong.keys() == {"near", "bf16", "wrong"}
    assert f"over {OTHER_WEIGHTS}" in wrong["wrong"]


def test_projections_in_eight_bits_read_less(folders: dict[str, Path]) -> None:
    model = end_to_end.describe(folders["gpt-oss-20b"])
    linear = sum(
        nbytes
        for name, (_, nbytes) in entries(folders["gpt-oss-20b"]).items()
        if name.endswith(("_proj.weight", "lm_head.weight"))
    )
    assert model.projection_bytes == linear
    plain, stored = end_to_end.plan(["moestro-projections", "moestro-projections-int8"], model, None)
    assert (plain.rest, stored.rest) == ("bfloat16", "int8")
    assert stored.bytes_per_token == pytest.approx(plain.bytes_per_token - linear / 2)


def test_the_command_names_no_folder_of_this_machine() -> None:
    options = argparse.Namespace(folder=Path("/a/model"), plain=None)
    given = ["/a/model", "--work", "/b", "--prompt", "512", "--results", "/c"]
    assert end_to_end.command(options, given) == "python benchmarks/end_to_end.py FOLDER --prompt 512"


def test_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known_roof: object) -> None:
    rows, _, bandwidth = measured(monkeypatch, tmp_path, known_roof)
    about = {
        "date": "2026-01-01",
        "command": "x",
        "machine": {"processor": "p", "threads": 2, "memory_bytes": 2**30, "features": ["avx2"], "device": "cpu"},
        "versions": {"torch": "1"},
        "model": {"kind": "gpt_oss"},
        "job": {"prompt_tokens": 17, "sequences": 1, "new_tokens": 32, "repeats": 2, "rounds": 3, "threads": 2},
        "bandwidth": bandwidth,
    }
    text = end_to_end.page(rows, about)
    head, rule, *lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in (head, rule, *lines)} == {15}
    assert "time / a's" in head
    assert lines[1].startswith(
        "| slow | mxfp4 | bfloat16 | 2.00 | 5.0 | 1.25 (1.25-1.25) | 4.00 | 2.00x | 20.0 | 1.00x |"
    )
    assert "- broken: failed: exit code -4" in text
    assert "10.0 GB/s" in text
    json.dumps([dataclasses.asdict(row) for row in rows])


def test_engines_of_python_do_the_same(folders: dict[str, Path], tmp_path: Path) -> None:
    turns = {}
    for engine in ("moestro", "moestro-projections", "transformers-eager"):
        file = str(tmp_path / f"{engine}.npy")
        turns[engine] = engines.take_turn(Job(engine, str(folders["gpt-oss-20b"]), [IDS, IDS[::-1]], 3, 2, 1, file))
        assert [len(steps) for steps in turns[engine].step_seconds] == [2, 2]
        assert len(turns[engine].prompt_seconds) == 2
        assert [len(tokens) for tokens in turns[engine].ids] == [2, 2, 2]
        assert len(turns[engine].read_rates) == 2
        assert turns[engine].resident_bytes >= turns[engine].anonymous_bytes > 0
    first, second, third = (torch.from_numpy(np.load(tmp_path / f"{engine}.npy")) for engine in turns)
    assert first.shape[0] == 2
    for other in (second, third):
        assert float((other - first).norm() / first.norm()) < LOW_PRECISION_INPUT


def test_a_turn_in_a_process_of_its_own_that_fails(tmp_path: Path) -> None:
    found, problem = end_to_end.take_turn(Job("moestro", str(tmp_path / "nothing"), [IDS], 3))
    assert found is None
    assert "where there is no folder" in problem


ABSENT = installed.missing("llama.cpp", "llama/llama_cpp")


@pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
@pytest.mark.parametrize("like", LIKE)
def test_llama_cpp_computes_the_same_model(folders: dict[str, Path], like: str, tmp_path: Path) -> None:
    model, prompts = moestro.load(folders[like], dtype="float32"), [IDS, IDS[::-1]]
    with torch.no_grad():
        expected = model(torch.tensor(prompts)).logits[:, -1]
    for storage in (gguf_model.Storage("f32", "f32"), gguf_model.Storage("mxfp4", "bf16")):
        file, logits = tmp_path / f"{storage.experts}.gguf", str(tmp_path / "logits.npy")
        gguf_model.write_gguf(folders[like], file, storage)
        found, problem = end_to_end.take_turn(Job("llama.cpp", str(file), prompts, 3, 1, 1, logits))
        assert problem is None
        assert [len(tokens) for tokens in found.ids] == [2, 2, 2]
        actual = torch.from_numpy(np.load(logits))
        if storage.experts == "f32":
            assert_close(actual, expected, torch.bfloat16)  # keys and values are kept in float16
        else:  # rows are rounded to int8
            assert float((actual - expected).norm() / expected.norm()) < LOW_PRECISION_INPUT
            assert gguf_model.read_bytes(file) == pytest.approx(end_to_end.describe(folders[like]).read_bytes, rel=0.1)
