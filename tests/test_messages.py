"""Errors a user can cause: each names the operation, what it got, what it needs, and the way out."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import moestro
from moestro import Activation, Experts, ExpertWeights, Routing, SharedExperts, TopKRouter
from moestro.errors import InvalidInputError, UnsupportedError, invalid_input, unsupported
from moestro.formats import dense
from moestro.ops.grouping import choose_block_size, padding_report
from moestro.routing import GroupLimit, drop_over_capacity, keep_confident, prune_experts, remap
from source import MODULES, Source

FOUR_PARTS = re.compile(r"\[(?P<operation>[^\]]+)\] got (?P<got>.+?); needs (?P<needs>.+?)\. (?P<fix>\S.+)", re.DOTALL)

T, H, I, E, K = 5, 8, 16, 4, 2  # noqa: E741 (the shape legend's letter)
NAN = float("nan")


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape or (T, H)).to(dtype)


def routing(ids: Any = None, weights: Any = None) -> Routing:
    ids = torch.randint(E, (T, K)) if ids is None else torch.as_tensor(ids)
    return Routing(ids, torch.rand(ids.shape) if weights is None else torch.as_tensor(weights))


def weights(**changes: Any) -> ExpertWeights:
    parts = {"gate_up": torch.randn(E, 2 * I, H), "down": torch.randn(E, H, I)} | changes
    return ExpertWeights.from_dense(**parts)


def ids_of(*values: int) -> torch.Tensor:
    return torch.tensor([values])


def logits_nan() -> object:
    router = TopKRouter(H, E, K)
    return router(torch.full((T, H), NAN))


def forced(name: str, call: Callable[[], object]) -> object:
    with moestro.use(implementation=name):
        return call()


def run(x_: torch.Tensor | None = None, r: Routing | None = None, strategy: str = "auto") -> object:
    return moestro.expert_mlp(x() if x_ is None else x_, routing() if r is None else r, weights(), strategy)


CASES: dict[str, tuple[Callable[[], object], str, str, str]] = {
    # what: (the call, operation, part of the got, part of the needs)
    "Routing shapes": (lambda: Routing(torch.zeros(5, 2).long(), torch.zeros(5, 3)), "Routing", "[5, 3]", "one shape"),
    "Routing rank": (lambda: Routing(torch.zeros(5).long(), torch.zeros(5)), "Routing", "[5]", "[num_tokens, top_k]"),
    "Routing ids dtype": (
        lambda: Routing(torch.zeros(5, 2), torch.zeros(5, 2)),
        "Routing",
        "torch.float32",
        "int32 or int64",
    ),
    "Routing weights dtype": (lambda: routing(weights=torch.zeros(5, 2).half()), "Routing", "torch.float16", "float32"),
    "Routing devices": (lambda: routing(weights=torch.zeros(5, 2, device="meta")), "Routing", "meta", "one device"),
    "Routing weight_on": (
        lambda: Routing(ids_of(0), torch.ones(1, 1), "both"),
        "Routing",
        "'both'",
        '"output" or "input"',
    ),
    "Activation kind": (lambda: Activation("swish"), "Activation", "'swish'", "silu"),
    "Activation function": (lambda: Activation("custom"), "Activation", "function=None", "a function together"),
    "dense dtype": (lambda: dense(torch.zeros(E, I, H).int()), "dense", "torch.int32", "bfloat16"),
    "ExpertWeights shapes": (
        lambda: weights(down=torch.zeros(E, I, H)),
        "ExpertWeights",
        f"[{E}, {I}, {H}]",
        "down [E, H, I]",
    ),
    "ExpertWeights bias": (
        lambda: weights(down_bias=torch.zeros(E, I)),
        "ExpertWeights",
        "down_bias [4, 16]",
        "[4, 8]",
    ),
    "ExpertWeights devices": (
        lambda: weights(down=torch.zeros(E, H, I, device="meta")),
        "ExpertWeights",
        "cpu, meta",
        "one device",
    ),
    "expert_mlp H": (lambda: run(x(T, H + 1)), "expert_mlp", "[5, 9]", "[num_tokens, 8]"),
    "expert_mlp rank": (lambda: run(x(1, T, H)), "expert_mlp", "[1, 5, 8]", "[num_tokens, 8]"),
    "expert_mlp integers": (lambda: run(torch.zeros(T, H).long()), "expert_mlp", "torch.int64", "float32, bfloat16"),
    "expert_mlp T": (lambda: run(x(T + 1, H)), "expert_mlp", "6 rows", "one row of ids for each row"),
    "expert_mlp id too large": (lambda: run(x(1, H), routing(ids_of(0, E))), "expert_mlp", "from 0 to 4", "-1..3"),
    "expert_mlp id below -1": (lambda: run(x(1, H), routing(ids_of(-2, 0))), "expert_mlp", "from -2 to 0", "-1..3"),
    "expert_mlp NaN weight": (
        lambda: run(x(1, H), routing(ids_of(0, 1), [[1.0, NAN]])),
        "expert_mlp",
        "NaN or infinity",
        "finite weights",
    ),
    "expert_mlp device": (
        lambda: run(torch.zeros(T, H, device="meta")),
        "expert_mlp",
        "x, a tensor on the meta device",
        "a dense tensor",
    ),
    "expert_mlp strategy": (lambda: run(strategy="fastest"), "expert_mlp", "'fastest'", "all_experts"),
    "expert_mlp block size": (lambda: run(strategy="blockwise-0"), "expert_mlp", "'blockwise-0'", "at least 1"),
    "expert_mlp forced name": (lambda: forced("warp", run), "expert_mlp", "'warp'", "reference"),
    "topk shape": (lambda: moestro.topk(torch.zeros(4), 1), "topk", "[4]", "[num_tokens, num_experts]"),
    "topk dtype": (lambda: moestro.topk(torch.zeros(2, 4).long(), 1), "topk", "torch.int64", "float32"),
    "topk k > E": (lambda: moestro.topk(torch.zeros(2, 4), 5), "topk", "k=5 with 4 experts", "1 <= k <= num_experts"),
    "topk k = 0": (lambda: moestro.topk(torch.zeros(2, 4), 0), "topk", "k=0", "1 <= k"),
    "topk NaN": (lambda: moestro.topk(torch.tensor([[0.0, NAN]]), 1), "topk", "NaN", "not NaN"),
    "topk forced": (
        lambda: forced("branchless", lambda: moestro.topk(torch.zeros(9000, 512), 2)),
        "topk",
        "no allowed",
        "branchless: T * E * E",
    ),
    "grouping ids": (lambda: moestro.group_by_expert(ids_of(E), E), "group_by_expert", "from 4 to 4", "-1..3"),
    "grouping dtype": (
        lambda: moestro.group_by_expert(torch.zeros(2, 2), E),
        "group_by_expert",
        "torch.float32",
        "int32",
    ),
    "grouping experts": (
        lambda: moestro.group_by_expert(ids_of(-1), 0),
        "group_by_expert",
        "num_experts=0",
        "num_experts >= 1",
    ),
    "block size": (lambda: moestro.block_schedule(ids_of(0), E, 0), "block_schedule", "block_size=0", "at least 1"),
    "block cells": (lambda: moestro.block_schedule(ids_of(0), E, 2**31), "block_schedule", "cells", "2147483647"),
    "block choice": (lambda: choose_block_size(10, 0, 10.0), "choose_block_size", "num_experts=0", "num_experts >= 1"),
    "padding report": (lambda: padding_report([], 4), "padding_report", "0 counts", "one count per expert"),
    "TopKRouter K > E": (lambda: TopKRouter(H, E, E + 1), "TopKRouter", "top_k=5", "num_experts"),
    "TopKRouter K = 0": (lambda: TopKRouter(H, E, 0), "TopKRouter", "top_k=0", "1 <= top_k"),
    "TopKRouter scoring": (lambda: TopKRouter(H, E, K, scoring="softmin"), "Scoring", "'softmin'", "softmax"),
    "TopKRouter shape": (lambda: TopKRouter(H, E, K)(x(T, H + 1)), "TopKRouter", "[5, 9]", "8"),
    "router NaN": (logits_nan, "route", "a logit of nan", ""),
    "GroupLimitedRouter groups": (
        lambda: moestro.GroupLimitedRouter(H, 6, K, GroupLimit(num_groups=4, top_groups=2)),
        "GroupLimit",
        "num_groups=4",
        "num_experts",
    ),
    "capacity": (lambda: drop_over_capacity(routing(), E, 0.0), "drop_over_capacity", "capacity_factor=0.0", "above 0"),
    "confidence": (lambda: keep_confident(routing(), min_share=2.0), "keep_confident", "min_share=2.0", "0"),
    "remap": (lambda: remap(routing(), torch.zeros(2, 2)), "remap", "[2, 2]", "int32 or int64"),
    "prune": (lambda: prune_experts(routing(), torch.zeros(E)), "prune_experts", "torch.float32", "bool"),
    "Experts size": (lambda: Experts(0, H, I), "Experts", "num_experts=0", "at least 1"),
    "Experts strategy": (lambda: Experts(E, H, I, strategy="x"), "Experts", "'x'", "grouped"),
    "SharedExperts size": (lambda: SharedExperts(H, I, 0), "SharedExperts", "num_shared_experts=0", "at least 1"),
    "MoE experts": (
        lambda: moestro.MoE(TopKRouter(H, E + 1, K), Experts(E, H, I)),
        "MoE",
        "5 experts and 4",
        "the same number",
    ),
    "MoE shape": (lambda: moestro.FFN(H, I)(x(T, H + 1)), "MoE", "[5, 9]", "[..., 8]"),
    "FFN from nothing": (lambda: moestro.FFN.from_dense(nn.ReLU(), 4, 2), "FFN.from_dense", "no children", "gate_proj"),
    "explain": (lambda: moestro.explain(len, [1]), "explain", "len", "moestro.expert_mlp"),
    "accelerate a dense model": (
        lambda: moestro.accelerate(nn.Sequential(nn.Linear(2, 2))),
        "accelerate",
        "a dense model",
        "Mixture",
    ),
    "accelerate projections": (
        lambda: moestro.accelerate(nn.Linear(2, 2), projections="int9"),
        "accelerate",
        "projections='int9'",
        "torch, auto, fp8-e4m3-tensor",
    ),
    "accelerate strategy": (lambda: moestro.accelerate(nn.Linear(2, 2), "best"), "accelerate", "'best'", "grouped"),
}


@pytest.mark.parametrize("what", CASES)
def test_four_parts(what: str) -> None:
    call, operation, got, needs = CASES[what]
    with pytest.raises(moestro.MoestroError) as caught:
        call()
    found = FOUR_PARTS.fullmatch(str(caught.value))
    assert found is not None, str(caught.value)
    assert found["operation"] == operation
    assert got in found["got"]
    assert needs in found["needs"]
    assert len(found["fix"]) > 5


def test_the_two_kinds() -> None:
    parts = {"got": "a", "needs": "b", "fix": "C."}
    for found, kinds in (
        (invalid_input("op", **parts), (InvalidInputError, ValueError)),
        (unsupported("op", **parts), (UnsupportedError, NotImplementedError)),
    ):
        assert all(isinstance(found, kind) for kind in kinds)
    for build in (invalid_input, unsupported):
        assert str(build("op", **parts)) == "[op] got a; needs b. C."
        assert isinstance(build("op", **parts), moestro.MoestroError)


OTHER_ERRORS = {"AttributeError", "Exit", "SystemExit"}
"""AttributeError from a module's __getattr__, the others from commands."""

