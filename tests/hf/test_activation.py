"""Reading a gate as data: right where it is data, "custom" where it is not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from moestro.hf.activation import describe, recognise
from moestro.hf.experts import glu
from moestro.reference import activate
from moestro.types import GPT_OSS_SWIGLU, SWIGLU, Activation

KINDS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_new": "gelu-tanh",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "identity",
}


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
@pytest.mark.parametrize("gated", [True, False])
def test_the_activations_of_transformers(name, kind, gated):
    function = partial(glu, ACT2FN[name]) if gated else ACT2FN[name]
    assert recognise(function, gated) == Activation(kind, gated)


def test_quick_gelu_is_a_silu_with_a_slope():
    assert recognise(ACT2FN["quick_gelu"], False) == Activation("silu", gated=False, alpha=1.702)


@pytest.mark.parametrize(
    ("activation", "constants"),
    [
        (SWIGLU, ()),
        (GPT_OSS_SWIGLU, (1.702, 7.0)),
        (Activation(interleaved=True), ()),
        (Activation(limit=10.0), (10.0,)),
        (Activation(alpha=1.3, limit=0.5, up_offset=1.0), (1.3, 0.5)),
        (Activation("gelu", limit=3.0), (3.0,)),
    ],
)
def test_finds_the_data_a_function_was_made_from(activation, constants):
    assert recognise(partial(activate, activation=activation), activation.gated, constants) == activation


def test_an_infinite_limit_is_no_limit():
    limit = float("inf")

    def gate(z):
        gate, up = z.chunk(2, dim=-1)
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

    assert recognise(gate, True, (limit,)) == SWIGLU


def clamped_after(z):
    gate, up = z.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0)


def softcapped(z):
    gate, up = z.chunk(2, dim=-1)
    return F.silu(30 * torch.tanh(gate / 30)) * up


def hidden_limit(z):
    gate, up = z.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=500.0)) * up


def swapped(z):
    up, gate = z.chunk(2, dim=-1)
    return F.silu(gate) * up


def almost(z):
    gate, up = z.chunk(2, dim=-1)
    return F.silu(gate) * up * (1 + 1e-4)


@pytest.mark.parametrize("function", [clamped_after, softcapped, hidden_limit, swapped, almost])
def test_anything_else_is_custom_and_runs_the_function_itself(function):
    found = recognise(function, True, (7.0,))
    assert found.kind == "custom"
    assert found.function is function


def test_a_function_of_another_width_is_custom():
    assert recognise(lambda z: z, True).kind == "custom"


def test_float32_inside_is_no_obstacle():
    def gate(z):
        gate, up = z.chunk(2, dim=-1)
        return (F.silu(gate.float()) * up.float()).to(z.dtype)

    assert recognise(gate, True) == SWIGLU


def test_describe():
    assert describe(SWIGLU) == "silu"
    assert describe(GPT_OSS_SWIGLU) == "silu (alpha 1.702, limit 7, up + 1)"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_while_a_model_is_being_made(dtype):
    """Transformers sets the default dtype and device while it reads a checkpoint."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            found = recognise(lambda z: torch.nn.functional.silu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1], True)
    finally:
        torch.set_default_dtype(before)
    assert found == Activation()
