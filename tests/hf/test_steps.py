"""Attention of one new token as a whole: what the modules' own code computes, and that code wherever it is not known to
be the same."""

from __future__ import annotations

import copy
import pickle
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache

import moestro
import zoo
from architectures import relative_error
from hf.models import built
from moestro.hf import attention_steps, beside, served_steps
from moestro.hf.attention_steps import is_known_attention
from moestro.hf.cache import AppendingLayer, appending_cache
from moestro.hf.stand_in import KEPT
from moestro.hf.step import Step
from moestro.ops import native
from moestro.ops.dispatch import observed
from moestro.ops.projection import PROJECTION
from moestro.profiling.calls import observed_calls

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="there is no engine")

SERVED = (
    *("aria", "dots1", "exaone_moe", "glm4_moe", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared"),
    *("mellum", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "solar_open"),
)
"""Families whose attention is known; not all that are."""

NOT_SERVED = {
    "cohere2_moe": "it computes something else",  # neighbours are turned, not halves
    "flint": "it computes something else",
    "qwen3_next": "its projections do not take",  # half of the queries are gates
}
EXACT = 1e-5
"""Of float32, where the own code and the engine add in other orders."""


def with_sdpa(model):
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    return model


def served_model(architecture, projections="int8"):
    """In float32, with linear modules that the engine multiplies."""
    return moestro.accelerate(with_sdpa(built(architecture)), projections=projections)


def one_by_one(architecture, monkeypatch, projections="int8"):
    """The same model, module by module."""
    with monkeypatch.context() as patch:
        for name in ("serve_norms", "serve_attention_steps", "serve_router_steps"):
            patch.setattr(beside, name, lambda model: None)
        return served_model(architecture, projections)


def inputs(batch, length):
    ids = torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(length))
    seen = torch.ones_like(ids)
    seen[1:, :3] = 0
    return {"input_ids": ids, "attention_mask": seen}


def cache_of(model):
    return DynamicCache(config=model.config.get_text_config(decoder=True))


@torch.no_grad()
def logits_of_steps(model, batch=1, steps=6, make_cache=cache_of, same_tokens=False):
    """Of a prompt, and of tokens that follow it one by one, maybe the same ones in every sequence."""
    given, cache, found = inputs(batch, 7), make_cache(model), []
    for step in range(steps):
        out = model(**given, past_key_values=cache, use_cache=True)
        found.append(out.logits[:, -1])
        ids = torch.randint(3, 90, (1 if same_tokens else batch, 1), generator=torch.Generator().manual_seed(step))
        ids = ids.expand(batch, 1)
        given = {
            "input_ids": ids,
            "attention_mask": torch.cat([given["attention_mask"], torch.ones(batch, 1, dtype=torch.int64)], 1),
        }
    return torch.stack(found)


@contextmanager
def counted():
    """Counts the steps that run as a whole; trials are among them."""
    calls, run = [], Step.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "run", lambda *arguments: calls.append(1) or run(*arguments))
        yield calls


def attention_of(model):
    return next(module for module in model.modules() if is_known_attention(module))


@pytest.mark.parametrize("architecture", SERVED)
def test_a_step_is_what_the_modules_compute(architecture, monkeypatch):
    model, plain = served_model(architecture), one_by_one(architecture, monkeypatch)
    assert not hasattr(type(attention_of(plain)), "_moestro_own_class")
    for batch in (1, 2):
        found, wanted = logits_of_steps(model, batch), logits_of_steps(plain, batch)
        assert relative_error(found, wanted) < EXACT
    assert set(served_steps(model).values()) == {None}
    with counted() as calls:
        logits_of_steps(model, 2)
    assert len(calls) == 5 * len(served_steps(model))


