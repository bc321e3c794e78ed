"""A router, its experts and the sum with what came before as one call: the same bits as module by module, and their own
code wherever a block is not known to do just that."""

from __future__ import annotations

import copy
import pickle
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import moestro
import zoo
from architectures import relative_error
from hf.models import built
from hf.test_steps import CACHES, cache_of, inputs, logits_of_steps, with_sdpa
from moestro.hf import attention_steps
from moestro.hf.expert_steps import Block, ExpertStep, expert_step_for
from moestro.hf.stand_in import KEPT
from moestro.ops import native
from moestro.ops.dispatch import observed
from moestro.ops.expert_mlp import EXPERT_MLP
from moestro.ops.projection import measured

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="there is no engine")

SERVED = ("gpt_oss", "mixtral", "olmoe", "qwen3_moe")
"""Families whose blocks are a router and experts."""

OTHERS = ("glm4_moe", "qwen2_moe")
"""Families with a shared expert beside them."""


@pytest.fixture(autouse=True)
def engine_for_few_rows(monkeypatch):
    """Whatever is faster on this machine."""
    monkeypatch.setattr(measured, "most_rows", lambda *_: 256)


@contextmanager
def counted():
    """The blocks' steps that run."""
    calls, later = [], ExpertStep.later
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertStep, "later", lambda *arguments: calls.append(1) or later(*arguments))
        yield calls


@contextmanager
def blocks_by_modules(monkeypatch):
    """The modules of blocks are called."""
    with monkeypatch.context() as patch:
        patch.setattr(attention_steps, "expert_step_for", lambda *_: None)
        patch.setattr(attention_steps.LayerSteps, "is_current", lambda *_: False)
        yield


def without(model, monkeypatch, **how):
    """Logits where the modules of blocks are called."""
    with blocks_by_modules(monkeypatch):
        return logits_of_steps(model, **how)


def blocks_of(model):
    return [layer.mlp for layer in model.model.layers]


def model_of(architecture):
    """In bfloat16, in which the engine multiplies routers' matrices."""
    return moestro.accelerate(with_sdpa(zoo.to_bfloat16(built(architecture))), projections="int8")


@pytest.mark.parametrize("architecture", SERVED)
def test_the_same_bits_as_module_by_module(architecture, monkeypatch):
    model = model_of(architecture)
    for batch in (1, 3):
        with counted() as calls:
            found = logits_of_steps(model, batch, make_cache=CACHES["appending"])
        assert len(calls) == 5 * len(blocks_of(model))
        assert torch.equal(found, without(model, monkeypatch, batch=batch, make_cache=CACHES["appending"]))


@pytest.mark.parametrize("architecture", OTHERS)
def test_blocks_with_more_in_them_are_their_own(architecture, monkeypatch):
    model = model_of(architecture)
    with counted() as calls:
        found = logits_of_steps(model)
    assert not calls
    assert torch.equal(found, without(model, monkeypatch))


def follows(model, monkeypatch):
    """Whether steps run, and give what the modules give."""
    with counted() as calls:
        found = logits_of_steps(model)
    assert torch.equal(found, without(model, monkeypatch))
    return bool(calls)


def test_parameters_that_change_are_followed(monkeypatch):
    model = model_of("qwen3_moe")
    assert follows(model, monkeypatch)
    block = blocks_of(model)[0]
    before = logits_of_steps(model)
    changes = (
        lambda: block.gate.weight.data.mul_(-1.0),
        lambda: setattr(block.gate, "weight", nn.Parameter(torch.randn_like(block.gate.weight))),
        lambda: block.experts.down_proj.data.mul_(0.5),
        lambda: setattr(block.experts, "down_proj", nn.Parameter(2 * torch.randn_like(block.experts.down_proj))),
        lambda: setattr(block.experts.gate_up_proj, "data", block.experts.gate_up_proj.data.flip(0).contiguous()),
        lambda: setattr(block.gate, "top_k", 1),
        lambda: setattr(block.gate, "norm_topk_prob", not block.gate.norm_topk_prob),
    )
    for change in changes:
        change()
        assert follows(model, monkeypatch)
        after = logits_of_steps(model)
        assert not torch.equal(after, before)
        before = after


def test_biases_of_experts_that_change_are_followed(monkeypatch):
    model = model_of("gpt_oss")
    before, experts = logits_of_steps(model), blocks_of(model)[0].experts
    experts.down_proj_bias.data.add_(1.0)
    assert follows(model, monkeypatch)
    middle = logits_of_steps(model)
    experts.down_proj_bias = nn.Parameter(torch.zeros_like(experts.down_proj_bias))
    assert follows(model, monkeypatch)
    assert len({tuple(each.flatten().tolist()) for each in (before, middle, logits_of_steps(model))}) == 3


