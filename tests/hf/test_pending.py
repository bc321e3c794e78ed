"""Layers that are computed when somebody looks: the numbers are those of layers that are computed at once, whoever
looks where."""

from __future__ import annotations

import copy
import gc
import pickle
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from hf.test_expert_steps import blocks_by_modules, blocks_of, model_of
from hf.test_steps import CACHES, inputs, logits_of_steps
from moestro.hf import attention_steps
from moestro.hf.pending import Chain, Later, Pending, settled
from moestro.ops import native
from moestro.ops.projection import measured

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="there is no engine")

ARCHITECTURES = ("gpt_oss", "mixtral", "olmoe", "qwen3_moe")


@pytest.fixture(autouse=True)
def engine_for_few_rows(monkeypatch):
    """Whatever is faster on this machine."""
    monkeypatch.setattr(measured, "most_rows", lambda *_: 256)


@contextmanager
def postponed():
    """The layers whose tokens are not computed at once."""
    made, of = [], Pending.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "of", lambda *arguments: made.append(1) or of(*arguments))
        yield made


def steps(model, batch=1, count=6):
    return logits_of_steps(model, batch, count, CACHES["appending"])


def at_once(model, monkeypatch, **how):
    with monkeypatch.context() as patch:
        own = attention_steps.is_untouched
        patch.setattr(
            attention_steps, "is_untouched", lambda module: own(module) and "self_attn" not in module._modules
        )
        with postponed() as made:
            found = steps(model, **how)
        assert not made
        return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_bits_as_at_once(architecture, monkeypatch):
    model = model_of(architecture)
    for batch in (1, 3):
        steps(model, batch)
        with postponed() as made:
            found = steps(model, batch)
        assert len(made) >= 4 * (len(model.model.layers) - 1)  # a window has no room before its first token
        assert type(found) is torch.Tensor
        assert torch.equal(found, at_once(model, monkeypatch, batch=batch))


def test_all_layers_but_the_last_are_postponed():
    model = model_of("qwen3_moe")
    steps(model)
    with postponed() as made:
        steps(model)
    assert len(made) == 5 * (len(model.model.layers) - 1)


@pytest.mark.parametrize("of", [0, -1])
@pytest.mark.parametrize("kind", ["before", "after", "norm"])
def test_hooks_see_numbers(of, kind, monkeypatch):
    model = model_of("qwen3_moe")
    steps(model)
    layer, seen = model.model.layers[of], []
    if kind == "before":
        hook = layer.register_forward_pre_hook(lambda module, given: seen.append(given[0].clone()))
    elif kind == "after":
        hook = layer.register_forward_hook(lambda module, given, found: seen.append(found + 0.0))
    else:
        hook = model.model.norm.register_forward_pre_hook(lambda module, given: seen.append(given[0].clone()))
    found = steps(model)
    mine = list(seen)
    seen.clear()
    wanted = at_once(model, monkeypatch)
    hook.remove()
    assert torch.equal(found, wanted)
    assert len(mine) == len(seen) == 6
    assert all(type(each) is torch.Tensor for each in mine)
    assert all(torch.equal(a, b) for a, b in zip(mine, seen, strict=True))


def test_a_layer_that_is_not_known_is_given_numbers(monkeypatch):
    """What lies between two layers that are known: it changes the tokens, in place too."""

    class Between(nn.Module):
        attention_type = "full_attention"

        def __init__(self, layer, in_place):
            super().__init__()
            self.layer, self.in_place = layer, in_place

        def forward(self, hidden_states, **kwargs):
            x = hidden_states.mul_(1.5) if self.in_place else hidden_states * 1.5
            return self.layer(x, **kwargs)

    for in_place in (True, False):
        model = model_of("olmoe")
        steps(model)
        plain = steps(model)
        model.model.layers[1] = Between(model.model.layers[1], in_place)
        found = steps(model)
        assert torch.equal(found, at_once(model, monkeypatch))
        assert not torch.equal(found, plain)


def test_hidden_states_are_given_out(monkeypatch):
    model, cache = model_of("qwen3_moe"), CACHES["appending"]
    steps(model)

    @torch.no_grad()
    def states():
        past = cache(model)
        model(**inputs(1, 7), past_key_values=past, use_cache=True)
        named = {"past_key_values": past, "use_cache": True, "output_hidden_states": True}
        return model(input_ids=torch.tensor([[5]]), **named).hidden_states

    found = states()
    with blocks_by_modules(monkeypatch):
        wanted = states()
    assert len(found) == len(wanted) == len(model.model.layers) + 1
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_logits_that_only_torch_takes_in_the_middle(monkeypatch):
    """Where the engine's router has no answer, the block's own code gives it, and the layers behind go on."""
    model = model_of("qwen3_moe")
    steps(model)
    with torch.no_grad():
        blocks_of(model)[0].gate.weight[3] = torch.inf
    found, wanted = steps(model), at_once(model, monkeypatch)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


