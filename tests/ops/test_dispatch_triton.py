"""Prepared calls of kernels on a GPU: one that is kept computes its like alone, and nothing is kept of gone weights."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import moestro
from moestro import Activation, ExpertWeights, Routing, reference
from moestro.errors import UnsupportedError
from moestro.formats import dense
from moestro.ops import dispatch, expert_mlp, topk
from moestro.ops.expert_mlp import EXPERT_MLP, library
from moestro.ops.topk import TOPK
from moestro.routing import Scoring, route
from moestro.routing.selection import ROUTE
from moestro.types import GPT_OSS_SWIGLU
from tolerances import assert_close, bit_equal

from . import problems
from .launched import compared
from .stored import apart, moved
from .stub import COMPILER, make_stub
from .test_expert_mlp_triton_tuning import said
from .triton_calls import why_unsupported

pytest.importorskip("triton")
SIZES = problems.Sizes(3, 32, 32, 4, 2)


@pytest.fixture(autouse=True)
def _forced(triton_device: torch.device) -> Iterator[None]:
    dispatch._KEPT.clear()
    torch.set_default_device(triton_device)
    yield
    torch.set_default_device(None)


def case(form: str = "float32") -> tuple[torch.Tensor, Routing, ExpertWeights]:
    weights = problems.weights(SIZES, GPT_OSS_SWIGLU, torch.float32, bias=True).quantize(form)
    return torch.randn(3, 32), problems.routing(SIZES), weights


def is_kept(*arguments: Any, operation: dispatch.Operation = EXPERT_MLP) -> bool:
    """Whether a prepared call that is kept will compute this one."""
    before = [kept.prepared for kept in dispatch._KEPT.values()]
    if operation is EXPERT_MLP:
        arguments = (*arguments, *("auto",)[len(arguments) - 3 :])
    return any(dispatch.prepare(operation, *arguments) is prepared for prepared in before)


def check(x: torch.Tensor, routing: Routing, weights: ExpertWeights, strategy: str = "auto") -> None:
    y = expert_mlp.run(x, routing, weights, strategy)
    assert_close(y, reference.expert_mlp(x, routing, weights).to(x.dtype), x.dtype)


@pytest.mark.parametrize(
    ("form", "strategy"),
    [
        *((form, "auto") for form in ("float32", "bfloat16", "mxfp4", "int8", "mxfp4+apart")),
        *((form, "blockwise-5") for form in ("bfloat16", "mxfp4+apart")),
        *((form, "all_experts") for form in ("float32", "int8")),
    ],
)
def test_a_call_like_one_before_computes_of_what_it_is_given(form, strategy):
    x, routing, weights = case(form.removesuffix("+apart"))
    if form == "int8":
        weights = replace(weights, input_format="int8")
    if form.endswith("+apart"):
        weights = apart(weights)
    for invariant in (True, False):
        torch.use_deterministic_algorithms(invariant)
        check(x, routing, weights, strategy)
        assert is_kept(x, routing, weights, strategy)
        for kind in problems.KINDS[invariant::2]:
            other, x = problems.routing(SIZES, kind=kind), torch.randn(3, 32)
            other = Routing(other.expert_ids.contiguous(), other.routing_weights.contiguous())
            assert is_kept(x, other, weights, strategy)
            check(x, other, weights, strategy)
    assert len(dispatch._KEPT) == 2


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
        "address of ids": (x, Routing(torch.cat([ids.new_zeros(1), ids.flatten()])[1:].view(3, 2), by)),
        "weights on the input": (x, replace(routing, weight_on="input")),
    }
    for name, (rows, routed) in others.items():
        assert not is_kept(rows, routed, weights), name
        check(rows, routed, weights)
        assert is_kept(x, routing, weights), name
    for strategy in ("grouped", "selective", "all_experts"):
        assert not is_kept(x, routing, weights, strategy)
        check(x, routing, weights, strategy)


class Other(torch.Tensor):
    """An ordinary tensor's memory under another name."""


