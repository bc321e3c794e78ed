"""Calls like one before: what is kept of them holds for their like alone, and costs the host little."""

from __future__ import annotations

import gc
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import moestro
from moestro import Activation, ExpertWeights, Routing, reference
from moestro.formats import dense
from moestro.ops import expert_mlp
from moestro.ops.expert_mlp import triton as engine
from moestro.ops.expert_mlp import triton_known, triton_tuned
from moestro.types import GPT_OSS_SWIGLU
from tolerances import assert_close, bit_equal

from . import problems
from .stored import moved
from .test_expert_mlp_triton_tuning import said

pytest.importorskip("triton")
SIZES = problems.Sizes(3, 32, 32, 4, 2)


@pytest.fixture(autouse=True)
def _forced(triton_device: torch.device) -> None:
    torch.set_default_device(triton_device)
    yield
    torch.set_default_device(None)


def case(form: str = "float32") -> tuple[torch.Tensor, Routing, ExpertWeights]:
    weights = problems.weights(SIZES, GPT_OSS_SWIGLU, torch.float32, bias=True).quantize(form)
    return torch.randn(3, 32), problems.routing(SIZES), weights


def is_known(x: torch.Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> bool:
    return triton_known.find(x, routing, weights, strategy) is not None


def check(x: torch.Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> None:
    y = expert_mlp.run(x, routing, weights, strategy)
    assert_close(y, reference.expert_mlp(x, routing, weights).to(x.dtype), x.dtype)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "mxfp4", "int8"])
@pytest.mark.parametrize("strategy", ["auto", "blockwise-5"])
def test_a_call_like_one_before_computes_of_what_it_is_given(form, strategy):
    x, routing, weights = case(form)
    if form == "int8":
        weights = replace(weights, input_format="int8")
    for invariant in (True, False):
        torch.use_deterministic_algorithms(invariant)
        check(x, routing, weights, strategy)
        assert is_known(x, routing, weights, strategy)
        for kind in problems.KINDS:
            other, x = problems.routing(SIZES, kind=kind), torch.randn(3, 32)
            other = Routing(other.expert_ids.contiguous(), other.routing_weights.contiguous())
            assert is_known(x, other, weights, strategy)
            check(x, other, weights, strategy)


def test_every_fact_of_a_call_tells_it_from_others():
    x, routing, weights = case()
    ids, by = routing.expert_ids, routing.routing_weights
    check(x, routing, weights)
    wide, half = torch.randn(3, 64), torch.randn(3, 32).half()
    others = {
        "dtype": (half, routing),
        "stride": (wide[:, :32], routing),
        "columns apart": (torch.randn(32, 3).T, routing),
        "address": (torch.randn(100)[1:97].view(3, 32), routing),
        "tokens": (x[:2], Routing(ids[:2], by[:2])),
        "slots": (x, Routing(ids[:, :1].contiguous(), by[:, :1].contiguous())),
        "strided slots": (x, Routing(ids.T.contiguous().T, by.T.contiguous().T)),
        "dtype of ids": (x, Routing(ids.int(), by)),
        "weights on the input": (x, replace(routing, weight_on="input")),
        "negative": (torch._neg_view(torch.randn(3, 32)), routing),
    }
    for name, (rows, routed) in others.items():
        assert not is_known(rows, routed, weights), name
        if name != "negative":
            check(rows, routed, weights)
            assert is_known(x, routing, weights), name
    for strategy in ("grouped", "selective", "all_experts"):
        assert not is_known(x, routing, weights, strategy)
    check(x, routing, weights, "all_experts")
    assert not is_known(x, routing, weights, "all_experts")


def test_every_mode_that_decides_tells_calls_apart(monkeypatch):
    x, routing, weights = case()
    check(x, routing, weights)
    torch.use_deterministic_algorithms(False)
    assert not is_known(x, routing, weights)
    torch.use_deterministic_algorithms(True)
    for forced in ({"strategy": "grouped"}, {"implementation": "torch"}):
        with moestro.use(**forced):
            assert not is_known(x, routing, weights)
    assert not is_known(x.clone().requires_grad_(), routing, weights)
    with torch.no_grad():
        assert is_known(x.clone().requires_grad_(), routing, weights)
    with forward_ad.dual_level():
        assert not is_known(x, routing, weights)
    with torch.no_grad():
        assert torch.func.vmap(lambda row: row * is_known(x, routing, weights))(torch.ones(2)).tolist() == [0, 0]
    assert is_known(x, routing, weights)
    monkeypatch.setattr(triton_tuned, "edition", lambda: 1)  # a search has stored plans
    assert not is_known(x, routing, weights)