def test_generation(monkeypatch):
    model = model_of("olmoe")
    ids = inputs(2, 9)
    asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def generated():
        return model.generate(**ids, **asked, past_key_values=CACHES["appending"](model))

    with postponed() as made:
        found = generated()
    assert made
    with blocks_by_modules(monkeypatch):
        assert torch.equal(generated(), found)


def pending(values):
    """Numbers that a chain computes, and how often it did."""
    plain, runs = torch.full((2, 1, 3), torch.nan), []

    def compute():
        runs.append(1)
        plain.copy_(values)

    chain = Chain()
    chain.add(Later(((compute, ()),), (plain,), ()), lambda: None)
    return Pending.of(plain, chain), runs


VALUES = torch.arange(6.0).view(2, 1, 3)
LOOKS = {
    "sum": lambda x: x + 0,
    "method": lambda x: x.clone(),
    "several": lambda x: torch.cat([x, x])[:2],
    "named": lambda x: torch.add(input=x, other=0),
    "numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "array": lambda x: torch.from_numpy(np.asarray(x).copy()),
    "list": lambda x: torch.tensor(x.tolist()),
    "index": lambda x: torch.stack([x[0], x[1]]),
    "module": lambda x: nn.Identity()(x) * 1,
    "linear": lambda x: nn.functional.linear(x, torch.eye(3)),
    "address": lambda x: (x.data_ptr(), x.plain.clone())[1],
    "data": lambda x: x.data.clone(),
    "copy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "in place": lambda x: x.add_(0),
    "from dlpack": lambda x: torch.from_dlpack(x).clone(),
    "detach": lambda x: x.detach(),
    "double": lambda x: x.double().float(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_sees_numbers(look):
    x, runs = pending(VALUES)
    found = LOOKS[look](x)
    assert runs == [1]
    assert torch.equal(found, VALUES)
    assert torch.equal(x, VALUES)
    assert torch.equal(settled(x), VALUES)
    assert runs == [1]


def test_what_it_looks_like():
    x, runs = pending(VALUES)
    assert isinstance(x, torch.Tensor)
    assert "3., 4., 5." in repr(x)
    assert float(x.sum()) == 15.0
    assert tuple(x.shape) == (2, 1, 3)
    assert [float(each) for each in x.flatten()] == [0, 1, 2, 3, 4, 5]
    assert runs == [1]


def test_what_cannot_be_computed_is_computed_otherwise():
    plain, seen = torch.zeros(3), []
    chain = Chain()
    chain.add(Later(((lambda: seen.append("call"), ()), (lambda: False, ())), (plain,), ()), lambda: seen.append("own"))
    chain.add(Later(((lambda: seen.append("next"), ()),), (plain,), ()), lambda: seen.append("never"))
    x = Pending.of(plain, chain)
    assert torch.equal(x + 0, plain)
    assert seen == ["call", "own", "next"]


def test_what_fails_is_computed_by_the_next_who_looks():
    """And nobody is given memory that was not written."""
    plain, answers = torch.full((3,), torch.nan), [ValueError("no"), KeyboardInterrupt(), None]

    def compute():
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        plain.zero_()

    chain = Chain()
    chain.add(Later(((lambda: None, ()), (compute, ())), (plain,), ()), lambda: None)
    x = Pending.of(plain, chain)
    for wrong in (ValueError, KeyboardInterrupt):
        with pytest.raises(wrong):
            x.sum()
    assert float(x.sum()) == 0.0


def test_what_a_layer_returns_is_saved_as_any_tensor(tmp_path):
    model, seen = model_of("qwen3_moe"), []
    steps(model)
    hook = model.model.layers[0].register_forward_hook(lambda module, given, found: seen.append(found))
    steps(model)
    hook.remove()
    torch.save(seen[-1], tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt"), seen[-1])


def test_nothing_is_held_once_it_was_computed():
    x, _ = pending(VALUES)
    held = nn.Linear(2, 2)
    x.chain.add(Later((), (), (held,)), lambda: None)
    found = x + 0
    gone = [each for each in gc.get_referrers(held) if isinstance(each, tuple)]
    assert not gone
    assert torch.equal(found, VALUES)
