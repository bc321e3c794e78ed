"""Compiling ahead: which jobs a plan makes, that processes do them all or are ended, and what one of them does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpu import goals, precompile
from gpu.precompile import Job
from moestro.bench import LAYERS, PEERS, known_peers, make_layer, ours, records

TOKENS = (1, 16)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> records.Plan:
    monkeypatch.setattr(records, "_is_here", lambda device: True)
    monkeypatch.setattr(precompile.machine, "available_bytes", lambda device: 64e9)
    return replace(goals.default_plan(("deepseek-v3", "olmoe", "gpt-oss-20b"), ("dense", "mxfp4/int8")), tokens=TOKENS)


def test_jobs_are_variants_of_small_layers_and_large_layers_last(plan: records.Plan) -> None:
    kernels = replace(known_peers()["triton_kernels-bf16"], absent=lambda: None)
    not_here = replace(known_peers()["triton_kernels-mxfp4"], absent=lambda: "not here")
    found = precompile.jobs(replace(plan, peers=(PEERS["eager"], kernels, not_here)))
    variants = ("dense", "mxfp4/int8", "triton_kernels-bf16")
    assert found == [
        *(Job("olmoe", (variant,), TOKENS) for variant in variants),
        *(Job("gpt-oss-20b", (variant,), TOKENS) for variant in variants),
        Job("deepseek-v3", variants, TOKENS),
    ]
    assert all(Job.parse(str(job)) == job for job in found)
    assert [ours("auto", name).name for name in variants[:2]] == ["moestro", "moestro-mxfp4/int8"]


WRITES = "import sys, pathlib; [pathlib.Path({!r}, t.replace('/', '_')).touch() for t in sys.argv[2:]]"


def test_all_jobs_are_done(plan: records.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile.os, "cpu_count", lambda: 3)
    said: list[str] = []
    precompile.compile_ahead(plan, 60.0, said.append, (sys.executable, "-c", WRITES.format(str(tmp_path))))
    assert {path.name for path in tmp_path.iterdir()} == {str(job).replace("/", "_") for job in precompile.jobs(plan)}
    [line] = said
    assert line.startswith(f"{len(precompile.jobs(plan))} jobs of compiling, 3 processes, ")
    assert "ended" not in line


def test_what_takes_too_long_is_ended(plan: records.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(precompile.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(precompile.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    said: list[str] = []
    precompile.compile_ahead(plan, 0.2, said.append, (sys.executable, "-c", "import time; time.sleep(60)"))
    assert said[0].endswith("2 processes ended before they were done")
    assert [process.returncode for process in started] == [-9, -9]


def test_a_process_calls_every_variant_with_every_number_of_tokens(
    tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[tuple[str, int]] = []
    spec = replace(tiny("olmoe"), hidden_size=64, intermediate_size=32)

    def watched(variant):
        def prepare(layer):
            bind = variant.prepare(layer)
            return lambda x, routing: lambda: called.append((variant.name, len(x))) or bind(x, routing)()

        return replace(variant, prepare=prepare)

    def broken(layer):
        raise RuntimeError("it does not compile")

    monkeypatch.setattr(precompile, "named", lambda name: spec if name == "olmoe" else LAYERS[name])
    monkeypatch.setattr(precompile, "make_layer", lambda spec, dtype, count, device: make_layer(spec, dtype, 6, device))
    monkeypatch.setattr(precompile, "ours", lambda strategy, name: watched(ours(strategy, name)))
    monkeypatch.setitem(PEERS, "broken", replace(PEERS["eager"], prepare=broken))
    monkeypatch.setitem(PEERS, "eager", watched(PEERS["eager"]))
    monkeypatch.setitem(PEERS, "refusing", replace(PEERS["broken"], refuses=lambda spec, dtype: "not this layer"))
    precompile.main(["cpu", "olmoe dense,broken,mxfp4 1,5", "olmoe refusing 1", "olmoe eager 3", "olmoe int3 1"])
    assert called == [
        *(("moestro", 1), ("moestro", 5), ("moestro-mxfp4", 1), ("moestro-mxfp4", 5)),
        ("eager", 3),
    ]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "olmoe dense,broken,mxfp4 1,5: it does not compile"
    assert said[1].startswith("olmoe int3 1: ")