@pytest.mark.parametrize("of", ["gate", "experts", "block"])
@pytest.mark.parametrize("before", [True, False])
def test_hooks_are_called(of, before, monkeypatch):
    model, seen = model_of("qwen3_moe"), []
    wanted, block = logits_of_steps(model), blocks_of(model)[1]
    module = block if of == "block" else getattr(block, of)
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register(lambda *_: seen.append(1))
    with counted() as calls:
        assert torch.equal(logits_of_steps(model), wanted)
    assert len(seen) == 6
    assert len(calls) == 5 * (len(blocks_of(model)) - 1)
    handle.remove()
    with counted() as calls:
        logits_of_steps(model)
    assert len(calls) == 5 * len(blocks_of(model))


def test_observers_are_told(monkeypatch):
    model, seen = model_of("qwen3_moe"), []
    wanted = logits_of_steps(model)
    with observed(EXPERT_MLP, lambda *_: seen.append(1)), counted() as calls:
        assert torch.equal(logits_of_steps(model), wanted)
    assert not calls
    assert len(seen) == 6 * len(blocks_of(model))


def test_a_forced_implementation_runs():
    model = model_of("qwen3_moe")
    wanted = logits_of_steps(model)
    with moestro.use(implementation="reference"), counted() as calls:
        found = logits_of_steps(model)
    assert not calls
    assert relative_error(found, wanted) < 0.2


def test_the_strategy_is_the_models(monkeypatch):
    model, strategies = model_of("qwen3_moe"), []
    for strategy in ("all_experts", "grouped"):
        moestro.accelerate(model, strategy, projections="int8")
        strategies.append(logits_of_steps(model))
        assert follows(model, monkeypatch)
    with moestro.use(strategy="all_experts"), counted() as calls:
        assert torch.equal(logits_of_steps(model), strategies[0])
    assert calls


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_threads(threads, monkeypatch):
    model, had = model_of("olmoe"), torch.get_num_threads()
    logits_of_steps(model)
    try:
        torch.set_num_threads(threads)
        assert follows(model, monkeypatch)
    finally:
        torch.set_num_threads(had)


def test_a_block_that_does_more_is_its_own(monkeypatch):
    class Scaled(Qwen3MoeSparseMoeBlock):
        def forward(self, hidden_states):
            return 2.0 * super().forward(hidden_states)

    class Weighed(Qwen3MoeSparseMoeBlock):
        def forward(self, hidden_states):
            return self.factor * super().forward(hidden_states)

    model = model_of("qwen3_moe")
    block = blocks_of(model)[0]
    block.__class__ = Scaled
    with counted() as calls:
        found = logits_of_steps(model)
    assert len(calls) == 5 * (len(blocks_of(model)) - 1)
    assert torch.equal(found, without(model, monkeypatch))
    block.__class__, block.factor = Weighed, 1.0
    assert follows(model, monkeypatch)
    block.factor = 3.0
    before = logits_of_steps(model)
    assert follows(model, monkeypatch)
    block.factor = 1.0
    assert not torch.equal(logits_of_steps(model), before)


def test_a_forward_put_into_a_class_later_runs(monkeypatch):
    model, seen = model_of("mixtral"), []
    wanted, own = logits_of_steps(model), MixtralSparseMoeBlock.forward
    monkeypatch.setattr(MixtralSparseMoeBlock, "forward", lambda self, x: seen.append(1) or 2.0 * own(self, x))
    found = logits_of_steps(model)
    assert len(seen) >= 6 * len(blocks_of(model))
    assert not torch.equal(found, wanted)


def test_a_router_of_another_class_runs(monkeypatch):
    model, seen = model_of("qwen3_moe"), []
    logits_of_steps(model)
    gate = blocks_of(model)[0].gate
    own = gate._moestro_own_class

    class ToldRouter(own):
        def forward(self, x):
            seen.append(1)
            return super().forward(x)

    gate.__class__ = ToldRouter
    wanted = logits_of_steps(model)
    assert len(seen) == 6
    moestro.accelerate(model, projections="int8")
    assert follows(model, monkeypatch)
    assert torch.equal(logits_of_steps(model), wanted)


def test_what_a_router_was_found_to_compute_goes_with_its_class():
    model = model_of("qwen3_moe")
    gate = blocks_of(model)[0].gate
    before, own = logits_of_steps(model), gate._moestro_own_class

    class LouderRouter(own):
        def forward(self, x):
            logits, weights, ids = super().forward(x)
            return logits, 3.0 * weights, ids

    gate.__class__ = LouderRouter
    wanted = logits_of_steps(model)
    moestro.accelerate(model, projections="int8")
    assert torch.equal(logits_of_steps(model), wanted)
    assert not torch.equal(wanted, before)


