"""Linear modules of a model served by the engine: the same answers, the same parameters, gradients as before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moestro
from hf.models import built, snapshot
from moestro.errors import UnsupportedError
from moestro.hf import zoo
from moestro.hf.coverage import relative_error
from moestro.hf.dense import Projection
from moestro.ops import native


@pytest.fixture
def model():
    return zoo.to_bfloat16(built("qwen3_moe"))


def linear_modules(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def test_the_same_answers_from_the_same_parameters(model):
    inputs, state = zoo.inputs_of(model), snapshot(model)
    with torch.no_grad():
        wanted = zoo.outputs(moestro.accelerate(model), inputs)
        assert not any(isinstance(module, Projection) for module in linear_modules(model))
        assert moestro.accelerate(model, projections=True) is model
        assert all(isinstance(module, Projection) for module in linear_modules(model))
        found = zoo.outputs(model, inputs)
    assert relative_error(found, wanted) < 2e-2
    assert all(p is q and place == where for (p, place), (q, where) in zip(snapshot(model), state, strict=True))


def test_gradients_are_those_of_linear():
    torch.manual_seed(0)
    plain, served = nn.Linear(24, 10).bfloat16(), nn.Linear(24, 10).bfloat16()
    served.load_state_dict(plain.state_dict())
    served.__class__ = Projection
    x = torch.randn(3, 5, 24).bfloat16()
    for module in (plain, served):
        module(x).float().square().sum().backward()
    assert torch.equal(plain.weight.grad, served.weight.grad)
    assert torch.equal(plain.bias.grad, served.bias.grad)


def test_a_graph_has_pytorchs_own_linear():
    served = nn.Linear(24, 10).bfloat16()
    served.__class__ = Projection
    x = torch.randn(3, 24).bfloat16()
    with torch.no_grad():
        graph = torch.export.export(served, (x,)).module()
        assert torch.equal(graph(x), nn.functional.linear(x, served.weight, served.bias))


def test_only_plain_modules_of_16_bits_are_served():
    class Other(nn.Linear):
        pass

    model = built("qwen3_moe")
    model.lm_head.bfloat16()
    model.model.extra = Other(4, 4).bfloat16()
    moestro.accelerate(model, projections=True)
    served = [name for name, module in model.named_modules() if isinstance(module, Projection)]
    assert served == ["lm_head"]


@pytest.mark.skipif(native.module is None, reason=str(native.problem))
def test_a_forced_engine_serves_them_or_says_why():
    served = nn.Linear(24, 10).bfloat16().requires_grad_(False)
    served.__class__ = Projection
    x = torch.randn(3, 24).bfloat16()
    with moestro.use(implementation="cpu-portable"):
        assert served(x).shape == (3, 10)
    with moestro.use(implementation="cpu-portable"), pytest.raises(UnsupportedError, match="gradients"):
        served(x.requires_grad_())
