"""Modules that are looked at again: any change that decides about their calls is seen, and steps follow it."""

from __future__ import annotations

import copy
import gc
import types
import weakref

import pytest
import torch
from torch import nn

from hf.test_expert_steps import follows, model_of
from hf.test_steps import logits_of_steps
from moestro.hf import attention_steps
from moestro.hf.snapshot import Snapshot
from moestro.hf.stand_in import KEPT
from moestro.hf.step import Steps
from moestro.ops import native
from moestro.ops.projection import measured

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="there is no engine")


class Part(nn.Module):
    """With a parameter of one element, a buffer, a number and a tensor of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(3))
        self.factor, self.beside, self.one, self.odd = 2.0, torch.ones(2), torch.ones(1), Odd()

    def forward(self, x):
        return self.factor * self.scale * x + self.shift


def whole():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Part(), nn.Linear(4, 4, bias=False)))


def put_forward_into_instance(module):
    module[1][0].forward = types.MethodType(lambda self, x: x, module[1][0])


def change_class(module):
    module[1][0].__class__ = type("Other", (Part,), {})


def square_in_place(module):
    module[0].weight.data = module[0].weight.data.t()


def swap_names(module):
    first, second = module[0], module[1]
    del module[0], module[0]
    module.add_module("1", first)
    module.add_module("0", second)


def replace_state(module):
    module[1][0].__dict__ = dict(module[1][0].__dict__, factor=3.0)


class Odd:
    """What cannot be compared."""

    def __eq__(self, other):
        return other.x

    __hash__ = None


CHANGES = {
    "names": swap_names,
    "state": replace_state,
    "dict of parameters": lambda m: setattr(m[0], "_parameters", dict(m[0]._parameters)),
    "dict of hooks": lambda m: setattr(m[0], "_forward_hooks", dict(m[0]._forward_hooks)),
    "part of a leaf": lambda m: m[0].add_module("more", nn.Identity()),
    "odd": lambda m: setattr(m[1][0], "odd", Odd()),
    "number that is a tensor": lambda m: setattr(m[1][0], "factor", torch.tensor(2.0)),
    "equal tensor beside": lambda m: setattr(m[1][0], "one", torch.ones(1)),
    "number": lambda m: setattr(m[1][0], "factor", 3.0),
    "new number": lambda m: setattr(m[0], "eps", 1e-6),
    "no number": lambda m: delattr(m[1][0], "factor"),
    "mode": lambda m: m.eval(),
    "tensor beside": lambda m: setattr(m[1][0], "beside", torch.ones(2)),
    "tensor of one element beside": lambda m: setattr(m[1][0], "beside", torch.full((1,), 7.0)),
    "equal parameter": lambda m: setattr(m[1][0], "scale", nn.Parameter(torch.ones(1))),
    "parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 4))),
    "no parameter": lambda m: setattr(m[0], "bias", None),
    "another parameter": lambda m: m[1][1].register_parameter("more", nn.Parameter(torch.ones(2))),
    "buffer": lambda m: setattr(m[1][0], "shift", torch.zeros(3)),
    "memory": lambda m: setattr(m[0].weight, "data", m[0].weight.data.clone()),
    "strides": square_in_place,
    "dtype": lambda m: m[1].to(torch.float64),
    "module": lambda m: setattr(m[1], "1", nn.Linear(4, 4, bias=False)),
    "another module": lambda m: m.append(nn.Identity()),
    "class": change_class,
    "forward": put_forward_into_instance,
    "hook": lambda m: m[1][1].register_forward_hook(lambda *_: None),
    "hook before": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "other": lambda m: m.other.resize_(3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    module, other = whole(), torch.ones(6)
    object.__setattr__(module, "other", other)
    snapshot = Snapshot(module, (other,))
    assert snapshot.is_current(module)
    CHANGES[change](module)
    assert not snapshot.is_current(module)


def test_what_a_class_does_is_seen(monkeypatch):
    module = whole()
    snapshot = Snapshot(module)
    with monkeypatch.context() as patch:
        patch.setattr(Part, "forward", lambda self, x: x)
        assert not snapshot.is_current(module)
        assert Snapshot(module).is_current(module)
    assert snapshot.is_current(module)
    monkeypatch.setattr(Part, "_call_impl", lambda self, x: x, raising=False)
    assert not snapshot.is_current(module)
    assert not Snapshot(module).is_current(module)  # whose call is more than its forward


def test_numbers_may_change_and_hooks_may_go():
    module = whole()
    snapshot = Snapshot(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    module.load_state_dict(whole().state_dict())
    module[1][0].factor = float("2.0")
    assert snapshot.is_current(module)
    hook = module[0].register_forward_hook(lambda *_: None)
    assert not snapshot.is_current(module)
    assert not Snapshot(module).is_current(module)
    hook.remove()
    assert snapshot.is_current(module)


def test_a_module_that_keeps_its_snapshot_goes():
    module, steps = whole(), Steps()
    module.__dict__[KEPT] = steps
    steps.of_layer = Snapshot(module)
    gone = weakref.ref(module)
    assert steps.of_layer.is_current(module)
    del steps
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()


def test_a_parameter_that_is_held_beside_too_is_followed():
    module = whole()
    module[1][0].__dict__["beside"] = module[0].weight
    snapshot = Snapshot(module)
    assert snapshot.is_current(module)
    module[0].weight.data = module[0].weight.data.clone()
    assert not snapshot.is_current(module)


def test_what_is_compared_is_the_same_object():
    one, items_are = 1000.5, native.engine().items_are
    assert items_are([{"a": one}, {}, {"b": None}], ["a", one, "b", None])
    assert items_are([{"a": one}], ["a", ...])
    for other in ([], ["a"], ["a", 1000.5 + one - one], ["b", one], ["a", one, "b"], [..., one, "a"]):
        assert not items_are([{"a": one}], other)
    assert not items_are([], ["a", one])
    with pytest.raises(ValueError, match="dicts that are none"):
        items_are([()], [])


@pytest.fixture
def engine_for_few_rows(monkeypatch):
    """Whatever is faster on this machine."""
    monkeypatch.setattr(measured, "most_rows", lambda *_: 256)


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe"])
def test_layers_are_looked_through_once(architecture, engine_for_few_rows, monkeypatch):
    model, looked, own = model_of(architecture), [], attention_steps.step_for
    monkeypatch.setattr(attention_steps, "step_for", lambda *given: looked.append(1) or own(*given))
    wanted = logits_of_steps(model)
    assert len(looked) == len(model.model.layers)
    assert torch.equal(logits_of_steps(model), wanted)
    assert len(looked) == len(model.model.layers)
    assert follows(model, monkeypatch)


def test_layers_are_looked_through_once_for_each_kind_of_call(engine_for_few_rows, monkeypatch):
    model, looked, own = model_of("qwen3_moe"), [], attention_steps.step_for
    monkeypatch.setattr(attention_steps, "step_for", lambda *given: looked.append(1) or own(*given))
    had, counts = torch.get_num_threads(), []
    try:
        for batch, threads in ((1, 1), (3, 1), (3, 2), (1, 1), (3, 2)):
            torch.set_num_threads(threads)
            logits_of_steps(model, batch)
            counts.append(len(looked))
    finally:
        torch.set_num_threads(had)
    layers = len(model.model.layers)
    assert counts == [layers, 2 * layers, 3 * layers, 3 * layers, 3 * layers]


@pytest.mark.parametrize("part", ["mlp", "self_attn", "input_layernorm"])
def test_a_shallow_copy_is_looked_at_by_itself(part, engine_for_few_rows, monkeypatch):
    """It shares what the layer keeps of its steps."""
    model = model_of("qwen3_moe")
    before, layers = logits_of_steps(model), model.model.layers
    new = copy.copy(layers[0])
    new._modules = dict(layers[0]._modules)
    other = copy.deepcopy(getattr(layers[1], part))
    for parameter in other.parameters():
        parameter.data.mul_(-0.5)
    new._modules[part] = other
    layers[0] = new
    assert follows(model, monkeypatch)
    assert not torch.equal(logits_of_steps(model), before)


def test_norms_that_change_places_are_followed(engine_for_few_rows, monkeypatch):
    model = model_of("qwen3_moe")
    layer = model.model.layers[0]
    layer.input_layernorm.weight.data.mul_(1.7)
    before = logits_of_steps(model)
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    del layer.input_layernorm, layer.post_attention_layernorm
    layer.post_attention_layernorm, layer.input_layernorm = first, second
    found = logits_of_steps(model)
    assert not torch.equal(found, before)
    monkeypatch.setattr(attention_steps.LayerSteps, "is_current", lambda *_: False)
    assert torch.equal(logits_of_steps(model), found)


def test_a_model_that_nobody_holds_goes(engine_for_few_rows):
    model = model_of("qwen3_moe")
    logits_of_steps(model)
    last = model.model.layers[-1]
    gone = [weakref.ref(each) for each in (last, last.mlp.experts, last.mlp.experts.down_proj, last.self_attn.q_proj)]
    del model, last
    gc.collect()
    assert [each() for each in gone] == [None] * 4


def test_what_was_replaced_goes_with_the_next_step(engine_for_few_rows):
    model = model_of("qwen3_moe")
    logits_of_steps(model)
    module = model.model.layers[0].self_attn.q_proj
    old = weakref.ref(module.stored.data)
    module.stored = type(module.stored)(
        format=module.stored.format,
        **{name: getattr(module.stored, name).clone() for name in module.stored.format.names},
    )
    logits_of_steps(model)
    gc.collect()
    assert old() is None