def test_logits_that_only_torch_takes(monkeypatch):
    """Of a token with NaN the engine's router says nothing, and its own code runs."""
    model = model_of("qwen3_moe")
    logits_of_steps(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.nan
    cache = cache_of(model)
    with torch.no_grad():
        model(**inputs(1, 7) | {"input_ids": torch.full((1, 7), 7)}, past_key_values=cache, use_cache=True)
        found = model(input_ids=torch.tensor([[5]]), past_key_values=cache, use_cache=True).logits
    assert found.isnan().all()


def test_copies_and_pickles_run_their_own(monkeypatch):
    model = model_of("qwen3_moe")
    wanted = logits_of_steps(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert blocks_of(copied)[0].__dict__.get(KEPT) is None
        assert follows(copied, monkeypatch)
        assert torch.equal(logits_of_steps(copied), wanted)


def test_gradients_go_another_way():
    model = model_of("qwen3_moe")
    logits_of_steps(model)
    cache = cache_of(model)
    with torch.no_grad():
        model(**inputs(1, 7), past_key_values=cache, use_cache=True)
    with counted() as calls:
        model(input_ids=torch.tensor([[5]]), past_key_values=cache, use_cache=True).logits.sum().backward()
    assert not calls
    assert blocks_of(model)[-1].gate.weight.grad is not None


def test_stored_experts(made, monkeypatch):
    for name in ("gpt-oss-20b", "qwen3-30b-a3b"):
        model = moestro.load(made.folder(name), projections="int8")
        with counted() as calls:
            found = logits_of_steps(model)
        assert torch.equal(found, without(model, monkeypatch))
        kept = blocks_of(model)[0].__dict__[KEPT]
        unstacked = bool(blocks_of(model)[0].experts.moestro_store.weights(blocks_of(model)[0].experts).parts.unstacked)
        assert isinstance(kept, Block)
        assert bool(calls) != unstacked


def test_experts_within_a_budget_go_another_way(made, monkeypatch):
    model = moestro.load(made.folder("gpt-oss-20b"), projections="int8", memory="1MB")
    with counted() as calls:
        logits_of_steps(model)
    assert not calls


class Given:
    """A block's step and tokens of its own."""

    def __init__(self, batch=2):
        self.model = model_of("qwen3_moe")
        logits_of_steps(self.model, batch)
        self.block = blocks_of(self.model)[0]
        hidden = self.block.gate.weight.shape[1]
        self.x, self.residual = (torch.randn(batch, 1, hidden).bfloat16() for _ in range(2))


def test_what_is_given_stays_as_it_is():
    given = Given()
    x, residual = given.x.clone(), given.residual.clone()
    with torch.no_grad():
        later = expert_step_for(given.block, given.x).later(given.x, given.residual)
        wanted = given.residual + given.block(given.x)
    (found,) = later.results
    found.fill_(torch.nan)
    assert later.run()
    assert torch.equal(found, wanted)
    assert torch.equal(given.x, x)
    assert torch.equal(given.residual, residual)
    assert found.data_ptr() not in (given.x.data_ptr(), given.residual.data_ptr())


def test_the_engine_refuses_what_does_not_belong_together():
    given = Given()
    with torch.no_grad():
        step = expert_step_for(given.block, given.x)
    out = torch.full_like(given.x, torch.nan)
    x, residual, to = given.x.data_ptr(), given.residual.data_ptr(), out.data_ptr()
    run, stride, code = step.route.engine.run_experts, given.x.stride(0), native.FLOATS[torch.bfloat16]
    wrong = (
        ((0, 2, x, stride, step.handle, code, residual, to), "threads"),
        ((1, 0, x, stride, step.handle, code, residual, to), "sizes out of range"),
        ((1, 1 << 60, x, stride, step.handle, code, residual, to), "sizes out of range"),
        ((1, 2, 0, stride, step.handle, code, residual, to), "no address"),
        ((1, 2, x, stride, step.handle, code, 0, to), "no address"),
        ((1, 2, x, stride, step.handle, code, residual, 0), "no address"),
        ((1, 2, x, stride, step.handle, code, to, to), "no address"),
        ((1, 2, x, stride, step.handle, 9, residual, to), "a dtype other"),
    )
    for arguments, why in wrong:
        with pytest.raises(ValueError, match=why):
            run(*arguments)
    assert out.isnan().all()
