"""What modules and values take: activations by name, device and dtype, no inputs but tensors; and how they print."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

import moestro
from moestro import FFN, Activation, Experts, GroupLimitedRouter, Routing, SharedExperts, TopKRouter
from moestro.errors import InvalidInputError
from moestro.formats import FORMATS, PackedTensor
from moestro.routing.selection import GroupLimit
from moestro.types import GPT_OSS_SWIGLU, PRESETS

MODULES = {
    "FFN": lambda **given: FFN(8, 4, 4, 2, **given),
    "Experts": lambda **given: Experts(4, 8, 4, bias=True, **given),
    "SharedExperts": lambda **given: SharedExperts(8, 4, gate=True, bias=True, **given),
    "TopKRouter": lambda **given: TopKRouter(8, 4, 2, bias=True, correction_bias=True, **given),
    "GroupLimitedRouter": lambda **given: GroupLimitedRouter(8, 4, 2, GroupLimit(2, 1), **given),
}


@pytest.mark.parametrize("name", MODULES)
def test_device_and_dtype(name: str) -> None:
    module = MODULES[name](device="meta", dtype=torch.bfloat16)
    for parameter in module.parameters():
        assert (parameter.device.type, parameter.dtype) == ("meta", torch.bfloat16)
    for buffer in module.buffers():  # a router's correction is in float32 whatever the rest
        assert (buffer.device.type, buffer.dtype) == ("meta", torch.float32)
    assert {p.dtype for p in MODULES[name]().parameters()} == {torch.float32}


def test_a_layer_in_bfloat16_runs() -> None:
    assert FFN(8, 4, dtype=torch.bfloat16)(torch.randn(3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("make", [lambda a: FFN(8, 4, activation=a).experts, lambda a: Experts(2, 8, 4, a)])
def test_activations_by_name(make) -> None:
    assert make("gelu").activation.code == Activation("gelu").code
    assert make("gpt-oss-swiglu").activation is GPT_OSS_SWIGLU
    for name in PRESETS:
        assert Activation.of(name) is PRESETS[name]
    assert SharedExperts(8, 4, activation="relu").activation.code == Activation("relu").code


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ("swish", "activation='swish'"),
        ("custom", "activation='custom'"),
        (nn.GELU(), "an activation of type GELU"),
        (torch.tanh, "an activation of type builtin_function_or_method"),
    ],
)
@pytest.mark.parametrize("kind", ["FFN", "Experts", "SharedExperts"])
def test_other_activations_are_refused(kind: str, value: object, got: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^\[{kind}\] got {re.escape(got)}; needs an Activation, or .*geglu"):
        MODULES[kind](activation=value)


@pytest.mark.parametrize("value", [np.zeros((2, 8), dtype=np.float32), [[0.0] * 8], None])
def test_a_layer_takes_tensors(value: object) -> None:
    with pytest.raises(InvalidInputError, match=r"^\[MoE\] got .*; needs a torch\.Tensor for x\. "):
        FFN(8, 4)(value)  # type: ignore[arg-type]


def test_a_routing_unpacks_moves_and_prints() -> None:
    routing = Routing(torch.tensor([[0, 1], [2, -1]]), torch.ones(2, 2), "input")
    ids, weights = routing
    assert ids is routing.expert_ids
    assert weights is routing.routing_weights
    moved = routing.to("meta")
    assert {t.device.type for t in moved} == {"meta"}
    assert moved.weight_on == "input"
    assert repr(routing) == "Routing(num_tokens=2, top_k=2, int64 and float32 on cpu, weight_on='input')"


def test_shared_experts_print_their_sizes() -> None:
    text = repr(SharedExperts(8, 4, num_shared_experts=2, activation="gelu", gate=True))
    assert text == (
        "SharedExperts(hidden_size=8, intermediate_size=4, num_shared_experts=2, activation='gelu', "
        "gate=True, bias=False)"
    )


@pytest.mark.parametrize(
    "name", [n for n, f in FORMATS.items() if f.scaling and f.scaling.rows == 1 and f.scaling.columns]
)
def test_groups_are_never_cut_off(name: str) -> None:
    """The engine computed with such rows, and plain PyTorch raised errors of its own."""
    form = FORMATS[name]
    scaling = form.scaling
    columns = scaling.columns + scaling.columns // 2
    data = torch.zeros(2, 3, columns // form.per_item, dtype=form.storage)
    scales = torch.zeros(2, 3, 2).to(scaling.dtypes[0])
    zeros = torch.zeros(2, 3, 2, dtype=torch.uint8) if scaling.zeros else None
    factors = torch.ones(2) if scaling.global_scales else None
    says = rf"^\[PackedTensor\] got rows of {columns} weights for format {name}; needs .* multiple of its group"
    with pytest.raises(InvalidInputError, match=says):
        PackedTensor(data, form, scales, zeros, factors)


def test_blocks_of_rows_may_be_cut_off() -> None:
    form = FORMATS["fp8-e4m3-b128"]
    data = torch.zeros(1, 130, 192, dtype=form.storage)
    assert moestro.formats.PackedTensor(data, form, torch.ones(1, 2, 2)).shape == (1, 130, 192)
