"""Peers of the GPU's benchmark, without a GPU: what they ask of their libraries, and the numbers that come of it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import like_triton_kernels
from moestro.bench import LAYERS, known_peers, make_layer
from moestro.bench.layers import LayerSpec, expected_output, inputs
from moestro.settings import BENCH_PEERS_VARIABLE
from moestro.tolerances import disagreement, too_far
from peers import fp8, installed, triton_kernels

PEERS = known_peers()


def spec_like(name: str) -> LayerSpec:
    return replace(LAYERS[name], hidden_size=64, intermediate_size=96, num_experts=8, top_k=2)


@pytest.fixture
def peers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of peers; what was imported out of it is forgotten."""
    monkeypatch.setenv(BENCH_PEERS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    like_triton_kernels.CALLS.clear()
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "triton_kernels"]:
        del sys.modules[name]


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("layer_name", ["olmoe", "gpt-oss-20b"])
@pytest.mark.parametrize("peer_name", ["triton_kernels-bf16", "triton_kernels-mxfp4"])
@pytest.mark.parametrize("version", like_triton_kernels.VERSIONS)
@needs_triton
def test_every_interface_of_triton_kernels_computes_the_layer(
    version: str, peer_name: str, layer_name: str, peers_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like_triton_kernels.write(peers_folder / "triton_kernels", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    peer, spec = PEERS[peer_name], spec_like(layer_name)
    assert peer.absent() is None
    layer = make_layer(spec, torch.bfloat16, spec.num_experts)
    own = "dense" if peer_name.endswith("bf16") else "mxfp4"
    with torch.inference_mode():
        bind = peer.prepare(layer)
        for num_tokens in (1, 5, 40):
            x, routings = inputs(layer, num_tokens, count=2)
            for routing in routings:
                output = bind(x, routing)()
                assert disagreement(output, expected_output(layer, x, routing, own), torch.bfloat16) is None
    asked = like_triton_kernels.CALLS
    constraints = [value for name, value in asked if name == "constraints"]
    assert constraints == ([None] if own == "dense" else [None, {"split_k": 1}])
    fused = next(value for name, value in asked if name == "activation")
    assert fused.fn_args == ((1.702, 7.0) if layer_name == "gpt-oss-20b" else (1.0, None))
    assert (fused if version == "3.5" else fused.specs).reduction_n == 2
    assert [name for name, _ in asked].count("layout") == (0 if own == "dense" else 4)


@needs_triton
def test_a_name_that_is_not_openais_triton_kernels(peers_folder: Path) -> None:
    for name in ("triton_kernels-bf16", "triton_kernels-mxfp4"):
        assert "triton_kernels is not installed: run `python benchmarks/install_peers.py" in PEERS[name].absent()
    other = peers_folder / "triton_kernels" / "triton_kernels"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    (other / "add_vectors.py").touch()
    importlib.invalidate_caches()
    assert PEERS["triton_kernels-bf16"].absent() == (
        f"the triton_kernels in {other} is another package of that name, without a matmul"
    )


def test_scales_of_packed_weights_are_padded_to_whole_steps(peers_folder: Path) -> None:
    like_triton_kernels.write(peers_folder / "triton_kernels", "3.6")
    layer = make_layer(spec_like("olmoe"), torch.bfloat16, 4)
    values, scales = triton_kernels._mxfp4(layer.in_format("mxfp4").gate_up)
    assert values.data.shape == (4, 32, 192)
    assert scales.data.shape == (4, 4, 192)  # 64 columns are 2 groups
    assert (scales.data[:, 2:] == 0).all()


@pytest.mark.parametrize(
    ("name", "changes", "dtype", "sentence"),
    [
        ("triton_kernels-bf16", {}, torch.float16, "timed on bfloat16"),
        ("triton_kernels-mxfp4", {"top_k": 6}, torch.bfloat16, "powers of two"),
        ("triton_kernels-mxfp4", {"weight_on": "input"}, torch.bfloat16, "not inputs"),
        ("torch-scaled_grouped_mm", {"hidden_size": 40}, torch.bfloat16, "multiples of 16"),
        ("torch-scaled_grouped_mm", {}, torch.float32, "results are bfloat16"),
        ("transformers-fp8", {"bias": True}, torch.bfloat16, "no biases"),
        ("transformers-fp8", {"intermediate_size": 192}, torch.bfloat16, "multiples of 128"),
        ("transformers-fp8", {"weight_on": "input"}, torch.bfloat16, "not inputs"),
    ],
)
def test_what_a_peer_of_a_gpu_refuses(name: str, changes: dict, dtype: torch.dtype, sentence: str) -> None:
    spec = LAYERS["qwen3-30b-a3b"]
    assert PEERS[name].refuses(spec, torch.bfloat16) is None
    assert PEERS[name].device == "cuda"
    assert sentence in PEERS[name].refuses(replace(spec, **changes), dtype)


def scaled_grouped_mm(
    rows: Tensor, weights: Tensor, of_rows: Tensor, of_weights: Tensor, offs: Tensor, out_dtype, use_fast_accum: bool
) -> Tensor:
    """What PyTorch's kernel asks of its arguments on a GPU, and computes."""
    assert rows.dtype == weights.dtype == torch.float8_e4m3fn
    assert of_rows.dtype == of_weights.dtype == torch.float32
    assert offs.dtype == torch.int32
    assert rows.is_contiguous()
    assert weights.transpose(1, 2).is_contiguous()
    assert of_rows.shape == rows.shape[:1]
    assert of_weights.is_contiguous()
    assert of_weights.shape == (weights.shape[0], weights.shape[2])
    assert out_dtype == torch.bfloat16
    assert use_fast_accum
    experts = torch.searchsorted(offs, torch.arange(len(rows)), right=True)
    found = torch.einsum("rk,rkn->rn", rows.float(), weights.float()[experts])
    return (found * of_rows[:, None] * of_weights[experts]).to(out_dtype)


@pytest.mark.parametrize("layer_name", ["olmoe", "gpt-oss-20b", "llama4-scout"])
def test_the_layer_on_pytorchs_scaled_grouped_matmul(layer_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    peer, spec = PEERS["torch-scaled_grouped_mm"], spec_like(layer_name)
    layer = make_layer(spec, torch.bfloat16, spec.num_experts)
    with torch.inference_mode():
        bind = peer.prepare(layer)
        for num_tokens in (1, 40):
            x, [routing] = inputs(layer, num_tokens, count=1)
            expected = expected_output(layer, x, routing, "fp8-e4m3-channel")
            assert too_far(bind(x, routing)(), expected, peer.numbers.bound) is None


def test_rows_in_fp8() -> None:
    rows = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [3e4, 1.0, -3e4]]).bfloat16()
    codes, scales = fp8.rows_in_fp8(rows)
    assert codes.float().abs().amax(1).tolist() == [448.0, 0.0, 448.0]
    assert torch.allclose(codes.float() * scales[:, None], rows.float(), rtol=2**-4, atol=2**-9 * 3e4 / 448)


def test_transformers_fp8_experts_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    find = importlib.util.find_spec
    without = lambda name, *rest: None if name == "kernels" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert "kernels-community/finegrained-fp8" in PEERS["transformers-fp8"].absent()
    without = lambda name, *rest: None if name == "transformers" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert PEERS["transformers-fp8"].absent() == "transformers is not installed"


def test_transformers_fp8_experts_are_given_our_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the Hub's kernel played by float32 products of what it is handed."""
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(module, "load_finegrained_fp8_kernel"):
        pytest.skip("an older Transformers")
    handed: list[tuple[torch.Size, torch.Size]] = []

    def grouped(rows, weights, scales, offsets, tokens_per_expert, block_size):
        handed.append((weights.shape, scales.shape))
        assert weights.dtype == torch.float8_e4m3fn
        assert tuple(block_size) == (128, 128)
        wide = scales.repeat_interleave(128, 1).repeat_interleave(128, 2) * weights.float()
        experts = torch.searchsorted(offsets, torch.arange(len(rows)), right=True)
        return torch.einsum("rk,rnk->rn", rows.float(), wide[experts]).to(rows.dtype)

    monkeypatch.setattr(module, "load_finegrained_fp8_kernel", lambda: SimpleNamespace(grouped_matmul=grouped))
    spec = replace(spec_like("olmoe"), hidden_size=128, intermediate_size=256)
    layer = make_layer(spec, torch.bfloat16, spec.num_experts)
    x, [routing] = inputs(layer, 7, count=1)
    with torch.inference_mode():
        output = PEERS["transformers-fp8"].prepare(layer)(x, routing)()
    assert handed == [((8, 512, 128), (8, 4, 1)), ((8, 128, 256), (8, 1, 2))]
    assert too_far(output, expected_output(layer, x, routing, "fp8-e4m3-b128"), fp8.LOW_PRECISION_INPUT) is None


def test_modules_of_peers_stand_behind_installed_ones(peers_folder: Path) -> None:
    (peers_folder / "triton_kernels").mkdir()
    (peers_folder / "triton_kernels" / "json.py").write_text("raise RuntimeError")
    found = installed.module("json", "triton_kernels")
    assert isinstance(found, ModuleType)
    assert hasattr(found, "dumps")
