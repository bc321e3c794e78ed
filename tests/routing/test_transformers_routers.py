"""Every scoring that Transformers' own routers use is a value of `Scoring`: same experts, same weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro.routing import drop_over_capacity, rescale, route, weigh
from moestro.types import Routing
from routing import families, family_table
from routing.families import NO_ROUTER, NOT_BY_LOGITS, ROUTERS, E, Family, H, K, dense, make_config

pytest.importorskip("transformers")

DISCOVERED = list(family_table.discover())
MODULES = {name: module for _, module, routers in DISCOVERED for name in routers}
CASES = [(n, v) for n in sorted(MODULES) if n in ROUTERS for v in range(len(ROUTERS[n].variants))]


def load(name: str) -> Any:
    return getattr(importlib.import_module(MODULES[name]), name)


def build(name: str, family: Family, config: Any) -> Any:
    router = family.build(load(name), config)
    router.eval()
    families.randomize(router, seed=sum(map(ord, name)))
    return router


def correction_of(family: Family, router: Any) -> torch.Tensor | None:
    if family.correction is None:
        return None
    if family.correction == "argument":
        return torch.rand(E, generator=torch.Generator().manual_seed(3)) * 0.5
    value = router
    for part in family.correction.split("."):
        value = getattr(value, part)
    return value.detach()


def test_every_router_is_named():
    known = {*ROUTERS, *NOT_BY_LOGITS}
    unknown = {n for n in MODULES if n not in known}
    assert not unknown, f"new router classes, to be given a row in families.py: {sorted(unknown)}"
    bare = {family for family, _, routers in DISCOVERED if not routers} - set(NO_ROUTER)
    assert not bare, f"families with experts but no router class known by name: {sorted(bare)}"
    assert len({n for n, _ in CASES}) >= 60


@pytest.mark.parametrize(("name", "variant"), CASES, ids=[f"{n}-{v}" for n, v in CASES])
@torch.no_grad()
def test_same_experts_and_weights(name: str, variant: int):
    family = ROUTERS[name]
    config = make_config(**family.variants[variant] | family.sizes)
    router = build(name, family, config)
    correction = correction_of(family, router)
    x = torch.randn(64, config.hidden_size, generator=torch.Generator().manual_seed(variant))
    if family.theirs is not None:
        expected = family.theirs(router, x, config, correction)
    else:
        arguments = (x, correction) if family.correction == "argument" else (x,)
        _, weights, ids = router(*arguments)
        expected = families.dense_of(ids, weights)
    if family.ours is not None:
        routing = family.ours(family, router, x, config)
    else:
        routing = families.our_router(family, router, config, correction)(x)
    actual = dense(routing, expected.shape[1])
    assert torch.equal(actual != 0, expected != 0), "other experts"
    torch.testing.assert_close(actual, expected.float(), rtol=1e-6, atol=0)
    assert routing.weight_on == ("input" if name == "Llama4Router" else "output")


@torch.no_grad()
def test_hash_router_is_weigh():
    name = "DeepseekV4HashRouter"
    if name not in MODULES:
        pytest.skip("not in this Transformers")
    router = load(name)(make_config())
    families.randomize(router, seed=1)
    generator = torch.Generator().manual_seed(0)
    router.tid2eid.copy_(torch.rand(50, E, generator=generator).argsort(-1)[:, :K])
    x, tokens = torch.randn(20, H, generator=generator), torch.randint(50, (20,), generator=generator)
    logits, weights, ids = router(x, tokens)
    scoring = ROUTERS["DeepseekV4TopKRouter"].scoring_for(make_config())
    routing = weigh(logits, router.tid2eid[tokens], scoring)
    assert torch.equal(routing.expert_ids, ids)
    torch.testing.assert_close(routing.routing_weights, weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("capacity", [1, 2, 4])
@torch.no_grad()
def test_switch_capacity_is_drop_over_capacity(capacity: int):
    config = make_config(expert_capacity=capacity)
    router = build("SwitchTransformersTop1Router", ROUTERS["SwitchTransformersTop1Router"], config)
    x = torch.randn(50, H, generator=torch.Generator().manual_seed(0))
    chosen, weight, logits = router(x[None])
    ours, report = drop_over_capacity(route(logits[0], 1, "softmax"), E, capacity * E / 50)
    assert report.capacity == capacity
    torch.testing.assert_close(dense(ours, E), (chosen * weight)[0], rtol=1e-6, atol=0)
    assert report.total == 50 - int(chosen.sum()) > 0


@pytest.mark.parametrize("fraction", [0.02, 0.06, 0.1])
@torch.no_grad()
def test_nllb_capacity_is_drop_then_rescale(fraction: float):
    config = make_config(moe_eval_capacity_token_fraction=fraction)
    router = build("NllbMoeTop2Router", ROUTERS["NllbMoeTop2Router"], config)
    x = torch.randn(50, H, generator=torch.Generator().manual_seed(0))
    _, expected, logits = router(x)
    chosen = route(logits, 2, "softmax")
    ours, report = drop_over_capacity(chosen, E, router.expert_capacity * E / (50 * 2))
    assert report.capacity == router.expert_capacity
    torch.testing.assert_close(dense(rescale(ours), E), expected, rtol=1e-6, atol=0)
    assert report.total == int((ours.expert_ids < 0).sum()) > 0


def test_the_table_in_the_docs_is_true():
    page = Path(__file__).parents[2] / "docs" / "reference" / "routers.md"
    installed = family_table.table().splitlines()
    text = page.read_text()
    missing = [line for line in installed if line not in text.splitlines()]
    assert not missing, "run `python tests/routing/family_table.py` and paste the table; missing:\n" + "\n".join(
        missing
    )
    for name, reason in (NOT_BY_LOGITS | NO_ROUTER).items():
        assert name in text
        assert reason in text


def test_families_compare_what_they_say():
    """The comparison itself fails when a value is wrong."""
    family = ROUTERS["MixtralTopKRouter"]
    router = build("MixtralTopKRouter", family, make_config())
    x = torch.randn(8, H, generator=torch.Generator().manual_seed(0))
    _, weights, ids = router(x)
    wrong = families.our_router(Family({"score": "sigmoid", "renormalize": True}), router, make_config(), None)(x)
    assert isinstance(wrong, Routing)
    assert not torch.allclose(dense(wrong, E), families.dense_of(ids, weights), rtol=1e-6, atol=0)