@pytest.mark.parametrize("architecture", NOT_SERVED)
def test_other_attention_is_the_models_own(architecture, monkeypatch):
    model, plain = served_model(architecture), one_by_one(architecture, monkeypatch)
    assert relative_error(logits_of_steps(model), logits_of_steps(plain)) < EXACT
    reasons = served_steps(model).values()
    assert reasons
    assert all(reason is not None and reason.startswith(NOT_SERVED[architecture]) for reason in reasons), reasons


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("projections", ["auto", "int8"])
def test_in_bfloat16(architecture, projections, monkeypatch):
    model = moestro.accelerate(with_sdpa(zoo.to_bfloat16(built(architecture))), projections=projections)
    with monkeypatch.context() as patch:
        patch.setattr(beside, "serve_router_steps", lambda model: None)
        patch.setattr(beside, "serve_norms", lambda model: None)
        patch.setattr(beside, "serve_attention_steps", lambda model: None)
        plain = moestro.accelerate(with_sdpa(zoo.to_bfloat16(built(architecture))), projections=projections)
    assert relative_error(logits_of_steps(model, 2), logits_of_steps(plain, 2)) < 5e-2
    reasons = set(served_steps(model).values())
    assert reasons == {None} or all("runs in torch" in str(reason) for reason in reasons)


CACHES = {
    "appending": lambda model: appending_cache(model, model.generation_config)["past_key_values"],
    "dynamic": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=32),
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe"])
def test_any_cache(architecture, name, monkeypatch):
    model, plain = served_model(architecture), one_by_one(architecture, monkeypatch)
    for batch in (1, 2):
        found = logits_of_steps(model, batch, make_cache=CACHES[name])
        assert relative_error(found, logits_of_steps(plain, batch)) < EXACT


def test_a_cache_that_the_engine_does_not_read(monkeypatch):
    """Keys whose columns are apart: what is left of the step is done module by module."""
    model, plain = served_model("gpt_oss"), one_by_one("gpt_oss", monkeypatch)
    update = DynamicCache.update

    def apart(*arguments, **named):
        return tuple(t.transpose(2, 3).contiguous().transpose(2, 3) for t in update(*arguments, **named))

    logits_of_steps(model, 2)
    monkeypatch.setattr(DynamicCache, "update", apart)
    with counted() as calls:
        found = logits_of_steps(model, 2)
    assert calls
    assert relative_error(found, logits_of_steps(plain, 2)) < EXACT


def test_a_cache_with_room_is_written_in_place(monkeypatch):
    model = served_model("qwen3_moe")
    updates, update = [], AppendingLayer.update
    caches = []
    monkeypatch.setattr(AppendingLayer, "update", lambda *a, **k: updates.append(1) or update(*a, **k))

    def make(model):
        caches.append(CACHES["appending"](model))
        return caches[-1]

    logits_of_steps(model, 2, make_cache=make)
    assert len(updates) == len(caches[0].layers)  # of the prompt
    assert {layer.get_seq_length() for layer in caches[0].layers} == {12}


def test_beams_are_the_models_own(monkeypatch):
    model, plain = served_model("qwen3_moe"), one_by_one("qwen3_moe", monkeypatch)
    asked = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    found, wanted = (m.generate(**inputs(2, 7), **asked) for m in (model, plain))
    assert torch.equal(found, wanted)


def test_before_and_without_a_step():
    model = served_model("qwen3_moe")
    assert set(served_steps(model).values()) == {"no step that it takes has come yet"}
    model.set_attn_implementation("eager")
    assert all("'eager'" in reason for reason in served_steps(model).values())
    with counted() as calls:
        logits_of_steps(model)
    assert not calls
    assert served_steps(moestro.accelerate(built("qwen3_moe"))) == {}


def test_hooks_and_observers_see_every_module():
    model = served_model("qwen3_moe")
    wanted, seen = logits_of_steps(model), []
    part = attention_of(model).k_proj
    hook = part.register_forward_hook(lambda *_: seen.append("hook"))
    assert relative_error(logits_of_steps(model), wanted) < EXACT
    hook.remove()
    with observed_calls(part, lambda *_: seen.append("begin"), lambda _: None):
        assert relative_error(logits_of_steps(model), wanted) < EXACT
    with observed(PROJECTION, lambda *_: seen.append("operation")):
        logits_of_steps(model)
    every = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append("all"))
    try:
        logits_of_steps(model)
    finally:
        every.remove()
    assert seen.count("hook") == seen.count("begin") == 6
    assert {"operation", "all"} <= set(seen)
    with counted() as calls:
        assert torch.equal(logits_of_steps(model), wanted)
    assert calls


