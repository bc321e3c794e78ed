"""Tiny models that several test files build, and what a refusal must look like."""

from __future__ import annotations

import pytest

import zoo
from moestro.errors import UnsupportedError
from moestro.hf import accelerate, served

INTERFACE = ["qwen3_moe", "gpt_oss", "nemotron_h", "muse_spark", "inkling2"]
FAMILIES = ["dbrx", "doge", "jetmoe", "llama4", "longcat_flash", "nllb_moe", "step3p7", "switch_transformers"]
ALL = INTERFACE + FAMILIES


def built(architecture, seed=0):
    return zoo.build(architecture, seed).model


def logits(model, seed=0):
    return zoo.outputs(model, zoo.inputs_of(model, seed))


def untouched(model, state):
    return (
        served(model) == []
        and all("forward" not in vars(m) for m in model.modules())
        and all(p.data_ptr() == place and p.stride() == stride for p, (place, stride) in state)
    )


def snapshot(model):
    return [(p, (p.data_ptr(), p.stride())) for p in model.parameters()]


def refused(model, *words):
    state = snapshot(model)
    with pytest.raises(UnsupportedError) as caught:
        accelerate(model)
    text = str(caught.value)
    assert text.startswith("[accelerate] got ")
    assert "; needs " in text
    for word in (type(model).__name__, *words):
        assert word in text, text
    assert untouched(model, state)
