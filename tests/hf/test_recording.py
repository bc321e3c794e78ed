"""Recorded routing: what every expert layer was given, in the order of the model, and nothing else."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import zoo
from hf.models import built
from moestro.errors import UnsupportedError
from moestro.hf import accelerate, served
from moestro.hf.recording import recorded
from moestro.memory import Trace, least_budget


def of_forward(model: torch.nn.Module, **shape: int) -> tuple[Trace, list[np.ndarray]]:
    """What is recorded of a forward, and the ids that came to each layer of Transformers' interface."""
    given: list[np.ndarray] = []
    hooks = [
        model.get_submodule(layer.path).register_forward_pre_hook(
            lambda module, arguments: given.append(arguments[1].numpy().copy())
        )
        for layer in served(model)
        if layer.family == "experts interface"
    ]
    with recorded(model, "tiny") as recorder, torch.no_grad():
        zoo.outputs(model, zoo.inputs_of(model, **shape))
    for hook in hooks:
        hook.remove()
    return recorder.trace(), given


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_ids_of_every_layer(architecture: str) -> None:
    model = accelerate(built(architecture))
    trace, given = of_forward(model)
    layers = served(model)
    assert len(trace.layers) == len(layers) == len(given)
    assert trace.at.tolist() == list(range(len(layers)))
    assert trace.ids.tolist() == [int(e) for ids in given for e in ids.reshape(-1)]
    assert trace.tokens.tolist() == [len(ids) for ids in given]
    for layer, size in zip(layers, trace.layers, strict=True):
        module = model.get_submodule(layer.path)
        weights = [p for name, p in module.named_parameters() if "bias" not in name]
        assert size.expert_bytes == sum(p.nbytes for p in weights) // size.experts
    assert least_budget(trace.layers) > 0


@pytest.mark.parametrize("architecture", ["llama4", "jetmoe", "dbrx"])
def test_families_of_their_own(architecture: str) -> None:
    model = accelerate(built(architecture))
    trace, _ = of_forward(model, batch=1, length=7)
    assert len(trace.layers) == len(served(model))
    assert set(trace.tokens.tolist()) == {7}


def test_nothing_is_recorded_outside_and_hooks_go() -> None:
    model = accelerate(built("qwen3_moe"))
    with recorded(model, "tiny") as recorder:
        pass
    zoo.outputs(model, zoo.inputs_of(model))
    assert not recorder
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_layer_that_fails_is_left() -> None:
    """An error inside a layer leaves no layer running: the next forward is recorded as it is."""
    model = accelerate(built("qwen3_moe"))
    first = model.get_submodule(served(model)[0].path)
    with recorded(model, "tiny") as recorder, torch.no_grad():
        with pytest.raises(Exception, match=r"."):
            first(torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2))
        assert not recorder
        zoo.outputs(model, zoo.inputs_of(model))
        assert recorder.trace().at.tolist() == list(range(len(served(model))))


def test_another_thread_in_another_layer() -> None:
    """It comes to the last layer while this one is in the first; what this one does is recorded as it is."""
    model = accelerate(built("qwen3_moe"))
    stands, goes_on, main = threading.Event(), threading.Event(), threading.current_thread()
    other = threading.Thread(target=zoo.outputs, args=(model, zoo.inputs_of(model)))

    def begin(module: torch.nn.Module, arguments: object) -> None:
        if threading.current_thread() is main:
            other.start()
            stands.wait(60)

    def stand(module: torch.nn.Module, arguments: object) -> None:
        if threading.current_thread() is other:
            stands.set()
            goes_on.wait(60)

    first, last = (model.get_submodule(layer.path) for layer in (served(model)[0], served(model)[-1]))
    with recorded(model, "tiny") as recorder:
        hooks = [first.register_forward_pre_hook(begin), last.register_forward_pre_hook(stand)]
        zoo.outputs(model, zoo.inputs_of(model))
        goes_on.set()
        other.join()
        for hook in hooks:
            hook.remove()
    assert recorder.trace().at.tolist() == list(range(len(served(model))))


def test_a_model_that_moestro_does_not_serve() -> None:
    with (
        pytest.raises(UnsupportedError, match=r"tiny, of which moestro serves no expert layer"),
        recorded(built("qwen3_moe"), "tiny"),
    ):
        pass
