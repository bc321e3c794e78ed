"""Losses and biases that balance experts in training: against Transformers' own functions, in layers, in training."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as of_mixtral
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func as of_olmoe
from transformers.models.switch_transformers import modeling_switch_transformers as switch

import moestro
from moestro.errors import InvalidInputError
from moestro.moe import balance_loss, update_biases
from moestro.routing import (
    BiasUpdate,
    GroupLimit,
    balanced_bias,
    expert_counts,
    olmoe_balance_loss,
    route,
    router_z_loss,
    switch_balance_loss,
)
from moestro.types import Routing
from tolerances import assert_close

T, E = 24, 6


def scores_of(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("top_k", [1, 2])
def test_switch_is_that_of_transformers(sequences: int, top_k: int) -> None:
    logits = torch.randn(T, E, requires_grad=True)
    routing = route(logits, top_k, "softmax")
    ours = switch_balance_loss(scores_of(logits), routing, sequences)
    (own,) = torch.autograd.grad(ours, logits)
    split = (sequences, T // sequences)
    ids = routing.expert_ids.view(*split, top_k)
    theirs = switch.load_balancing_loss_func(scores_of(logits).view(*split, E), ids)
    (other,) = torch.autograd.grad(theirs, logits)
    assert_close(ours, theirs)
    assert_close(own, other)


@pytest.mark.parametrize("function", [of_mixtral, of_olmoe])
@pytest.mark.parametrize("masked", [False, True])
def test_olmoe_is_that_of_transformers(function: object, masked: bool) -> None:
    layers = [torch.randn(T, E, requires_grad=True) for _ in range(3)]
    mask = torch.arange(T) % 3 > 0 if masked else None
    ours = olmoe_balance_loss([scores_of(z) for z in layers], [route(z, 2, "softmax") for z in layers], mask)
    theirs = function(tuple(layers), E, 2, None if mask is None else mask.view(2, -1).long())  # type: ignore[operator]
    assert_close(ours, theirs)
    for own, other in zip(torch.autograd.grad(ours, layers), torch.autograd.grad(theirs, layers), strict=True):
        assert_close(own, other)


def test_both_are_the_same_of_one_layer() -> None:
    logits = torch.randn(T, E)
    routing = route(logits, 2, "softmax")
    assert_close(switch_balance_loss(scores_of(logits), routing), olmoe_balance_loss([scores_of(logits)], [routing]))


def test_z_loss_is_that_of_transformers() -> None:
    logits = torch.randn(T, E)
    assert_close(router_z_loss(logits), switch.router_z_loss_func(logits.view(2, -1, E)))
    counted = torch.arange(T) < 5
    assert_close(router_z_loss(logits, counted), router_z_loss(logits[:5]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_tokens_in_16_bits(dtype: torch.dtype) -> None:
    """float16 does not count beyond 65,504, and bfloat16 has eight bits of a sum."""
    logits = torch.randn(66_000, 2).to(dtype)
    routing = route(logits, 1, "softmax")
    scores = scores_of(logits.float()).to(dtype)
    wide = scores.float()
    assert_close(switch_balance_loss(scores, routing), switch_balance_loss(wide, routing))
    assert_close(olmoe_balance_loss([scores], [routing]), olmoe_balance_loss([wide], [routing]))
    assert_close(router_z_loss(logits), router_z_loss(logits.float()))


def test_even_loads_give_the_least() -> None:
    ids = torch.arange(T)[:, None] % E
    even = Routing(ids, torch.ones(T, 1))
    one = Routing(torch.zeros_like(ids), torch.ones(T, 1))
    flat = torch.full((T, E), 1 / E)
    peaked = torch.nn.functional.one_hot(torch.zeros(T, dtype=torch.int64), E).float()
    assert float(switch_balance_loss(flat, even)) == pytest.approx(1)
    assert float(switch_balance_loss(peaked, one)) == pytest.approx(E)


def test_empty_slots_and_no_tokens() -> None:
    """A slot that is empty counts for nobody, and of no tokens the losses are zero, not NaN."""
    scores = torch.rand(2, E)
    empty = Routing(torch.full((2, 2), -1), torch.ones(2, 2))
    nothing = Routing(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert float(switch_balance_loss(scores, empty)) == float(olmoe_balance_loss([scores], [empty])) == 0
    none = scores[:0]
    losses = switch_balance_loss(none, nothing), olmoe_balance_loss([none], [nothing]), router_z_loss(none)
    assert [float(loss) for loss in losses] == [0, 0, 0]


def test_the_bias_rises_where_rows_are_few() -> None:
    bias = balanced_bias(torch.zeros(4), torch.tensor([9, 3, 0, 4]), 0.1)
    assert_close(bias, torch.tensor([-0.1, 0.1, 0.1, 0.0]))


def test_the_bias_of_even_loads_stays() -> None:
    """Whatever the mean rounds to, and however large the counts are."""
    for count in (1, 7, 2**27, 2**53 + 1):
        assert bool((balanced_bias(torch.zeros(49), torch.full((49,), count)) == 0).all())
    assert_close(balanced_bias(torch.zeros(2), torch.tensor([2**53, 2**53 + 1]), 0.1), torch.tensor([0.1, -0.1]))
    assert bool((balanced_bias(torch.zeros(256), torch.full((256,), 2**24, dtype=torch.int32)) == 0).all())


def test_the_bias_stays_float32() -> None:
    layer = moestro.FFN(8, 16, E, 2, balance=BiasUpdate(1e-3))
    layer.router.correction_bias += 0.7
    layer = layer.to(torch.bfloat16)
    assert layer.router.weight.dtype == torch.bfloat16
    layer(torch.randn(T, 8, dtype=torch.bfloat16))
    update_biases(layer)
    assert sorted(set((layer.router.correction_bias - 0.7).abs().tolist()))[-1] == pytest.approx(1e-3, rel=1e-3)
    assert layer.double().router.correction_bias.dtype == torch.float64


def balance(logits: Tensor, routing: Routing) -> Tensor:
    return 0.01 * switch_balance_loss(logits.softmax(-1), routing) + 0.001 * router_z_loss(logits)


def test_a_layer_hands_on_its_loss_once() -> None:
    layer = moestro.FFN(8, 16, E, 2, balance=balance)
    x = torch.randn(T, 8)
    y = layer(x)
    logits = layer.router.logits(x)
    loss = balance_loss(torch.nn.Sequential(layer))
    assert_close(loss, balance(logits, layer.router(x)))
    loss.backward()
    assert layer.router.weight.grad is not None
    plain = moestro.FFN(8, 16, E, 2)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(y, plain(x))  # the output itself is as without
    with pytest.raises(InvalidInputError, match="balance_loss"):
        balance_loss(layer)


def test_nothing_outside_of_training() -> None:
    for layer in (moestro.FFN(8, 16, E, 2, balance=balance), moestro.FFN(8, 16, E, 2, balance=BiasUpdate())):
        layer.eval()(torch.randn(T, 8))
        with torch.no_grad():
            layer.train()(torch.randn(T, 8))
        with pytest.raises(InvalidInputError, match="balance_loss"):
            balance_loss(layer)
        with pytest.raises(InvalidInputError, match="update_biases"):
            update_biases(layer)


def test_biases_are_updated_by_all_rows_since_the_last_time() -> None:
    layer = moestro.FFN(8, 16, E, 2, balance=BiasUpdate(0.5))
    batches = torch.randn(T, 8), torch.randn(3, 8)
    with torch.no_grad():
        counts = sum(expert_counts(layer.router(x), E) for x in batches)
    for x in batches:
        layer(x)
    update_biases(layer)
    assert torch.equal(layer.router.correction_bias, balanced_bias(torch.zeros(E), counts, 0.5))


@pytest.mark.parametrize("kind", [balance, BiasUpdate()])
def test_a_layer_that_has_run_is_copied_and_pickled(kind: object) -> None:
    """Without what it keeps of its forward: PyTorch refuses to copy tensors within a graph."""
    layer = moestro.FFN(8, 16, E, 2, balance=kind)  # type: ignore[arg-type]
    layer(torch.randn(T, 8))
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert made._load.loss is None
        assert made._load.counts is None
        assert made.balance == kind


def test_activation_checkpointing_counts_once() -> None:
    """What the backward pass computes again is neither a loss to come nor rows."""
    x = torch.randn(T, 8, requires_grad=True)
    layer = moestro.FFN(8, 16, E, 2, balance=balance)
    (layer(x).sum() + balance_loss(layer)).backward()
    expected, layer.router.weight.grad = layer.router.weight.grad, None
    y = checkpoint(layer, x, use_reentrant=False)
    (y.sum() + balance_loss(layer)).backward()
    assert_close(layer.router.weight.grad, expected)
    with pytest.raises(InvalidInputError, match="balance_loss"):
        balance_loss(layer)
    layer = moestro.FFN(8, 16, E, 2, balance=BiasUpdate())
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert int(layer._load.counts.sum()) == 2 * T


class Biased(torch.nn.Module):
    """A router without logits, with a bias."""

    num_experts = E

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("correction_bias", torch.zeros(E))

    def forward(self, x: Tensor) -> Routing:
        return route(x[:, :E], 2, "softmax", self.correction_bias)


def test_a_bias_needs_no_logits() -> None:
    layer = moestro.MoE(Biased(), moestro.Experts(E, 8, 8), balance=BiasUpdate())
    layer(torch.randn(T, 8))
    update_biases(layer)
    assert bool((layer.router.correction_bias != 0).any())


class Router(torch.nn.Module):
    num_experts = E

    def forward(self, x: Tensor) -> Routing:
        return Routing(torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1))


class Logits(Router):
    """A router with logits and without a bias."""

    def logits(self, x: Tensor) -> Tensor:
        return x[:, :E]


def test_hooks_of_the_router_are_called_once() -> None:
    layer = moestro.FFN(8, 16, E, 2, balance=balance)
    calls: list[int] = []
    layer.router.register_forward_hook(lambda *_: calls.append(1))
    layer(torch.randn(T, 8))
    assert calls == [1]


def test_in_a_compiled_graph() -> None:
    layer = moestro.FFN(8, 16, E, 2, balance=balance)
    x = torch.randn(T, 8)
    layer(x)
    eager = balance_loss(layer)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert_close(balance_loss(layer), eager)


def test_two_hundred_steps_leave_no_expert_unused() -> None:
    """A router that begins with all tokens at two experts; each way brings the others in."""
    for kind in (balance_strongly, BiasUpdate(0.02)):
        torch.manual_seed(0)
        layer = moestro.FFN(8, 16, E, 2, balance=kind)
        with torch.no_grad():
            layer.router.weight[:2, 0] += 3
        x = torch.randn(64, 8)
        x[:, 0] = x[:, 0].abs() + 1
        assert int((expert_counts(layer.router(x), E) == 0).sum()) > 0
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
        for _ in range(200):
            optimizer.zero_grad()
            loss = (layer(x) - x).square().mean()
            if not isinstance(kind, BiasUpdate):
                loss = loss + balance_loss(layer)
            loss.backward()
            optimizer.step()
            if isinstance(kind, BiasUpdate):
                update_biases(layer)
        assert int((expert_counts(layer.router(x), E) == 0).sum()) == 0


def balance_strongly(logits: Tensor, routing: Routing) -> Tensor:
    return 0.1 * switch_balance_loss(logits.softmax(-1), routing)


@pytest.mark.parametrize(
    "call",
    [
        lambda: switch_balance_loss(torch.rand(T, E), Routing(torch.zeros(3, 1).long(), torch.ones(3, 1))),
        lambda: switch_balance_loss(torch.rand(3, E), Routing(torch.zeros(3, 1).long(), torch.ones(3, 1)), 2),
        lambda: olmoe_balance_loss([], []),
        lambda: olmoe_balance_loss([torch.rand(3, E)], []),
        lambda: router_z_loss(torch.rand(3, E), torch.ones(4, dtype=torch.bool)),
        lambda: router_z_loss(torch.ones(3, E, dtype=torch.int64)),
        lambda: balanced_bias(torch.zeros(3), torch.zeros(4)),
        lambda: BiasUpdate(0),
        lambda: moestro.MoE(Router(), moestro.Experts(E, 8, 8), balance=balance),
        lambda: moestro.MoE(moestro.TopKRouter(8, E, 1), moestro.Experts(E, 8, 8), balance=BiasUpdate()),
        lambda: moestro.MoE(Logits(), moestro.Experts(E, 8, 8), balance=BiasUpdate()),
        lambda: moestro.FFN(8, 16, E, 2, balance=0.01),
        lambda: moestro.FFN(8, 16, E, 2, balance=BiasUpdate),
    ],
)
def test_what_is_refused(call: object) -> None:
    with pytest.raises(InvalidInputError, match=r"\[\w+\] got .+; needs .+\. .+\."):
        call()  # type: ignore[operator]


def test_group_limited_routers_balance_too() -> None:
    router = moestro.GroupLimitedRouter(8, E, 2, GroupLimit(2, 1))
    layer = moestro.MoE(router, moestro.Experts(E, 8, 8), balance=BiasUpdate())
    layer(torch.randn(T, 8))
    update_biases(layer)
    assert bool((router.correction_bias != 0).any())
