from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import moestro
from moestro import hf
from moestro.bench import LAYERS, PEERS, make_layer, ours
from moestro.bench.layers import expected_output, inputs
from moestro.bench.peers import named_peers
from moestro.bench.peers.transformers_experts import transformers_module
from moestro.errors import InvalidInputError, UnsupportedError
from moestro.tolerances import disagreement, relative_error, too_far


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_every_variant_computes_the_layer(tiny, name: str, dtype: torch.dtype) -> None:
    layer = make_layer(tiny(name), dtype, 6)
    dense = [peer for peer in PEERS.values() if peer.numbers.bits is None]
    variants = [*dense, *(ours(s) for s in ("auto", "grouped", "selective", "all_experts", "blockwise-4"))]
    ran = []
    with torch.inference_mode():
        for num_tokens in (1, 5):
            x, routings = inputs(layer, num_tokens, count=2)
            for variant in variants:
                if (
                    variant.refuses(layer.spec, dtype) is None
                    and variant.device is None
                    and variant.numbers.bits is None
                ):
                    output = variant.prepare(layer)(x, routings[-1])()
                    assert disagreement(output, expected_output(layer, x, routings[-1]), dtype) is None, variant.name
                    ran.append(variant.name)
    assert len(set(ran)) == (7 if name == "llama4-scout" else 9)


@pytest.mark.parametrize("name", LAYERS)
def test_transformers_works_on_the_same_tensors(tiny, name: str) -> None:
    layer = make_layer(tiny(name), torch.float32, 6)
    module = transformers_module(layer, "eager", layer.stored)
    parameters = {n.split(".")[-1]: p for n, p in module.named_parameters() if not p.is_meta}
    assert parameters["gate_up_proj"].data_ptr() == layer.stored.gate_up.data_ptr()
    assert parameters["down_proj"].data_ptr() == layer.stored.down.data_ptr()
    assert len(parameters) == (4 if layer.spec.bias else 2)


@pytest.mark.parametrize("name", LAYERS)
def test_ours_is_the_accelerated_module(tiny, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(tiny(name), torch.float32, 6)
    x, routings = inputs(layer, 3, count=1)
    accelerated: list[tuple[torch.nn.Module, str]] = []
    calls: list[torch.nn.Module] = []
    accelerate = moestro.accelerate
    monkeypatch.setitem(
        vars(moestro), "accelerate", lambda m, strategy: accelerated.append((m, strategy)) or accelerate(m, strategy)
    )
    with torch.inference_mode():
        bind = ours("grouped").prepare(layer)
        [(module, strategy)] = accelerated
        module.register_forward_hook(lambda module, args, output: calls.append(module))
        bind(x, routings[0])()
    assert strategy == "grouped"
    assert calls == [module]
    [found] = hf.served(module)
    assert (found.strategy, found.layout) == ("grouped", "K-contiguous")
    tensors = {n.split(".")[-1]: p for n, p in module.named_parameters() if not p.is_meta}
    assert tensors["gate_up_proj"].data_ptr() == layer.weights.gate_up.data.data_ptr()
    assert tensors["down_proj"].data_ptr() == layer.weights.down.data.data_ptr()
    assert type(module).__module__.startswith("transformers.")


def test_three_implementations_are_three_functions(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(tiny("olmoe"), torch.float32, 6)
    x, routings = inputs(layer, 3, count=1)
    ran: list[str] = []
    for name in ("batched_mm", "grouped_mm"):
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, name, lambda *args, name=name: ran.append(name) or args[1])
    with torch.inference_mode():
        eager = PEERS["eager"].prepare(layer)(x, routings[0])()
        for name in ("batched_mm", "grouped_mm"):
            assert torch.equal(PEERS[name].prepare(layer)(x, routings[0])(), x)
    assert ran == ["batched_mm", "grouped_mm"]
    assert not torch.equal(eager, x)


def test_reasons_to_refuse() -> None:
    scout = LAYERS["llama4-scout"]
    assert PEERS["grouped_mm"].refuses(scout, torch.float32) == "Transformers has one way to compute Llama 4"
    assert PEERS["eager"].refuses(scout, torch.float32) is None


def test_costs_by_hand(tiny) -> None:
    layer = make_layer(replace(tiny("mixtral"), top_k=2), torch.bfloat16, 6)
    _, routings = inputs(layer, 10, count=1)
    expert = 3 * 24 * 16 * 2
    gathered = PEERS["batched_mm"].cost(layer, routings[0])
    assert gathered.workspace == 20 * expert  # a copy for each of T * K pairs
    assert gathered.nbytes == 3 * 20 * expert
    assert gathered.flops == 20 * 6 * 24 * 16
    scout = make_layer(tiny("llama4-scout"), torch.bfloat16, 6)
    _, routings = inputs(scout, 10, count=1)
    dense = PEERS["eager"].cost(scout, routings[0])
    assert dense.flops == 6 * 10 * 6 * 24 * 16  # every expert on every token
    assert dense.nbytes == 6 * expert
    assert ours("auto").cost(scout, routings[0]).flops == 10 * 6 * 24 * 16


def test_names() -> None:
    assert named_peers(["none"]) == []
    everything = [p.name for p in named_peers(["all"])]
    assert everything[0] == "eager"
    place = everything.index("torch-grouped_mm")
    assert set(everything[1:place]) == set(ALL_EXPERTS_FUNCTIONS) - {"moestro"}
    assert {name.split("-")[0] for name in everything[place:]} == {
        *("torch", "triton_kernels", "transformers", "vllm", "ggml", "ort", "kt", "onednn")
    }
    assert {p.name for p in named_peers(["all"]) if p.device == "cuda"} == {
        *("deepgemm", "sonicmoe", "triton_kernels-bf16", "triton_kernels-mxfp4"),
        *("torch-scaled_grouped_mm", "transformers-fp8"),
    }
    with pytest.raises(InvalidInputError, match="peer 'vllm'; needs one of eager, "):
        named_peers(["eager", "vllm"])
    with pytest.raises(InvalidInputError, match="fastest"):
        ours("fastest")


def test_rows_as_int8_are_rounded_and_checked(tiny) -> None:
    layer = make_layer(replace(tiny("olmoe"), hidden_size=256, intermediate_size=128), torch.float32, 6)
    x, routings = inputs(layer, 5, count=1)
    with torch.inference_mode():
        plain, rounded = ours("auto", "mxfp4"), ours("auto", "mxfp4/int8")
        assert (rounded.numbers.bits, rounded.numbers.products) == (4, "int8")
        assert rounded.name != plain.name
        exact = expected_output(layer, x, routings[0], "mxfp4")
        assert disagreement(plain.prepare(layer)(x, routings[0])(), exact, torch.float32) is None
        output = rounded.prepare(layer)(x, routings[0])()
        assert 1e-3 < relative_error(output, exact) < rounded.numbers.bound
        assert too_far(output, exact, rounded.numbers.bound) is None
        eighths = ours("auto", "fp8-e4m3-b128/fp8-e4m3")
        assert (eighths.numbers.bits, eighths.numbers.products) == (8, "fp8-e4m3")
        exact = expected_output(layer, x, routings[0], "fp8-e4m3-b128")
        output = eighths.prepare(layer)(x, routings[0])()
        assert 1e-3 < relative_error(output, exact) < eighths.numbers.bound
    assert layer.quantized["mxfp4"].input_format == "float"
    with pytest.raises(UnsupportedError, match="int8 inputs"):
        ours("auto", "fp8-e4m3-b128/int8")
    with pytest.raises(InvalidInputError, match="int3"):
        ours("auto", "mxfp4/int3")