def test_a_kept_call_computes_nothing_that_it_cannot():
    """Tensors and modes that kernels refuse are refused however many calls of the same sizes are kept."""
    x, routing, weights = case()
    check(x, routing, weights)
    with torch.no_grad():
        check(x, routing, weights)
    by = routing.routing_weights
    subclassed = ExpertWeights(weights.gate_up, replace(weights.down, data=weights.down.data.as_subclass(Other)))
    refused = {
        "x negative": (torch._neg_view(x), routing, weights),
        "x subclass": (x.as_subclass(Other), routing, weights),
        "routing subclass": (x, Routing.unchecked(routing.expert_ids, by.as_subclass(Other), "output"), weights),
        "weights subclass": (x, routing, subclassed),
        "x gradient": (x.clone().requires_grad_(), routing, weights),
        "routing gradient": (x, Routing(routing.expert_ids, by.clone().requires_grad_()), weights),
    }
    for name, arguments in refused.items():
        with pytest.raises(UnsupportedError, match=name.split()[1]):
            expert_mlp.run(*arguments)
    with torch.no_grad():
        assert is_kept(x.clone().requires_grad_(), routing, weights)
        with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode"):
            expert_mlp.run(x, routing, weights)
        with pytest.raises(UnsupportedError, match="transform"):
            torch.func.vmap(lambda row: row * expert_mlp.run(x, routing, weights).sum())(torch.ones(2))
    weights.down.data.requires_grad_()
    with pytest.raises(UnsupportedError, match="gradient"):
        expert_mlp.run(x, routing, weights)
    with torch.no_grad():
        assert is_kept(x, routing, weights)


def test_every_mode_that_decides_tells_calls_apart():
    x, routing, weights = case()
    check(x, routing, weights)
    torch.use_deterministic_algorithms(False)
    assert not is_kept(x, routing, weights)
    torch.use_deterministic_algorithms(True)
    for forced in ({"strategy": "grouped"}, {"implementation": "torch"}):
        with moestro.use(**forced):
            assert not is_kept(x, routing, weights)
    assert is_kept(x, routing, weights)


def test_weights_that_moved_are_looked_at_anew():
    x, routing, weights = case()
    stack = weights.gate_up.data
    changes = {
        "other memory": lambda: setattr(stack, "data", torch.randn_like(stack)),
        "other strides": lambda: setattr(stack, "data", torch.randn(4, 32, 64).transpose(1, 2)),
        "turned where it lies": lambda: setattr(stack, "data", stack.data.transpose(1, 2).reshape(4, 64, 32)),
        "another bias": lambda: setattr(weights.down_bias, "data", torch.randn(4, 32)),
        "a bias with other strides": lambda: setattr(weights.gate_up_bias, "data", torch.randn(4, 64, 2)[..., 0]),
        "fewer experts": lambda: setattr(stack, "data", stack.data[:2]),
    }
    for name, change in changes.items():
        check(x, routing, weights)
        assert is_kept(x, routing, weights)
        change()
        assert not is_kept(x, routing, weights), name
        if name != "fewer experts":
            check(x, routing, weights)
    with torch.no_grad():
        weights.down.data.mul_(2)
    stack.data = torch.randn(4, 64, 32)
    check(x, routing, weights)
    stack.data = stack.data.half()
    assert "another dtype" in (why_unsupported(x, routing, weights) or "")
    with pytest.raises(UnsupportedError, match="another dtype"):
        expert_mlp.run(x, routing, weights)


def test_a_square_matrix_turned_where_it_lies():
    x, routing, weights = case()
    check(x, routing, weights)
    down = weights.down.data
    down.data = down.data.transpose(1, 2)
    assert not is_kept(x, routing, weights)
    check(x, routing, weights)


def test_weights_in_the_memory_of_others_that_are_gone():
    """The same addresses, layout and sizes, and other numbers; of unstacked experts in another order."""
    for split in (False, True):
        x, routing, first = case()
        first = apart(first) if split else first
        check(x, routing, first)
        memory = [t.data for t in first.tensors]
        turned = [memory[0], *memory[1:8][::-1], *memory[8:]] if split else memory
        second = apart(case()[2]) if split else case()[2]
        for t, where in zip(second.tensors, turned, strict=True):
            where.copy_(t)
            t.data = where
        assert is_kept(x, routing, second) is not split  # what was kept of a stack holds for this one too
        check(x, routing, second)
        del first
        gc.collect()
        check(x, routing, second)


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
            y = layer(x, routing)
            assert_close(y, reference.expert_mlp(x, routing, layer.weights).to(x.dtype), x.dtype)
        assert is_kept(x, routing, layer.weights)


def test_a_bias_with_other_strides_is_read_at_every_call():
    x, routing, weights = case()
    wide = torch.randn(4, 32, 2)
    weights = replace(weights, down_bias=wide[..., 0])
    for _ in range(3):
        check(x, routing, weights)
        wide += 1