def test_weights_that_moved_are_looked_at_anew():
    x, routing, weights = case()
    stack = weights.gate_up.data
    changes = {
        "other memory": lambda: setattr(stack, "data", torch.randn_like(stack)),
        "other strides": lambda: setattr(stack, "data", torch.randn(4, 32, 64).transpose(1, 2)),
        "fewer experts": lambda: setattr(stack, "data", stack.data[:2]),
    }
    for name, change in changes.items():
        check(x, routing, weights)
        assert is_known(x, routing, weights)
        change()
        assert not is_known(x, routing, weights), name
        if name != "fewer experts":
            check(x, routing, weights)
    with torch.no_grad():
        weights.down.data.mul_(2)
    stack.data = torch.randn(4, 64, 32)
    check(x, routing, weights)
    stack.data = stack.data.half()
    assert not is_known(x, routing, weights)
    assert "another dtype" in (engine.supports(x, routing, weights) or "")


def test_a_module_that_is_cast_or_loaded_computes_of_what_it_holds():
    layer = moestro.Experts(4, 32, 32, bias=True).requires_grad_(False)
    x, routing, _ = case()
    for change in (
        lambda: None,
        lambda: layer.load_state_dict({k: torch.randn_like(v) / 6 for k, v in layer.state_dict().items()}),
        lambda: layer.load_state_dict({k: v * 2 for k, v in layer.state_dict().items()}, assign=True),
        lambda: layer.bfloat16(),
        lambda: layer.float(),
        lambda: layer.quantize("int8"),
    ):
        change()
        for _ in range(2):
            y = layer.trusted(x, routing)
            assert_close(y, reference.expert_mlp(x, routing, layer.weights).to(x.dtype), x.dtype)
        assert is_known(x, routing, layer.weights)


def test_weights_that_want_a_gradient_are_not_known():
    x, routing, weights = case()
    check(x, routing, weights)
    weights.down.data.requires_grad_()
    assert not is_known(x, routing, weights)
    with torch.no_grad():
        assert is_known(x, routing, weights)


def test_a_bias_with_other_strides_is_read_at_every_call():
    x, routing, weights = case()
    wide = torch.randn(4, 32, 2)
    weights = replace(weights, down_bias=wide[..., 0])
    check(x, routing, weights)
    assert not is_known(x, routing, weights)


def test_nothing_is_kept_of_weights_that_are_gone():
    x, routing, weights = case()
    check(x, routing, weights)
    before = len(triton_known._LAYERS)
    assert is_known(x, routing, weights)
    del weights
    gc.collect()
    assert len(triton_known._LAYERS) < before


def test_no_more_than_so_many_calls_are_kept(monkeypatch):
    monkeypatch.setattr(triton_known, "_MOST_CALLS", 2)
    _, _, weights = case()
    calls = []
    for num_tokens in (1, 2, 3):
        routing = problems.routing(replace(SIZES, num_tokens=num_tokens))
        calls.append((torch.randn(num_tokens, 32), routing, weights))
        check(*calls[-1])
    assert [is_known(*call) for call in calls] == [False, True, True]


def test_copies_of_weights_have_calls_of_their_own():
    x, routing, weights = case()
    check(x, routing, weights)
    other = replace(weights, activation=Activation())
    same = ExpertWeights(dense(weights.gate_up.data), weights.down, weights.gate_up_bias, None, weights.activation)
    for layer in (other, same, moved(weights, x.device)):
        assert not is_known(x, routing, layer)
        check(x, routing, layer)
    assert bit_equal(expert_mlp.run(x, routing, weights), expert_mlp.run(x, routing, weights))


COMPILER = shutil.which("gcc") or shutil.which("cc")


@pytest.mark.skipif(COMPILER is None or torch.cuda.is_available(), reason="a compiled driver stands in for CUDA's")
def test_tritons_launcher_reads_addresses_as_it_reads_tensors(tmp_path: Path) -> None:
    source = Path(__file__).with_name("cuda_stub.c")
    command = [str(COMPILER), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o"]
    subprocess.run([*command, str(tmp_path / "libcuda.so.1")], check=True, capture_output=True)
    (tmp_path / "libcuda.so").symlink_to("libcuda.so.1")
    lines = said(str(tmp_path), module="ops.launched")
    assert len(lines) == 8
    assert all(line.startswith("launched") for line in lines)


MOST_FUNCTIONS = {"expert_mlp": 32, "node": 48, "route": 35, "topk": 27}


def test_a_call_like_one_before_enters_few_functions():
    """Each is a tenth of a microsecond and more, of which a call for one token has some tens."""
    lines = said(module="ops.host_calls")
    assert len(lines) == 16
    for line in lines:
        name, _, found = line.partition(": ")
        assert int(found.split()[0]) <= MOST_FUNCTIONS[name.split()[0]], line
