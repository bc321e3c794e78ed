"""Peers from outside are found by their folder, and one line says where they are when it is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import install_peers
from moestro.bench import PEERS, known_peers
from moestro.bench.peers import named_peers, outside
from moestro.errors import InvalidInputError
from moestro.settings import BENCH_PEERS_VARIABLE
from source import ROOT


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that lies in no checkout."""
    monkeypatch.setattr(outside, "CHECKOUT", tmp_path / "lib")
    monkeypatch.delenv(BENCH_PEERS_VARIABLE, raising=False)
    return tmp_path


def test_in_a_checkout_they_are_found() -> None:
    assert outside.missing() is None
    assert {"vllm-bf16", "ggml-mxfp4", "ort-f32", "kt-int8", "onednn-int8", "triton_kernels-bf16"} <= set(known_peers())
    assert list(known_peers())[: len(PEERS)] == list(PEERS)


def test_an_installed_package_has_its_own_only(installed: Path) -> None:
    assert known_peers() == PEERS
    assert outside.versions() == {}
    why = outside.missing() or ""
    assert "are in a checkout of moestro" in why
    assert BENCH_PEERS_VARIABLE in why
    assert [peer.name for peer in named_peers(["all"])] == list(PEERS)
    with pytest.raises(InvalidInputError, match=r"got peer 'vllm-bf16'.*in a checkout of moestro"):
        named_peers(["vllm-bf16"])


def test_the_folder_of_peers_leads_to_them(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_peers, "PEERS", {"one": lambda place, scratch: {"one": "1.0"}})
    folder = installed / "filled"
    for _ in range(2):
        assert install_peers.main([str(folder)]) == 0
    assert (folder / "benchmarks").resolve() == ROOT / "benchmarks"
    monkeypatch.setenv(BENCH_PEERS_VARIABLE, str(folder))
    assert outside.missing() is None
    assert "vllm-bf16" in known_peers()
    assert outside.versions() == {"one": "1.0"}


def test_importing_the_benchmark_imports_none_of_them() -> None:
    code = "import sys, moestro.bench, moestro.cli; print('peers' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