@pytest.mark.parametrize("implementation", [None, "triton", "torch", "reference"])
@pytest.mark.parametrize("split", [False, True])
def test_nothing_is_kept_of_weights_that_are_gone(implementation, split):
    """Neither a prepared call nor a tensor, of the weights and of the routing."""
    with moestro.use(implementation=implementation):
        x, routing, weights = case()
        weights = apart(weights) if split else weights
        check(x, routing, weights)
        assert is_kept(x, routing, weights)
        assert len(dispatch._KEPT) == 1
        alive = [weakref.ref(t) for t in (x, routing.expert_ids, routing.routing_weights, *weights.tensors)]
        del weights, x, routing
        gc.collect()
        assert not dispatch._KEPT
        assert not [t for t in alive if t() is not None]


def test_a_kept_call_holds_no_tensor_of_its_routing():
    x, routing, weights = case()
    check(x, routing, weights)
    alive = [weakref.ref(t) for t in (x, routing.expert_ids, routing.routing_weights)]
    del x, routing
    gc.collect()
    assert dispatch._KEPT
    assert not [t for t in alive if t() is not None]


def test_a_node_of_a_graph_uses_the_call_again_that_was_prepared_for_its_tensors():
    x, routing, weights = case("mxfp4")
    layout = f"{library.write_layout(weights.gate_up)}|{library.write_layout(weights.down)}"
    stored = [*weights.gate_up.tensors], [*weights.down.tensors], weights.gate_up_bias, weights.down_bias
    words = "output", weights.activation.code, layout, "auto"
    expected = expert_mlp.run(x, routing, weights)
    made = [kept.prepared for kept in dispatch._KEPT.values()]
    kept = []
    for _ in range(3):
        y = torch.ops.moestro.expert_mlp_on_device(x, routing.expert_ids, routing.routing_weights, *stored, *words)
        assert bit_equal(y, expected)
        kept.append([kept.prepared for kept in dispatch._KEPT.values()])
    assert kept[0] == kept[1] == kept[2]
    assert len(kept[0]) == len(made) + 1  # that of the node
    assert is_kept(x, routing, weights)


def test_no_more_than_so_many_calls_are_kept(monkeypatch):
    monkeypatch.setattr(dispatch, "MOST_KEPT", 2)
    _, _, weights = case()
    calls = []
    for num_tokens in (1, 2, 3):
        routing = problems.routing(replace(SIZES, num_tokens=num_tokens))
        calls.append((torch.randn(num_tokens, 32), routing, weights))
        check(*calls[-1])
    assert len(dispatch._KEPT) == 2
    assert [is_kept(*call) for call in reversed(calls)] == [True, True, False]


def test_copies_of_weights_have_calls_of_their_own():
    x, routing, weights = case()
    check(x, routing, weights)
    other = replace(weights, activation=Activation())
    same = ExpertWeights(dense(weights.gate_up.data), weights.down, weights.gate_up_bias, None, weights.activation)
    for layer in (other, same, moved(weights, x.device), replace(weights, gate_up=dense(weights.gate_up.data.clone()))):
        shares = all(a is b for a, b in zip(layer.tensors, weights.tensors, strict=False))
        alike = shares and layer.activation == weights.activation and len(layer.tensors) == len(weights.tensors)
        assert is_kept(x, routing, layer) is alike
        check(x, routing, layer)
    assert bit_equal(expert_mlp.run(x, routing, weights), expert_mlp.run(x, routing, weights))


def test_unstacked_experts_of_which_one_moved():
    x, _, weights = case()
    routing = Routing(torch.tensor([[0, 1], [2, 3], [1, 2]]), torch.rand(3, 2))
    split = apart(weights)
    for change in (
        lambda t: setattr(t, "data", torch.randn_like(t) / 6),
        lambda t: setattr(t, "data", t.data.T.contiguous().T),
    ):
        for matrix in (split.gate_up.matrices[2][1], split.down.matrices[1][0]):
            check(x, routing, split)
            before = matrix.data.data
            change(matrix.data)
            if matrix.data.is_contiguous():
                assert not is_kept(x, routing, split)
            else:
                with pytest.raises(UnsupportedError, match="one set of strides"):
                    expert_mlp.run(x, routing, split)
                matrix.data.data = before
            check(x, routing, split)


