"""Quantising a checkpoint: the values, what is copied, and what is refused before a byte is written."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint.files import parts
from checkpoint.quantize_jobs import (
    CONFIG,
    NOT_COPIED,
    OTHERS,
    E,
    H,
    I,
    experts_of,
    make_job,
    make_source,
    many_files,
    refused,
    sums,
)
from moestro.checkpoint import header, open_checkpoint
from moestro.checkpoint.quantize import Job, Progress, quantize_checkpoint
from moestro.checkpoint.resume import RECORD
from moestro.checkpoint.scheme import Scheme
from moestro.errors import InvalidInputError
from moestro.formats import FORMATS, PackedTensor, SplitTensor, StoredExperts, dense, dequantize, find_format, quantize

PARTS = ("data", "scales", "zeros", "global_scales")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source") / "model")


def dense_stack(stored: StoredExperts) -> Tensor:
    experts = [torch.cat([dequantize(b) for b in stored.blocks(e)]) for e in range(stored.shape[0])]
    return torch.stack(experts)


def read_back(folder: Path, target: str, name: str) -> PackedTensor:
    checkpoint = open_checkpoint(folder)
    found = {part: checkpoint.tensor(f"{target}_{part}") for part in PARTS if f"{target}_{part}" in checkpoint}
    return PackedTensor(format=find_format(name), **found)


def same(a: Tensor, b: Tensor) -> bool:
    bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


# What is written


@pytest.mark.parametrize("search", ["nearest", "mse"])
@pytest.mark.parametrize("name", ["mxfp4", "int8", "int4-g32-zp", "fp8-e4m3-b128", "fp4-g32", "nvfp4", "float16"])
def test_experts_are_what_quantize_makes_of_them(source: Path, tmp_path: Path, name: str, search: str) -> None:
    job = make_job(source, tmp_path / "dst", Scheme(name, search=search))
    quantize_checkpoint(job)
    for expert in job.experts:
        expected = quantize(dense_stack(expert.stored), find_format(name), search)
        found = read_back(job.destination, expert.target, name)
        for a, b in zip(found.tensors, expected.tensors, strict=True):
            assert same(a, b), expert.target


def test_all_else_is_copied_byte_for_byte(source: Path, tmp_path: Path) -> None:
    job = make_job(source, tmp_path / "dst", shard_bytes=20_000)
    report = quantize_checkpoint(job)
    checkpoint = open_checkpoint(job.destination)
    assert len(checkpoint.files) == report.num_shards > 2
    replaced = {name for expert in job.experts for name in expert.names}
    kept = set(job.checkpoint.names) - replaced
    made = {f"{expert.target}_{part}" for expert in job.experts for part in ("data", "scales")}
    assert set(checkpoint.names) == kept | made
    assert all(same(checkpoint.tensor(name), job.checkpoint.tensor(name)) for name in kept)
    files = {path for path in sums(job.destination) if not path.endswith(".safetensors")}
    assert files == {*OTHERS, "config.json", "model.safetensors.index.json", RECORD}
    assert all((job.destination / name).read_bytes() == content for name, content in OTHERS.items())
    assert all((source / name).exists() for name, content in NOT_COPIED.items() if content is not None)


def test_one_file_is_what_safetensors_writes(source: Path, tmp_path: Path) -> None:
    job = make_job(source, tmp_path / "dst", Scheme("int4-g32"))
    quantize_checkpoint(job)
    written = job.destination / "model.safetensors"
    save_file(load_file(written), tmp_path / "again", metadata={"format": "pt"})
    assert written.read_bytes() == (tmp_path / "again").read_bytes()


def test_overrides_for_a_layer_and_a_projection(source: Path, tmp_path: Path) -> None:
    overrides = {"*.layers.0.*": "int8", "*down_proj": "bfloat16"}
    job = make_job(source, tmp_path / "dst", Scheme("mxfp4", overrides))
    report = quantize_checkpoint(job)
    assert report.formats == {"bfloat16": 3, "int8": 1, "mxfp4": 2}
    for expert in job.experts:
        down, first = expert.target.endswith("down_proj"), ".layers.0." in expert.target
        name = "bfloat16" if down else "int8" if first else "mxfp4"
        expected = quantize(dense_stack(expert.stored), find_format(name))
        assert same(read_back(job.destination, expert.target, name).data, expected.data)
    config = json.loads((job.destination / "config.json").read_text())
    assert config == {
        **CONFIG,
        "experts_implementation": "moestro",  # without which Transformers alone fills experts with random numbers
        "quantization_config": {
            "quant_method": "moestro",
            "version": 1,
            "format": "mxfp4",
            "search": "nearest",
            "overrides": overrides,
        },
    }


def test_overrides_whose_order_matters_are_written_so_that_it_does_not(source: Path, tmp_path: Path) -> None:
    scheme = Scheme("mxfp4", {"*down_proj": "int8", "*.layers.0.*": "bf16"})
    targets = [expert.target for expert in make_job(source, tmp_path).experts]
    written = scheme.settled(targets).as_config()["overrides"]
    shuffled = Scheme("mxfp4", dict(sorted(written.items())))
    assert [shuffled.format_of(t) for t in targets] == [scheme.format_of(t) for t in targets]
    assert [t for t in targets if scheme.format_of(t).name == "bfloat16"] == targets[:2]


@pytest.mark.parametrize("nested", [False, True])
def test_how_the_rest_is_quantised_is_kept(source: Path, tmp_path: Path, nested: bool) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    copy = shutil.copytree(source, tmp_path / "src")
    given = {"quantization_config": fp8}
    (copy / "config.json").write_text(json.dumps({"text_config": given} if nested else given))
    quantize_checkpoint(make_job(copy, tmp_path / "dst"))
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert config["quantization_config"]["rest"] == fp8
    assert "quantization_config" not in config.get("text_config", {})


def test_the_report(source: Path, tmp_path: Path) -> None:
    job = make_job(source, tmp_path / "dst", shard_bytes=30_000)
    steps: list[Progress] = []
    report = quantize_checkpoint(job, steps.append)
    weights = 3 * E * 3 * I * H
    assert report.expert_bytes_before == 2 * weights
    assert report.bits_per_weight == FORMATS["mxfp4"].bits == 8 * report.expert_bytes_after / weights
    checkpoint = open_checkpoint(job.destination)
    assert (report.num_tensors, report.bytes_after) == (len(checkpoint.names), checkpoint.nbytes)
    assert report.bytes_before == job.checkpoint.nbytes
    assert not report.complete_before
    assert [s.written for s in steps] == sorted(s.written for s in steps)
    assert (steps[0].written, steps[-1].written, steps[-1].shard) == (0, report.bytes_after, report.num_shards)
    assert {s.total for s in steps} == {report.bytes_after}


def test_checksums_catch_a_flipped_bit(source: Path, tmp_path: Path) -> None:
    job = many_files(source, tmp_path / "dst")
    quantize_checkpoint(job)
    checkpoint = open_checkpoint(job.destination)
    assert checkpoint.verify()
    entry = checkpoint.entry(f"{experts_of(1)}.down_proj_data")
    data = bytearray(entry.file.read_bytes())
    data[entry.start + 7] ^= 4
    entry.file.write_bytes(data)
    with pytest.raises(InvalidInputError, match=entry.name):
        open_checkpoint(job.destination).verify()


# From experts that are packed already


def packed_job(source: Path, destination: Path, scheme: Scheme, stored: str, rows: tuple[int, ...] = (I, I)) -> Job:
    """A job whose experts are all stored in a format, some rows of each apart."""
    job = make_job(source, destination, scheme)
    made = []
    for expert in job.experts:
        e, _, k = expert.stored.shape
        blocks = [tuple(quantize(torch.randn(n, k), find_format(stored)) for n in rows) for _ in range(e)]
        made.append(replace(expert, stored=SplitTensor(tuple(blocks))))
    return replace(job, experts=made)


@pytest.mark.parametrize("name", ["bfloat16", "mxfp4"])
def test_packed_experts_become_dense_or_smaller(source: Path, tmp_path: Path, name: str) -> None:
    job = packed_job(source, tmp_path / "dst", Scheme(name), "fp8-e4m3-b128")
    quantize_checkpoint(job)
    for expert in job.experts:
        expected = quantize(dense_stack(expert.stored), find_format(name))
        assert same(read_back(job.destination, expert.target, name).data, expected.data)


@pytest.mark.parametrize(("name", "rows"), [("int4-g32-zp", (I, I)), ("fp8-e4m3-b128", (128, 40)), ("mxfp4", (8, 8))])
def test_the_same_format_is_taken_over_as_it_is(source: Path, tmp_path: Path, name: str, rows: tuple[int, ...]) -> None:
    job = packed_job(source, tmp_path / "dst", Scheme(name), name, rows)
    quantize_checkpoint(job)
    for expert in job.experts:
        found = read_back(job.destination, expert.target, name)
        for e in range(E):
            assert torch.equal(dequantize(found[e]), dense_stack(expert.stored)[e])


@pytest.mark.parametrize(
    ("stored", "name", "needs"),
    [
        ("mxfp4", "int4-g32", "mxfp4 itself, bfloat16, or elements of fewer than its 4 bits"),
        ("fp8-e4m3-b128", "int8", "fp8-e4m3-b128 itself"),
        ("fp8-e4m3-tensor", "fp8-e4m3-tensor", "not cut where they meet"),
        ("fp8-e4m3-b128", "fp8-e4m3-b128", "not cut where they meet"),
    ],
)
def test_rounding_twice_for_nothing_is_refused(
    source: Path, tmp_path: Path, stored: str, name: str, needs: str
) -> None:
    found = refused(packed_job(source, tmp_path / "dst", Scheme(name), stored))
    assert f"{experts_of(0)}.gate_up_proj" in found["got"]
    assert "and 1 more" in found["got"]
    assert needs in found["needs"]


# What is refused


def test_every_projection_that_does_not_fit_is_named(tmp_path: Path) -> None:
    job = make_job(
        make_source(tmp_path / "src", hidden=48), tmp_path / "dst", Scheme("mxfp4", {"*down_proj": "int4-g64"})
    )
    got = refused(job)["got"]
    assert f"{experts_of(0)}.gate_up_proj, {experts_of(1)}.gate_up_proj" in got
    assert "for mxfp4" in got
    assert f"{experts_of(2)}.down_proj" in got
    assert "for int4-g64" in got


def test_an_override_for_nothing(source: Path, tmp_path: Path) -> None:
    job = make_job(source, tmp_path / "dst", Scheme("mxfp4", {"*.layers.0.*": "int8", "*mlp.gate.weight": "int8"}))
    got = refused(job)["got"]
    assert "'*mlp.gate.weight', which matches only model.layers.0.mlp.gate.weight" in got
    job = make_job(source, tmp_path / "dst", Scheme("mxfp4", {"*.layers.7.*": "int8"}))
    assert "'*.layers.7.*', which matches nothing" in refused(job)["got"]


def test_no_experts(source: Path, tmp_path: Path) -> None:
    assert "without experts" in refused(replace(make_job(source, tmp_path / "dst"), experts=[]))["got"]


@pytest.mark.parametrize(
    "make", [lambda: Scheme("mxfp5"), lambda: Scheme("mxfp4", {"*": "x"}), lambda: Scheme("int8", {}, "best")]
)
def test_unknown_names(make: Callable[[], Scheme]) -> None:
    with pytest.raises(InvalidInputError):
        make()


@pytest.mark.parametrize("where", [".", "inside", ".."])
def test_the_source_is_no_destination(source: Path, where: str) -> None:
    assert str(source) in refused(make_job(source, source / where))["got"]


@pytest.mark.parametrize("foreign", ["dst", "dst.partial"])
def test_a_folder_of_other_things_is_left_alone(source: Path, tmp_path: Path, foreign: str) -> None:
    (tmp_path / foreign).mkdir()
    (tmp_path / foreign / "thesis.tex").write_text("x")
    assert f"{tmp_path / foreign}, which exists" in refused(make_job(source, tmp_path / "dst"))["got"]
    assert (tmp_path / foreign / "thesis.tex").read_text() == "x"


def test_a_destination_that_only_looks_begun_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / f"{RECORD}.partial").write_text("x")
    assert f"{tmp_path / 'dst'}, which exists" in refused(make_job(source, tmp_path / "dst"))["got"]


def test_a_name_that_quantised_experts_would_have(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "src")
    name, file = f"{experts_of(0)}.gate_up_proj_scales", "model-00004-of-00003.safetensors"
    save_file({name: torch.zeros(3)}, copy / file)
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = file
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    for job in (make_job(copy, tmp_path / "dst"), many_files(copy, tmp_path / "dst")):
        found = refused(job)
        assert found["operation"] == "quantize"
        assert name in found["got"]


def test_a_file_is_no_destination(source: Path, tmp_path: Path) -> None:
    (tmp_path / "dst").write_text("x")
    assert "a file" in refused(make_job(source, tmp_path / "dst"))["got"]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"a": "\\ud800"}', "[" * 100_000])
def test_no_configuration(source: Path, tmp_path: Path, content: str | None) -> None:
    copy = shutil.copytree(source, tmp_path / "src")
    (copy / "config.json").unlink()
    if content is not None:
        (copy / "config.json").write_text(content)
    found = refused(make_job(copy, tmp_path / "dst"))
    assert found["operation"] == "quantize"
    assert "config.json" in found["got"]


def test_a_configuration_is_read_as_transformers_reads_it(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "src")
    (copy / "config.json").write_text('{"time_step_limit": [0.0, Infinity], "low": NaN, "twice": 1, "twice": 2}')
    quantize_checkpoint(make_job(copy, tmp_path / "dst"))
    text = (tmp_path / "dst" / "config.json").read_text()
    assert "NaN" in text
    config = json.loads(text)
    assert config["time_step_limit"] == [0.0, float("inf")]
    assert config["twice"] == 2


class Unreadable(io.BytesIO):
    """A file on a disk that fails."""

    def read(self, size: int | None = -1) -> bytes:
        raise OSError(5, "Input/output error")


def test_a_file_of_the_source_that_cannot_be_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: Path, mode: str) -> BinaryIO:
        return Unreadable() if path.name == "README.md" else open(path, mode)  # type: ignore[return-value]

    monkeypatch.setattr(header, "open", opened, raising=False)
    with pytest.raises(InvalidInputError) as caught:
        quantize_checkpoint(make_job(source, tmp_path / "dst"))
    assert f"{source / 'README.md'}: Input/output error" in parts(caught.value)["got"]


def test_a_full_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(source, tmp_path / "dst", shard_bytes=30_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    found = refused(job)
    assert "(1000 bytes)" in found["got"]
    needed = int(found["needs"].split("(")[1].split(" ")[0])
    monkeypatch.undo()
    quantize_checkpoint(job)
    others = sum(len(content) for content in OTHERS.values())
    assert needed == sum(p.stat().st_size for p in job.destination.glob("*.safetensors")) + others


def test_a_weight_that_is_not_finite(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "src")
    job = make_job(copy, tmp_path / "dst")
    stack = job.experts[1].stored
    assert isinstance(stack, PackedTensor)
    broken = stack.data.clone()
    broken[1, 2, 3] = float("nan")
    experts = [job.experts[0], replace(job.experts[1], stored=dense(broken)), *job.experts[2:]]
    with pytest.raises(InvalidInputError, match=r"nan at \[2, 3\] of model\.layers\.0\.mlp\.experts\.down_proj\[1\]"):
        quantize_checkpoint(replace(job, experts=experts))
    assert not job.destination.exists()
