"""Steps of attention under calls, masks and changes that their trials do not show."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeAttention,
    Qwen3MoeDecoderLayer,
    Qwen3MoeRMSNorm,
    Qwen3MoeTopKRouter,
)

import moestro
from architectures import relative_error
from hf.test_steps import EXACT, attention_of, cache_of, counted, inputs, logits_of_steps, one_by_one, served_model
from moestro.hf import served_steps
from moestro.hf.attention_steps import is_known_attention, is_known_layer
from moestro.ops import native
from moestro.ops.dispatch import observed
from moestro.ops.expert_mlp import EXPERT_MLP

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="there is no engine")


@torch.no_grad()
def logits_after(model, step, batch=2):
    """Of one call behind a prompt of seven tokens; `step` gives its arguments."""
    cache = cache_of(model)
    model(input_ids=inputs(batch, 7)["input_ids"], past_key_values=cache, use_cache=True)
    return model(**step(model), past_key_values=cache, use_cache=True).logits


def last_of_several(model):
    ids = torch.tensor([[4, 5, 6], [7, 8, 9]])
    return {"inputs_embeds": model.get_input_embeddings()(ids)[:, -1:]}


def one_for_all(model):
    return {"inputs_embeds": model.get_input_embeddings()(torch.tensor([[4]])).expand(2, 1, -1)}


def mask_of_columns(model):
    mask = torch.zeros(8, 2)
    mask[:4, 0] = -1e9
    return {"input_ids": torch.tensor([[4], [5]]), "attention_mask": mask.t()[:, None, None]}


def mask_of_nothing(model):
    mask = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    mask[0] = False
    return {"input_ids": torch.tensor([[4], [5]]), "attention_mask": mask}


@pytest.mark.parametrize("step", [last_of_several, one_for_all, mask_of_columns, mask_of_nothing])
@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe"])
def test_rows_and_masks_that_lie_apart(architecture, step, monkeypatch):
    model, plain = served_model(architecture), one_by_one(architecture, monkeypatch)
    with counted() as calls:
        found = logits_after(model, step)
    assert calls
    assert relative_error(found, logits_after(plain, step)) < EXACT


def test_on_any_default_device():
    model = served_model("qwen3_moe")
    step = {"input_ids": torch.tensor([[4], [5]]), "position_ids": torch.tensor([[7], [7]])}
    wanted = logits_after(model, lambda _: step)
    cache = cache_of(model)
    with torch.no_grad(), counted() as calls:
        model(input_ids=inputs(2, 7)["input_ids"], past_key_values=cache, use_cache=True)
        with torch.device("meta"):
            found = model(**step, past_key_values=cache, use_cache=True).logits
    assert calls
    assert torch.equal(found, wanted)


def test_nobody_sees_the_tokens_of_a_trial():
    model, seen = served_model("qwen3_moe"), []
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    for router in routers:
        router.register_forward_hook(lambda *_: seen.append("router"))
    with observed(EXPERT_MLP, lambda *_: seen.append("experts")), counted() as calls:
        logits_of_steps(model, steps=2)
    assert calls
    assert seen.count("router") == seen.count("experts") == 2 * len(routers)


@pytest.mark.parametrize("of", ["attention", "layer", "norm"])
def test_a_forward_put_into_a_class_later_runs(of, monkeypatch):
    model = served_model("qwen3_moe")
    wanted = logits_of_steps(model)
    cls = {"attention": Qwen3MoeAttention, "layer": Qwen3MoeDecoderLayer, "norm": Qwen3MoeRMSNorm}[of]
    own, seen = cls.forward, []

    def told(self, *arguments, **named):
        seen.append(self)
        return own(self, *arguments, **named)

    monkeypatch.setattr(cls, "forward", told)
    found = logits_of_steps(model)
    assert len(set(seen)) == sum(isinstance(module, cls) for module in model.modules())
    assert len(seen) == 6 * len(set(seen))
    assert relative_error(found, wanted) < EXACT


def test_a_class_that_takes_more_is_not_known():
    """Its forward may use it, and no trial gives it any."""
    model = served_model("qwen3_moe")
    layer = next(module for module in model.modules() if is_known_layer(module))

    class Scaled(Qwen3MoeAttention):
        def forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values=None, scales=None, **kwargs
        ):
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)

    class Typed(Qwen3MoeDecoderLayer):
        def forward(self, hidden_states, token_types=None, **kwargs):
            return super().forward(hidden_states, **kwargs)

    layer.__class__ = Typed
    assert not is_known_layer(layer)
    assert is_known_attention(layer.self_attn)
    layer.self_attn.__class__ = Scaled
    assert not is_known_attention(layer.self_attn)


def test_a_layer_that_cannot_be_tried_is_its_own():
    model = served_model("qwen3_moe")
    wanted = logits_of_steps(model)
    layer = next(module for module in model.modules() if is_known_layer(module))
    own = type(layer)._moestro_own_class

    class Reader(own):
        def forward(self, hidden_states, **kwargs):
            assert self.mlp.gate.top_k
            return super().forward(hidden_states, **kwargs)

    layer.__class__ = Reader
    moestro.accelerate(model, projections="int8")
    assert relative_error(logits_of_steps(model), wanted) < EXACT


def test_a_number_of_a_layer_that_changes_is_followed():
    model = served_model("qwen3_moe")
    layer = next(module for module in model.modules() if is_known_layer(module))

    class Louder(type(layer)._moestro_own_class):
        def forward(self, hidden_states, **kwargs):
            return self.multiplier * super().forward(hidden_states, **kwargs)

    layer.__class__, layer.multiplier = Louder, 1.0
    moestro.accelerate(model, projections="int8")
    assert type(layer) is not Louder
    before = logits_of_steps(model)
    assert set(served_steps(model).values()) == {None}
    layer.multiplier = 3.0
    found = logits_of_steps(model)
    layer.__class__ = Louder
    assert relative_error(found, logits_of_steps(model)) < EXACT
    assert relative_error(found, before) > 100 * EXACT


def test_a_part_that_comes_back_is_served_again():
    model = served_model("qwen3_moe")
    wanted, module = logits_of_steps(model), attention_of(model)
    part = module.q_proj
    module.q_proj = nn.Sequential(part)
    assert relative_error(logits_of_steps(model), wanted) < EXACT
    module.q_proj = part
    logits_of_steps(model)
    with counted() as calls:
        assert torch.equal(logits_of_steps(model), wanted)
    assert len(calls) == 5 * len(served_steps(model))


def test_what_is_said_of_steps_is_of_the_last_one():
    model = served_model("qwen3_moe")
    logits_of_steps(model)
    module = attention_of(model)
    hook = module.v_proj.register_forward_hook(lambda *_: None)
    logits_of_steps(model)
    assert any(reason is not None and "hook" in reason for reason in served_steps(model).values())
    hook.remove()
    logits_of_steps(model)
    assert set(served_steps(model).values()) == {None}