def test_routers_and_top_k_use_a_prepared_call_again():
    logits, scoring = torch.randn(3, 8), Scoring("sigmoid")
    given = logits, 2, scoring, None, None
    route(logits, 2, scoring)
    topk.run(logits, 2)
    assert is_kept(*given, operation=ROUTE)
    assert is_kept(logits, 2, operation=TOPK)
    for other in (torch.randn(4, 8), torch.randn(8, 3).T, torch.randn(3, 16)[:, :8]):
        assert not is_kept(other, *given[1:], operation=ROUTE)
        assert not is_kept(other, 2, operation=TOPK)
        with moestro.use(implementation="torch"):
            expected = route(other, 2, scoring)
        assert torch.equal(route(other, 2, scoring).expert_ids, expected.expert_ids)
    assert not is_kept(logits, 3, scoring, None, None, operation=ROUTE)
    assert not is_kept(logits, 2, replace(scoring, scale=2.0), None, None, operation=ROUTE)
    assert not is_kept(logits, 2, scoring, torch.zeros(8), None, operation=ROUTE)
    assert not is_kept(logits.bfloat16(), 2, operation=TOPK)
    assert is_kept(torch.randn(3, 8), *given[1:], operation=ROUTE)


@pytest.mark.skipif(COMPILER is None or torch.cuda.is_available(), reason="a compiled driver stands in for CUDA's")
def test_tritons_launcher_reads_addresses_as_it_reads_tensors(tmp_path: Path) -> None:
    make_stub(tmp_path)
    lines = said(str(tmp_path), module="ops.launched")
    launched = [line.split() for line in lines if line.startswith("launched")]
    assert len(launched) == 8
    for _, form, num_tokens, launches, values in launched:
        assert int(values) >= 10 * int(launches) > 0, (form, num_tokens)
    maps = {tuple(line.split()[1:4]): int(line.split()[4]) for line in lines if line.startswith("maps")}
    assert not any(count for (form, num_tokens, _), count in maps.items() if num_tokens != "600" and form != "mxfp4")
    # Asked of both products and made at the first call, which is for graphs; asked again, and made at two calls in one.
    assert maps["mxfp4", "1", "0"] == 4 + 6
    # Asked of both products, then made at two calls of both, or of down alone where gate_up's was refused.
    assert maps["bfloat16", "600", "0"] == 6
    assert maps["bfloat16", "600", "1"] == 3


def test_a_comparison_of_nothing_fails():
    """A launcher that takes its arguments elsewhere would write down nothing, and everything would be alike."""
    pointers = [(1 << 40, True), (2 << 40, True), (3 << 40, True), (4 << 40, True), (5 << 40, True)]
    own, launch = {value for value, _ in pointers}, ((1, 1, 1), pointers)
    assert compared([launch] * 3, [launch] * 3, own) == 15
    with pytest.raises(AssertionError, match="every call launches"):
        compared([], [], own)
    with pytest.raises(AssertionError, match="are handed over as addresses"):
        compared([((1, 1, 1), [])] * 3, [((1, 1, 1), [])] * 3, own)
    with pytest.raises(AssertionError, match="nothing of a launch"):
        compared([launch, launch, ((1, 1, 1), [])], [launch, launch, ((1, 1, 1), [])], own)


@pytest.mark.parametrize("form", ["bfloat16", "int8/int8", "mxfp4+apart"])
def test_what_launches_of_prepared_calls_hand_the_driver(form):
    """The same at every call, and other addresses after everything that a call is prepared anew for."""
    lines = said(form, module="ops.relaunched")
    for kernel in ("gate_up_kernel", "down_kernel", "sum_slots_kernel"):
        assert sum(line.startswith(f"relaunched {form} {kernel}") for line in lines) == 8
    changed = {line.removeprefix(f"anew {form} ") for line in lines if line.startswith("anew")}
    assert {"weights moved", "weights of a layer that is gone", "x off 16 bytes", "other tokens", "modes"} <= changed


MOST_FUNCTIONS = {"expert_mlp": 42, "node": 101, "route": 33, "topk": 28}


def test_a_call_like_one_before_enters_few_functions():
    """Each is a tenth of a microsecond and more, of which a call for one token has some tens."""
    lines = said(module="ops.host_calls")
    assert len(lines) == 16
    for line in lines:
        name, _, found = line.partition(": ")
        assert int(found.split()[0]) <= MOST_FUNCTIONS[name.split()[0]], line