def test_a_forward_of_its_own_runs():
    model = served_model("qwen3_moe")
    logits_of_steps(model)
    part = attention_of(model).v_proj
    part.forward = lambda x: type(part).forward(part, x) * 0.5
    with counted() as calls:
        halved = logits_of_steps(model)
    assert len(calls) == 5 * (len(served_steps(model)) - 1)
    del part.forward
    assert not torch.equal(halved, logits_of_steps(model))


@pytest.mark.parametrize("change", ["data", "values", "norm", "sinks", "replaced"])
def test_parameters_that_change_are_followed(change, monkeypatch):
    architecture = "gpt_oss" if change == "sinks" else "qwen3_moe"
    model, plain = served_model(architecture, "int8"), one_by_one(architecture, monkeypatch, "int8")
    before = logits_of_steps(model)
    with torch.no_grad():
        for each in (model, plain):
            module = attention_of(each)
            if change == "data":
                module.k_norm.weight.data = module.k_norm.weight.data * 1.5
            elif change == "values":
                module.q_norm.weight.mul_(0.5)
            elif change == "norm":
                module.q_norm.variance_epsilon = 1.0
            elif change == "sinks":
                module.sinks.fill_(3.0)
            else:
                torch.manual_seed(0)
                module.o_proj = nn.Linear(module.o_proj.in_features, module.o_proj.out_features, bias=False)
    found = logits_of_steps(model)
    assert relative_error(found, logits_of_steps(plain)) < EXACT
    assert relative_error(found, before) > 100 * EXACT


def test_a_cast_model_is_served_anew():
    model = served_model("qwen3_moe")
    logits_of_steps(model)
    wanted = logits_of_steps(model.bfloat16())
    assert wanted.dtype == torch.bfloat16
    assert logits_of_steps(model.float()).dtype == torch.float32


def test_copies_are_served_and_their_own():
    model = served_model("qwen3_moe")
    wanted = logits_of_steps(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert attention_of(copied).__dict__.get(KEPT) is None
        with counted() as calls:
            assert torch.equal(logits_of_steps(copied), wanted)
        assert calls
        with torch.no_grad():
            attention_of(copied).q_norm.weight.mul_(2.0)
        assert not torch.equal(logits_of_steps(copied), wanted)
    assert torch.equal(logits_of_steps(model), wanted)
    assert type(attention_of(model)).__name__ == "Qwen3MoeAttention"
    assert type(attention_of(model)) is type(attention_of(moestro.accelerate(model, projections="int8")))


def test_who_wants_single_operations_gets_them():
    model = served_model("qwen3_moe")
    logits_of_steps(model)
    given = inputs(1, 7) | {"use_cache": True}
    with counted() as calls:
        with moestro.use(implementation="torch"):
            logits_of_steps(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits_of_steps(model)
        past = model(**given).past_key_values
        model(input_ids=torch.tensor([[5]]), past_key_values=past).logits.sum().backward()
        model.train()
        logits_of_steps(model)
        model.eval()
    assert not calls
    assert model.get_input_embeddings().weight.grad is not None


def test_a_module_that_computes_something_else_is_left_alone(monkeypatch):
    """Whatever its attributes say: a trial compares what comes out."""
    model = served_model("qwen3_moe")
    module = attention_of(model)
    own = type(module)._moestro_own_class

    class Louder(own):
        def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
            y, weights = super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
            return 1.25 * y, weights

    module.__class__ = Louder
    wanted = logits_of_steps(model)
    attention_steps.stand_in(module, attention_steps._attended)
    assert torch.equal(logits_of_steps(model), wanted)
    path = next(name for name, each in model.named_modules() if each is module)
    assert served_steps(model)[path] == "it computes something else than rotary positions and a softmax"


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe"])
def test_bits_do_not_depend_on_the_batch_in_deterministic_mode(architecture):
    """Nor on what memory held before, which PyTorch then fills with NaN."""
    model = served_model(architecture)
    torch.use_deterministic_algorithms(True)
    try:
        with counted() as calls:
            alone = logits_of_steps(model, 1, make_cache=CACHES["appending"])
        given = {name: value.repeat(3, 1) for name, value in inputs(1, 7).items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "inputs", lambda batch, length: given)
            three = logits_of_steps(model, 3, make_cache=CACHES["appending"], same_tokens=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls
    assert torch.equal(three, alone.expand_as(three))
