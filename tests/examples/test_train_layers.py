"""The layers with which the bundled model was trained compute what Transformers' own do, gradients included."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tolerances import assert_close

TOKENS, HIDDEN, EXPERTS, TOP_K, INTERMEDIATE = 70, 24, 8, 2, 12


@pytest.fixture(scope="module")
def layers():
    """`examples/train_layers.py`, run without compiling it."""
    import train_layers

    with torch.compiler.set_stance("force_eager"):
        yield train_layers


def expected_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = torch.einsum("th,enh->ten", x, gate_up).chunk(2, -1)
    y = torch.einsum("ten,ehn->teh", F.silu(gate) * up, down)
    return (y.gather(1, ids[:, :, None].expand(-1, -1, x.shape[1])) * weights[:, :, None]).sum(1)


@pytest.mark.parametrize("fill", [8, 128])
@pytest.mark.parametrize("last", [EXPERTS, EXPERTS - 3], ids=["all", "some-without-rows"])
def test_experts_and_their_gradients(layers, monkeypatch: pytest.MonkeyPatch, last: int, fill: int) -> None:
    monkeypatch.setattr(layers, "ROUND", fill)
    ids = torch.rand(TOKENS, last).topk(TOP_K).indices
    given = [
        torch.randn(TOKENS, HIDDEN),
        torch.rand(TOKENS, TOP_K),
        torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 5,
        torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / 5,
    ]
    x, weights, gate_up, down = (t.requires_grad_() for t in given)
    module = SimpleNamespace(gate_up_proj=gate_up, down_proj=down)
    outgoing = torch.randn(TOKENS, HIDDEN)
    found = layers.sorted_experts(module, x, ids, weights)
    gradients = torch.autograd.grad(found, (x, weights, gate_up, down), outgoing)
    wanted = expected_experts(x, ids, weights, gate_up, down)
    for got, want in zip(
        (found, *gradients),
        (wanted, *torch.autograd.grad(wanted, (x, weights, gate_up, down), outgoing)),
        strict=True,
    ):
        assert_close(got, want)


@pytest.mark.parametrize("length", [1, 7, 64])
def test_attention_sees_what_came_before(layers, length: int) -> None:
    query, key, value = torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
    found, _ = layers.causal_blocks(None, query, key, value, None, 8**-0.5)
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert_close(found.transpose(1, 2), wanted)


def test_the_loss_and_its_gradients(layers) -> None:
    hidden, head = torch.randn(1500, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(0, 50, (1500,))
    found = layers.HeadLoss.apply(hidden, head, targets)
    wanted = F.cross_entropy(hidden @ head.T, targets)
    gradients = zip(
        torch.autograd.grad(found, (hidden, head)), torch.autograd.grad(wanted, (hidden, head)), strict=True
    )
    for got, want in ((found, wanted), *gradients):
        assert_close(got, want)


class Small(torch.nn.Module):
    """A matrix, experts and a norm, by names as Transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Parameter(torch.randn(8, 4, dtype=torch.bfloat16))
        self.gate_up_proj = torch.nn.Parameter(torch.randn(3, 12, 4, dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def loss(self) -> Tensor:
        return sum(p.float().sub(0.5).square().sum() for p in self.parameters())


def test_the_optimizer_lowers_a_loss_and_goes_on_from_its_state(layers) -> None:
    def steps(model: Small, optimizer, number: int) -> float:
        for _ in range(number):
            model.loss().backward()
            optimizer.step(0.05, 0.05)
        return model.loss().item()

    model, again = Small(), Small()
    first = model.loss().item()
    optimizer = layers.MuonAdamW(model)
    assert set(optimizer.momenta) == {0, 1}
    half = steps(model, optimizer, 20)
    resumed = layers.MuonAdamW(again)
    resumed.load(copy.deepcopy(optimizer.state()))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert steps(again, resumed, 20) == steps(model, optimizer, 20) < half < first


def test_updates_are_nearly_orthogonal(layers) -> None:
    """The published coefficients take singular values to between 0.68 and 1.14, and converge no further."""
    values = torch.linalg.svdvals(layers.orthogonal(torch.randn(3, 16, 64)))
    assert values.min() > 0.5
    assert values.max() < 1.3