CAUGHT_BY_THEMSELVES = {"moestro.bench.failures": {"DeviceLostError"}}
"""What a module, or its neighbour, raises for itself to catch: users meet what it makes of it."""

BUILDERS = {"invalid_input", "unsupported"}


def raised(module: Source) -> list[str]:
    """Every `raise` that is none of: bare, of the two builders, of a function that builds with them, of a name."""
    local = {n.name for n in ast.walk(module.tree) if isinstance(n, ast.FunctionDef) and returns_error(n)}
    allowed = BUILDERS | OTHER_ERRORS | local | imported_builders() | CAUGHT_BY_THEMSELVES.get(module.name, set())
    found = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Raise) or node.exc is None or isinstance(node.exc, ast.Name):
            continue
        called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name not in allowed:
            found.append(f"{module.where}:{node.lineno}: {name}")
    return found


def returns_error(node: ast.FunctionDef) -> bool:
    return node.returns is not None and ast.unparse(node.returns).endswith("Error")


@cache
def imported_builders() -> set[str]:
    return {n.name for m in MODULES for n in ast.walk(m.tree) if isinstance(n, ast.FunctionDef) and returns_error(n)}


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.name)
def test_every_raise_has_four_parts(module: Source) -> None:
    if module.name == "moestro.errors":
        return
    assert raised(module) == []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILDERS:
            assert len(node.args) == 1, f"{module.where}:{node.lineno}"
            assert {k.arg for k in node.keywords} == {"got", "needs", "fix"}, f"{module.where}:{node.lineno}"


def reasons(module: Source) -> set[str]:
    """Sentences of a module that say why something cannot run: "it ..." of some length."""
    texts = (n.value for n in ast.walk(module.tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return {text for text in texts if re.match(r"it [a-z]+s? .{10,}", text)}


def test_a_reason_stands_once() -> None:
    """Why an implementation cannot run is worded in one place for all that say it."""
    where: dict[str, list[str]] = {}
    for module in MODULES:
        for text in reasons(module):
            where.setdefault(text, []).append(module.where)
    assert len(where) > 20
    assert {text: files for text, files in where.items() if len(files) > 1} == {}
